"""What the tuning log knows problems by, read back as the dataclass that a kernel has for them."""

from dataclasses import fields
from typing import TypeVar

from ingot.ir.artifact.tuning import Choice

T = TypeVar("T")


def read_problem(kind: type[T], choice: Choice) -> T:
    """The problem of a choice, a dataclass `kind` of integers above zero, switches and names. Raises TypeError or
    ValueError when it is none."""
    problem = kind(**choice.problem)
    for field in fields(kind):  # type: ignore[arg-type]  # a dataclass
        value = getattr(problem, field.name)
        if type(value) is not field.type or (field.type is int and value < 1):
            raise ValueError(f"{field.name} is {value!r}")
    return problem
