"""The backends. Each claims the calls that it can compute, compiles them (emit.py), and loads the result (load.py)."""
