"""What a pass leaves behind: enough to show, diff and repeat it."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
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


class Snapshot:
    """A program's text, printed when it is first asked for: most compiles ask once for all, some never.

    The printer is an argument, because programs hold records: this module imports neither programs nor their text.
    """

    def __init__(self, program: object, print_program: Callable[[Any], str]) -> None:
        self._program: object | None = program
        self._print = print_program
        self._text = ""

    def of(self, program: object) -> bool:
        """Whether it is of this very program, and not printed yet."""
        return self._program is program

    @property
    def text(self) -> str:
        if self._program is not None:
            self._text, self._program = self._print(self._program), None
        return self._text


@dataclass(frozen=True)
class PassRecord:
    """One run of one pass, on a program of the model's entry `entry`.

    `seconds` and `peak_bytes`, the most resident memory that is known of the process during the run (None where the
    system does not tell), stay outside every identity.
    """

    name: str
    entry: str
    options: dict[str, Any]
    source_hash: str
    bucket: str | None
    stage: str
    rewrites: tuple[Rewrite, ...]
    refusals: tuple[Refusal, ...]
    op_count_diff: dict[str, int]
    numerics: Numerics
    seconds: float
    peak_bytes: int | None
    before: Snapshot = field(repr=False, compare=False)
    after: Snapshot = field(repr=False, compare=False)

    @property
    def ir_before(self) -> str:
        """The program before the pass, as text."""
        return self.before.text

    @property
    def ir_after(self) -> str:
        """The program as the pass left it, as text."""
        return self.after.text

    @property
    def matches(self) -> int:
        return len(self.rewrites)

    def summary(self) -> dict[str, Any]:
        """What the trace keeps beside the program text, as JSON: everything but texts, time and memory. A rewrite is
        its anchor, that one's origin and what was made; its index is its place."""
        return {
            "name": self.name,
            "entry": self.entry,
            "options": self.options,
            "source_hash": self.source_hash,
            "bucket": self.bucket,
            "stage": self.stage,
            "matches": self.matches,
            "rewrites": [[one.anchor, one.origin, list(one.made)] for one in self.rewrites],
            "refusals": [{"node": refusal.node, "reason": refusal.reason} for refusal in self.refusals],
            "op_count_diff": self.op_count_diff,
            "numerics": self.numerics.value,
        }
