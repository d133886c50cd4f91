"""Conversion of callers' numbers: Python and NumPy numbers are accepted, bools are not."""

import numbers


def as_integer(value: object) -> int | None:
    """Return a Python or NumPy integer as an int; None for any other value, bools included."""
    if isinstance(value, bool):
        return None
    return int(value) if isinstance(value, numbers.Integral) else None


def as_real(value: object) -> float | None:
    """Return a Python or NumPy real number as a float; None for any other value, bools included, and if it is too
    large."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
