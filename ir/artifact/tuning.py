"""The tuning log of a compile: the tile sizes of kernels and the backends of timed calls, with their times."""

import json
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from ingot.ir.artifact.backend_times import BackendTimes
from ingot.ir.json_text import dump_json

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)
Source = Literal["table", "heuristic", "given", "measured"]
# The fields of a problem: sizes, switches, and names of dtypes.
Problem = Mapping[str, bool | int | str]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*\z")]


class Choice(BaseModel):
    """The tile sizes that were chosen for a Triton kernel on one problem.

    kernel        the kernel's name
    problem       the shapes, dtypes and switches of the call, by name
    tiles         the chosen sizes, by name of the kernel's constant
    source        where the sizes are from: a table of the backend ("table"), its rule for other problems ("heuristic"),
                  a tuning log of the user ("given"), or timing by this compile or an earlier, cached one ("measured")
    microseconds  the time of one call in a chain of equal calls; None if it was not timed
    reason        a remark for the user, such as that the tuning log has no sizes for the problem; "" without one
    """

    model_config = _FROZEN
    kernel: Name
    problem: dict[Name, bool | int | str]
    tiles: dict[Name, Annotated[int, Field(ge=0, lt=1 << 31)]]
    source: Source
    microseconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    reason: str = ""

    @property
    def key(self) -> str:
        """Return a key that identifies the kernel and the problem. It does not depend on the tile sizes."""
        return choice_key(self.kernel, self.problem)

    def decides(self) -> dict[str, object]:
        """Return the fields that determine the compiled code: kernel, problem and tiles."""
        return self.model_dump(mode="json", include={"kernel", "problem", "tiles"})

    def __str__(self) -> str:
        return f"{self.kernel}({_fields(self.problem)})"

    def tiles_text(self) -> str:
        return _fields(self.tiles)


_CHOICES = TypeAdapter(tuple[Choice, ...])


class TuningLog(BaseModel):
    """The tile sizes and backends that a compile chose for one kind of machine.

    target   "cpu" or a compute capability such as "sm_90"
    cores    the machine's number of cores or multiprocessors
    choices  the tile sizes: one record per kernel and problem
    calls    for each call that was timed, the chosen backend and the times
    """

    model_config = _FROZEN
    version: Literal[2] = 2
    target: str
    cores: int
    choices: tuple[Choice, ...]
    calls: tuple[BackendTimes, ...] = ()

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        seen: set[str] = set()
        for choice in self.choices:
            if choice.key in seen:
                raise ValueError(f"two choices for {choice}")
            seen.add(choice.key)
        if len({one.key for one in self.calls}) < len(self.calls):
            raise ValueError("two backends for one call")
        return self

    def given(self) -> tuple[Choice, ...]:
        """Return the log's tile sizes for a compile that uses this log. Their `source` is "given"."""
        return tuple(choice.model_copy(update={"source": "given", "reason": ""}) for choice in self.choices)

    def given_calls(self) -> tuple[BackendTimes, ...]:
        """Return the log's timed calls for a compile that uses this log. Their `source` is "given"."""
        return tuple(one.model_copy(update={"source": "given"}) for one in self.calls)


def read_choices(values: object) -> tuple[Choice, ...]:
    """Read tile sizes from a JSON value and check them. Raises pydantic's ValidationError for malformed values."""
    return _CHOICES.validate_json(json.dumps(values))


def choice_key(kernel: str, problem: Problem) -> str:
    return dump_json({"kernel": kernel, "problem": dict(problem)})


def _fields(fields: Mapping[str, object]) -> str:
    """Return fields as text: `name=value`, or only the name for True. False is left out."""
    return ", ".join(
        name if value is True else f"{name}={value}" for name, value in fields.items() if value is not False
    )
