"""Times of the backends of a call: which of them computes it, and what each takes in which steps."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ingot.ir.artifact.plan import Executable

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)
Microseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Of times that lie so near to the least, none is less: the order of the claims decides.
_ALIKE = 0.02


class Candidate(BaseModel):
    """A backend of a call: what it built and the folder of that; None for one that has its functions already."""

    model_config = _FROZEN
    backend: str
    executable: Executable | None = None
    folder: str | None = None


class BackendTime(BaseModel):
    """What one call takes in a step of `tokens` tokens of `sequences` sequences."""

    model_config = _FROZEN
    tokens: Annotated[int, Field(gt=0)]
    sequences: Annotated[int, Field(gt=0)]
    microseconds: Microseconds


class BackendTimes(BaseModel):
    """The backend of the calls that print as `call`, in the steps of the bucket class that prints as `bucket`.

    `times` has those of all backends that were timed, the cheapest claim first, each in the same steps. `source` says
    whether the times decided, in this compile or in the one that filled the cache, or a log that was given.
    """

    model_config = _FROZEN
    call: tuple[str, ...]
    bucket: str
    backend: str
    times: dict[str, tuple[BackendTime, ...]]
    source: Literal["measured", "given"]

    @property
    def key(self) -> str:
        """Equal for times of the same call."""
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
    """How the backend of a call was chosen among several: by times ("timed" in this compile or the one that filled the
    cache, "given" by a log), or by the costs of their claims ("ranked"), and then for which reason."""

    model_config = _FROZEN
    decided: Literal["timed", "given", "ranked"]
    reason: str = ""
    times: dict[str, tuple[BackendTime, ...]] = {}

    @staticmethod
    def of(found: "BackendTimes | str") -> "Decision":
        """From the times, or the reason why there are none."""
        if isinstance(found, str):
            return Decision(decided="ranked", reason=found)
        return Decision(decided="timed" if found.source == "measured" else "given", times=found.times)

    def of_backend(self, backend: str) -> str:
        """What a backend takes; "" where it was not timed."""
        return ", ".join(f"{one.microseconds:.1f} µs of {one.tokens} tokens" for one in self.times.get(backend, ()))

    def __str__(self) -> str:
        return f"{self.decided}: {self.reason}" if self.reason else self.decided


def call_key(call: tuple[str, ...], bucket: str) -> str:
    return "\n".join((bucket, *call))


def fastest(times: dict[str, tuple[BackendTime, ...]]) -> str:
    """The backend that takes the least time for all steps together: long steps are where the time goes. Of those that
    are alike, the first."""
    total = {backend: sum(one.microseconds for one in some) for backend, some in times.items()}
    bound = min(total.values()) * (1 + _ALIKE)
    return next(backend for backend in times if total[backend] <= bound)
