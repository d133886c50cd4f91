"""Numbers that callers give: Python's and NumPy's count, and truth values do not."""

import numbers


def as_integer(value: object) -> int | None:
    """`value` as an int; None when it is no integer."""
    if isinstance(value, bool):
        return None
    return int(value) if isinstance(value, numbers.Integral) else None


def as_real(value: object) -> float | None:
    """`value` as a float; None when it is no real number, or larger than every float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
