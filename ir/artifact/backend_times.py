"""The measured times of a call's backends, and the backend chosen by them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ingot.ir.artifact.plan import Executable

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)
Microseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Times within this fraction of the least count as equal; the order of the claims then decides.
_ALIKE = 0.02


class Candidate(BaseModel):
    """A backend of a call, with the executable that it built and its folder; None for a backend of existing
    functions."""

    model_config = _FROZEN
    backend: str
    executable: Executable | None = None
    folder: str | None = None


class BackendTime(BaseModel):
    """The time of one call in a step with `tokens` tokens of `sequences` sequences."""

    model_config = _FROZEN
    tokens: Annotated[int, Field(gt=0)]
    sequences: Annotated[int, Field(gt=0)]
    microseconds: Microseconds


class BackendTimes(BaseModel):
    """The backend of the calls with the text `call`, in the steps of the bucket class with the text `bucket`.

    `times` holds the times of all timed backends, the cheapest claim first, each in the same steps. `source` is
    "measured" if times decided, in this compile or in the one that filled the cache, and "given" if a log did.
    """

    model_config = _FROZEN
    call: tuple[str, ...]
    bucket: str
    backend: str
    times: dict[str, tuple[BackendTime, ...]]
    source: Literal["measured", "given"]

    @property
    def key(self) -> str:
        """Return a key that is equal for times of the same call."""
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
    """The way in which a call's backend was chosen among several: by times ("timed" in this compile or the one that
    filled the cache, "given" by a log), or by the costs of their claims ("ranked") for `reason`."""

    model_config = _FROZEN
    decided: Literal["timed", "given", "ranked"]
    reason: str = ""
    times: dict[str, tuple[BackendTime, ...]] = {}

    @staticmethod
    def of(found: "BackendTimes | str") -> "Decision":
        """Return the decision from the times, or from the reason why there are none."""
        if isinstance(found, str):
            return Decision(decided="ranked", reason=found)
        return Decision(decided="timed" if found.source == "measured" else "given", times=found.times)

    def of_backend(self, backend: str) -> str:
        """Return the times of a backend as text; "" if it was not timed."""
        return ", ".join(f"{one.microseconds:.1f} µs of {one.tokens} tokens" for one in self.times.get(backend, ()))

    def __str__(self) -> str:
        return f"{self.decided}: {self.reason}" if self.reason else self.decided


def call_key(call: tuple[str, ...], bucket: str) -> str:
    return "\n".join((bucket, *call))


def fastest(times: dict[str, tuple[BackendTime, ...]]) -> str:
    """Return the backend with the least total time over all steps, so that long steps count most. Among equals, the
    first."""
    total = {backend: sum(one.microseconds for one in some) for backend, some in times.items()}
    bound = min(total.values()) * (1 + _ALIKE)
    return next(backend for backend in times if total[backend] <= bound)
