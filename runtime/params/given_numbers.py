"""Conversion of callers' numbers: Python and NumPy numbers are accepted, bools are not."""

import numbers


def as_integer(value: object) -> int | None:
    """Return `value` as an int if it is a Python or NumPy integer; None for any other value, including bools."""
    if isinstance(value, bool):
        return None
    return int(value) if isinstance(value, numbers.Integral) else None


def as_real(value: object) -> float | None:
    """Return `value` as a float if it is a Python or NumPy real number; None for any other value, including bools and
    integers too large for a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
