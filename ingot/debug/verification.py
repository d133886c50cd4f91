"""The result of `ingot verify`, which repeats an artifact's golden run: as data, JSON and an error."""

from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ingot.ir.errors import IngotError, MismatchError
from ingot.ir.listing import listed


class Promise(Enum):
    """What a repeated run on this machine must reproduce.

    BITWISE: the same bits. TOLERANCE: logits within the tolerance of the model's dtype.
    """

    BITWISE = "bitwise"
    TOLERANCE = "tolerance"


@dataclass(frozen=True)
class RowDifference:
    """A row of logits that differs too much from the golden run. This short run was recorded at the end of the compile.

    The row belongs to step `step`, and to the token of request `request` at position `position`. `error` is the largest
    difference of a recorded logit, and `allowed` its limit. `token` is the token that is sampled now. `recorded_token`
    is the token of the golden run.
    """

    entry: str
    bucket: str
    step: int
    request: int
    position: int
    error: float
    allowed: float
    token: int
    recorded_token: int

    def __str__(self) -> str:
        entry = "" if self.entry == "main" else f"entry {self.entry}, "
        return f"{entry}step {self.step} (bucket class {self.bucket}), request {self.request}, position {self.position}"


@dataclass(frozen=True)
class BucketResult:
    """A comparison with the golden run, a short run recorded at the end of the compile. It covers the steps of one
    entry and bucket class (a range of step sizes).

    steps           the number of steps
    positions       the number of compared positions
    bitwise_equal   the number of positions with the same bits
    tokens_equal    the number of positions with the same token
    max_error       the largest error of a recorded logit
    allowed         the limit of the error at that position
    """

    entry: str
    bucket: str
    steps: int
    positions: int
    bitwise_equal: int
    tokens_equal: int
    max_error: float
    allowed: float


@dataclass(frozen=True)
class Verification:
    """The result of repeating the golden run, a short run recorded at the end of the compile.

    promise       what the repeated run must reproduce
    why           the reason for this promise
    changed       code files and backends that have changed since the golden run
    results       the comparisons, one for each entry and bucket class (a range of step sizes)
    wrong         the number of rows of logits that differ too much
    first         the first of these rows; None if there is none
    first_token   the first of these rows with another token; None if there is none
    failure       the error that stopped the run; None if it finished
    """

    artifact: Path
    build_id: str
    promise: Promise
    why: str
    changed: tuple[str, ...] = ()
    results: tuple[BucketResult, ...] = ()
    wrong: int = 0
    first: RowDifference | None = None
    first_token: RowDifference | None = None
    failure: IngotError | None = None

    @property
    def holds(self) -> bool:
        return not (self.changed or self.wrong or self.failure)

    def error(self) -> MismatchError | None:
        """Return the error that reports how the repeated run differs from the golden run; None if it does not
        differ."""
        if self.holds:
            return None
        positions = sum(result.positions for result in self.results)
        said, where = ["the golden run does not repeat"], [str(self.artifact)]
        if self.changed:
            said.append(f"the artifact now runs other code than when it was compiled:\n{listed(list(self.changed))}")
        if self.failure is not None:
            said.append(f"it failed: {self.failure.what}")
            where.append(self.failure.where)
        elif self.first is None:
            said.append(f"the logits and tokens of all {positions} positions are as recorded")
        else:
            said.append(f"logits or tokens of {self.wrong} of {positions} positions differ")
            where.append(f"the first is {self.first}: error {self.first.error:.3g}, allowed {self.first.allowed:.3g}")
        if (one := self.first_token) is not None:
            where.append(f"the first token that differs is {one.token}, recorded {one.recorded_token}: {one}")
        return MismatchError(
            "\n".join(said),
            where="\n            ".join(line for line in where if line),
            expected=f"{_OWED[self.promise]}, since {self.why}",
            hint=f"`ingot bisect {self.artifact}` finds the fault; compiling again makes a new golden run",
        )

    def to_json(self) -> dict[str, Any]:
        error = self.error()
        return {
            "artifact": str(self.artifact),
            "build_id": self.build_id,
            "holds": self.holds,
            "promise": self.promise.value,
            "why": self.why,
            "changed": list(self.changed),
            "results": [asdict(result) for result in self.results],
            "wrong": self.wrong,
            "first": asdict(self.first) if self.first else None,
            "first_token": asdict(self.first_token) if self.first_token else None,
            "error": str(error) if error else None,
        }


_OWED = {Promise.BITWISE: "the same bits", Promise.TOLERANCE: "logits within the tolerance of the model's dtype"}
