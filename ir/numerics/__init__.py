"""Numerics: tolerances of results, how much passes may change them, and the harness that runs programs to check."""
