"""The records of passes, from which a pass can be shown, diffed and repeated."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Numerics(enum.Enum):
    """The numerics contract of a pass. EXACT: bitwise the same under the interpreter. ROUNDING: the error against a
    float64 interpretation is at most 1.25 times that of the program before, plus the tolerance table. LOSSY: needs a
    quality score."""

    EXACT = "exact"
    ROUNDING = "rounding"
    LOSSY = "lossy"


@dataclass(frozen=True)
class Refusal:
    """A node where a pass almost matched, or a backend's No, with the reason."""

    node: str
    reason: str


@dataclass(frozen=True)
class Rewrite:
    """One rewrite of a pass, with `index` from 0: the value at which it happened, and the values that it made and that
    exist at the end of the pass. Values are named as in the text form, without the percent sign."""

    index: int
    anchor: str
    origin: str
    made: tuple[str, ...] = ()


class Snapshot:
    """A program's text, printed at the first request: most compiles print all, some none.

    The printer is an argument, because programs hold records: this module may not import programs or their text form.
    """

    def __init__(self, program: object, print_program: Callable[[Any], str]) -> None:
        self._program: object | None = program
        self._print = print_program
        self._text = ""

    def of(self, program: object) -> bool:
        """Return whether it is a snapshot of this very object, and not printed yet."""
        return self._program is program

    @property
    def text(self) -> str:
        if self._program is not None:
            self._text, self._program = self._print(self._program), None
        return self._text


@dataclass(frozen=True)
class PassRecord:
    """One run of one pass, on a program of the model's entry `entry`.

    No identity includes `seconds` and `peak_bytes`, the most resident memory known of the process during the run (None
    if the system does not report it).
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
        """Return the program before the pass, as text."""
        return self.before.text

    @property
    def ir_after(self) -> str:
        """Return the program after the pass, as text."""
        return self.after.text

    @property
    def matches(self) -> int:
        return len(self.rewrites)

    def summary(self) -> dict[str, Any]:
        """Return the part of the record in passes.json: everything but texts, time and memory. A rewrite is [anchor,
        origin, made]; its index is its position."""
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
