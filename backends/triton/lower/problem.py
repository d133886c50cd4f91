"""Read the problem of a tuning log's choice back into the dataclass of its kernel."""

from dataclasses import fields
from typing import TypeVar

from ingot.ir.artifact.tuning import Choice

T = TypeVar("T")


def read_problem(kind: type[T], choice: Choice) -> T:
    """Return the problem of a choice, as a dataclass `kind` of positive integers, booleans and strings.

    Raises TypeError or ValueError if the fields do not fit.
    """
    problem = kind(**choice.problem)
    for field in fields(kind):  # type: ignore[arg-type]  # a dataclass
        value = getattr(problem, field.name)
        if type(value) is not field.type or (field.type is int and value < 1):
            raise ValueError(f"{field.name} is {value!r}")
    return problem
