"""Conversion of callers' numbers: Python and NumPy numbers are accepted, bools are not."""

import numbers


def as_integer(value: object) -> int | None:
    """Return `value` as an int, or None if it is no integer."""
    if isinstance(value, bool):
        return None
    return int(value) if isinstance(value, numbers.Integral) else None


def as_real(value: object) -> float | None:
    """Return `value` as a float, or None if it is no real number or too large."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
