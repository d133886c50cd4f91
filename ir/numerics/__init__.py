"""Numerics: tolerances, the contracts of passes, and the harness that runs programs to check both."""
