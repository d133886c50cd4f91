"""What a pass leaves behind: enough to show, diff and repeat it."""

import enum
from dataclasses import dataclass
from typing import Any


class Numerics(enum.Enum):
    """A pass's promise. EXACT: bitwise the same under the interpreter. ROUNDING: against a float64 interpretation the
    error is at most 1.25 times that of the program before, plus the tolerance table. LOSSY: needs a quality score."""

    EXACT = "exact"
    ROUNDING = "rounding"
    LOSSY = "lossy"


@dataclass(frozen=True)
class Refusal:
    """A place where a pass nearly matched, or a backend's No, with the reason."""

    node: str
    reason: str


@dataclass(frozen=True)
class Rewrite:
    """One rewrite of a pass, the `index`th from 0: the value at which it happened, and what it made that is still there
    when the pass has ended. Values are named as in the text form, without the percent sign."""

    index: int
    anchor: str
    origin: str
    made: tuple[str, ...] = ()


@dataclass(frozen=True)
class PassRecord:
    """One run of one pass, on a program of the model's entry `entry`. `seconds` stays outside every identity."""

    name: str
    entry: str
    options: dict[str, Any]
    source_hash: str
    bucket: str | None
    stage: str
    ir_before: str
    ir_after: str
    rewrites: tuple[Rewrite, ...]
    refusals: tuple[Refusal, ...]
    op_count_diff: dict[str, int]
    numerics: Numerics
    seconds: float

    @property
    def matches(self) -> int:
        return len(self.rewrites)

    def summary(self) -> dict[str, Any]:
        """What the trace keeps beside the program text: everything but texts and time."""
        return {
            "name": self.name,
            "entry": self.entry,
            "options": self.options,
            "source_hash": self.source_hash,
            "bucket": self.bucket,
            "stage": self.stage,
            "matches": self.matches,
            "refusals": [{"node": refusal.node, "reason": refusal.reason} for refusal in self.refusals],
            "op_count_diff": self.op_count_diff,
            "numerics": self.numerics.value,
        }
