"""The measured times of the backends that can compute a call, and the choice among these backends."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ingot.ir.artifact.plan import Executable

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)
Microseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Times within this fraction of the least count as equal; the order of the claims then decides.
_ALIKE = 0.02


class Candidate(BaseModel):
    """One of several backends that can compute a call; a compile times them to choose the fastest.

    `executable` is the code that the backend compiled for the call, and `folder` the folder of its files. Both are None
    for a backend that calls existing functions, such as those of a library.
    """

    model_config = _FROZEN
    backend: str
    executable: Executable | None = None
    folder: str | None = None


class BackendTime(BaseModel):
    """The measured time of one call of an op, in a step with `tokens` tokens of `sequences` sequences."""

    model_config = _FROZEN
    tokens: Annotated[int, Field(gt=0)]
    sequences: Annotated[int, Field(gt=0)]
    microseconds: Microseconds


class BackendTimes(BaseModel):
    """The measured times of every backend that can compute a call, and the chosen backend.

    `call` is the call's text by lines. `bucket` is the text of the bucket class (range of step sizes) that the call was
    timed for. Calls with equal `call` and `bucket` share this record. `times` maps each backend to its times, all for
    the same steps; the backend with the lowest claimed cost comes first. `source` is "measured" if this compile timed
    the call or found the times in the compile cache, and "given" if a tuning log holds them.
    """

    model_config = _FROZEN
    call: tuple[str, ...]
    bucket: str
    backend: str
    times: dict[str, tuple[BackendTime, ...]]
    source: Literal["measured", "given"]

    @property
    def key(self) -> str:
        """Return a key that identifies the call and its bucket class (range of step sizes)."""
        return call_key(self.call, self.bucket)

    @model_validator(mode="after")
    def _complete(self) -> "BackendTimes":
        if self.backend not in self.times:
            raise ValueError(f"no times of the backend {self.backend}")
        steps = {tuple((one.tokens, one.sequences) for one in some) for some in self.times.values()}
        if len(steps) != 1 or steps == {()}:
            raise ValueError("the backends were timed in different steps")
        return self


class Decision(BaseModel):
    """How the compiler chose the backend of a call that several backends can compute.

    `decided` is "timed" if the choice follows from times that were measured or found in the compile cache. It is
    "given" for times of a tuning log, and "ranked" for the costs that backends claim; `reason` then says why no times
    were used. `times` maps each timed backend to its times.
    """

    model_config = _FROZEN
    decided: Literal["timed", "given", "ranked"]
    reason: str = ""
    times: dict[str, tuple[BackendTime, ...]] = {}

    @staticmethod
    def of(found: "BackendTimes | str") -> "Decision":
        """Return the decision that follows from `found`: the measured times, or text that says why there are none."""
        if isinstance(found, str):
            return Decision(decided="ranked", reason=found)
        return Decision(decided="timed" if found.source == "measured" else "given", times=found.times)

    def of_backend(self, backend: str) -> str:
        """Return the times of one backend as text, such as "3.1 µs of 16 tokens"; "" if it was not timed."""
        return ", ".join(f"{one.microseconds:.1f} µs of {one.tokens} tokens" for one in self.times.get(backend, ()))

    def __str__(self) -> str:
        return f"{self.decided}: {self.reason}" if self.reason else self.decided


def call_key(call: tuple[str, ...], bucket: str) -> str:
    return "\n".join((bucket, *call))


def fastest(times: dict[str, tuple[BackendTime, ...]]) -> str:
    """Return the backend with the least time, summed over all timed steps.

    `times` maps each backend to its times. Sums within 2 % of the least count as equal; the first such backend wins.
    """
    total = {backend: sum(one.microseconds for one in some) for backend, some in times.items()}
    bound = min(total.values()) * (1 + _ALIKE)
    return next(backend for backend in times if total[backend] <= bound)
