"""The measured times of the backends that can compute a call, and the choice among these backends."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ingot.ir.artifact.plan import Executable

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)
Microseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Times within this fraction of the least count as equal; the order of the claims then decides.
_ALIKE = 0.02


class Candidate(BaseModel):
    """A backend that can compute a call. A compile times several such backends to choose the fastest.

    backend     the backend's name
    executable  the code that it compiled for the call; None if it calls existing functions, such as a library's
    folder      the folder with the files of `executable`; None without it
    """

    model_config = _FROZEN
    backend: str
    executable: Executable | None = None
    folder: str | None = None


class BackendTime(BaseModel):
    """The measured time of one call of an op, in a step of `tokens` tokens and `sequences` sequences."""

    model_config = _FROZEN
    tokens: Annotated[int, Field(gt=0)]
    sequences: Annotated[int, Field(gt=0)]
    microseconds: Microseconds


class BackendTimes(BaseModel):
    """The measured times of all backends that can compute a call, and the chosen backend.

    call     the lines of the call's text
    bucket   the text of the bucket class (range of step sizes) for which the call was timed
    backend  the fastest backend
    times    by backend, its times for a list of steps; the backend that claims the lowest cost comes first
    source   "measured" if this compile or an earlier, cached one timed the call; "given" if a tuning log has the times

    Calls with equal `call` and `bucket` share this record.
    """

    model_config = _FROZEN
    call: tuple[str, ...]
    bucket: str
    backend: str
    times: dict[str, tuple[BackendTime, ...]]
    source: Literal["measured", "given"]

    @property
    def key(self) -> str:
        """Return a key that identifies the call and its bucket class, which is a range of step sizes."""
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
    """How a compile chose one of several backends for a call.

    decided  "timed" by times that were measured or found in the compile cache, "given" by times of a tuning log, or
             "ranked" by the costs that backends claim
    reason   why the times did not decide; "" if they did
    times    the times of each timed backend, by backend
    """

    model_config = _FROZEN
    decided: Literal["timed", "given", "ranked"]
    reason: str = ""
    times: dict[str, tuple[BackendTime, ...]] = {}

    @staticmethod
    def of(found: "BackendTimes | str", chosen: str) -> "Decision":
        """Return the decision for a call, for which the backend `chosen` was chosen.

        `found` holds its measured times, or says why there are none.
        """
        if isinstance(found, str):
            return Decision(decided="ranked", reason=found)
        if chosen != found.backend:
            slow = " and ".join(name for name in found.times if name != found.backend)
            reason = f"{slow} took longer than {found.backend}, which claims a higher cost than {chosen}"
            return Decision(decided="ranked", reason=reason, times=found.times)
        return Decision(decided="timed" if found.source == "measured" else "given", times=found.times)

    def of_backend(self, backend: str) -> str:
        """Return the times of a backend as text, such as "3.1 µs of 16 tokens"; "" if it was not timed."""
        return ", ".join(f"{one.microseconds:.1f} µs of {one.tokens} tokens" for one in self.times.get(backend, ()))

    def __str__(self) -> str:
        return f"{self.decided}: {self.reason}" if self.reason else self.decided


def call_key(call: tuple[str, ...], bucket: str) -> str:
    return "\n".join((bucket, *call))


def fastest(times: dict[str, tuple[BackendTime, ...]]) -> str:
    """Return the backend with the least total time of all timed steps.

    `times` holds the times of each backend. Totals within 2 % of the least count as equal. The first of them wins.
    """
    total = {backend: sum(one.microseconds for one in some) for backend, some in times.items()}
    bound = min(total.values()) * (1 + _ALIKE)
    return next(backend for backend in times if total[backend] <= bound)
