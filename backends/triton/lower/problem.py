"""Read the problem of a tuning log's entry (the sizes and dtypes of a kernel's call) into a dataclass."""

from dataclasses import fields
from typing import TypeVar

from ingot.ir.artifact.tuning import Choice

T = TypeVar("T")


def read_problem(kind: type[T], choice: Choice) -> T:
    """Return the sizes and dtypes of the kernel call that `choice`, an entry of the tuning log, is for.

    `kind` is the dataclass of the result. Its fields are positive integers, booleans and strings. Raises TypeError or
    ValueError if the entry's fields have other names or types.
    """
    problem = kind(**choice.problem)
    for field in fields(kind):  # type: ignore[arg-type]  # a dataclass
        value = getattr(problem, field.name)
        if type(value) is not field.type or (field.type is int and value < 1):
            raise ValueError(f"{field.name} is {value!r}")
    return problem
