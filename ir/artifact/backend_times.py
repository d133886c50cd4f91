"""The measured times of the backends that can compute a call, and the choice among these backends."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ingot.ir.artifact.plan import Executable

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)
Microseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Times within this fraction of the least count as equal; the order of the claims then decides.
_ALIKE = 0.02


class Candidate(BaseModel):
    """A backend that can compute a call, to be timed against others.

    `executable` is the code that it compiled for the call, stored in `folder`; both are None for a backend that calls
    existing functions.
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
    """The backend that was chosen for a call by timing, with the measured times.

    `call` is the call's text by lines and `bucket` the text of the bucket class (range of step sizes) that it was timed
    for; together they identify equal calls. `times` maps each timed backend to its times, the one with the lowest
    claimed cost first. All were timed in the same steps. `source` is "measured" if this compile, or the one that filled
    the cache, timed them, and "given" if a tuning log did.
    """

    model_config = _FROZEN
    call: tuple[str, ...]
    bucket: str
    backend: str
    times: dict[str, tuple[BackendTime, ...]]
    source: Literal["measured", "given"]

    @property
    def key(self) -> str:
        """Return a key that identifies the call and its bucket class."""
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
    """How a call's backend was chosen among several.

    `decided` is "timed" if measured times decided, from this compile or the one that filled the cache; "given" if the
    times of a tuning log did; "ranked" if the costs that backends claim did, and `reason` says why. `times` maps each
    timed backend to its times.
    """

    model_config = _FROZEN
    decided: Literal["timed", "given", "ranked"]
    reason: str = ""
    times: dict[str, tuple[BackendTime, ...]] = {}

    @staticmethod
    def of(found: "BackendTimes | str") -> "Decision":
        """Return how a backend was chosen, from the times of the backends, or from the reason why there are none."""
        if isinstance(found, str):
            return Decision(decided="ranked", reason=found)
        return Decision(decided="timed" if found.source == "measured" else "given", times=found.times)

    def of_backend(self, backend: str) -> str:
        """Return the measured times of one backend as text, for display; "" if it was not timed."""
        return ", ".join(f"{one.microseconds:.1f} µs of {one.tokens} tokens" for one in self.times.get(backend, ()))

    def __str__(self) -> str:
        return f"{self.decided}: {self.reason}" if self.reason else self.decided


def call_key(call: tuple[str, ...], bucket: str) -> str:
    return "\n".join((bucket, *call))


def fastest(times: dict[str, tuple[BackendTime, ...]]) -> str:
    """Return the backend with the least total time over all timed steps.

    `times` maps each backend to its times. The first one within 2 % of the least is returned.
    """
    total = {backend: sum(one.microseconds for one in some) for backend, some in times.items()}
    bound = min(total.values()) * (1 + _ALIKE)
    return next(backend for backend in times if total[backend] <= bound)
