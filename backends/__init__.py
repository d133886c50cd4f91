"""Backends claim subgraphs, emit executables (emit.py) and load them (load.py)."""
