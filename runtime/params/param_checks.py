"""Checks of request parameters. Each check takes the name of a field ("SamplingParams.n") and a value, and returns the
normalized value. It raises RequestError, naming field, value and legal range, for a bad one."""

from collections.abc import Callable
from typing import Any, NoReturn

from ingot.ir.errors import RequestError
from ingot.runtime.params.given_numbers import as_integer, as_real

Check = Callable[[str, object], Any]


def refuse(where: str, value: object, expected: str) -> NoReturn:
    """Raise RequestError for an invalid `value`.

    where      names its field, such as "SamplingParams.n"
    expected   describes the valid values, such as "an integer >= 1"
    """
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    raise RequestError(f"{where.rpartition('.')[2]} = {shown} is out of range", where=where, expected=expected)


def integer(low: int, high: int | None = None, expected: str = "") -> Check:
    """Return a check that accepts an integer in [low, high], of Python's or NumPy's types, but no bool. `high` None
    means no upper limit. `expected` describes the valid values in errors."""
    legal = expected or (f"an integer in [{low}, {high}]" if high is not None else f"an integer >= {low}")

    def check(where: str, value: object) -> int:
        number = as_integer(value)
        if number is None or number < low or (high is not None and number > high):
            refuse(where, value, legal)
        return number

    return check


def real(low: float, high: float, expected: str) -> Check:
    """Return a check that accepts a real number in [low, high], but no bool, and returns it as a float. `expected`
    describes the valid values in errors."""

    def check(where: str, value: object) -> float:
        number = as_real(value)
        if number is None or not low <= number <= high:  # also false for NaN
            refuse(where, value, expected)
        return number

    return check


def boolean(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        refuse(where, value, "True or False")
    return value


def optional(check: Check) -> Check:
    """Return a check that accepts None, and every value that `check` accepts."""
    return lambda where, value: None if value is None else check(where, value)


def several(one: Check, expected: str) -> Check:
    """Return a check that accepts a list or tuple, and returns it as a tuple; for None, an empty tuple.

    one        the check of each element
    expected   describes the valid values in errors
    """

    def check(where: str, value: object) -> tuple[Any, ...]:
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            refuse(where, value, expected)
        return tuple(one(where, item) for item in value)

    return check
