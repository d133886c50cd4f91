"""The records of pass runs: the program before and after each run, its rewrites and refusals."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Numerics(enum.Enum):
    """How much a pass may change the results of a program.

    EXACT: results under the interpreter stay bitwise the same, but for the sign of a zero. ROUNDING: the error against
    a float64 interpretation is at most 1.25 times that of the program before, plus the tolerance of the dtype. LOSSY:
    results may change, as with quantization, and need a quality score.
    """

    EXACT = "exact"
    ROUNDING = "rounding"
    LOSSY = "lossy"


@dataclass(frozen=True)
class Refusal:
    """The reason why a pass did not rewrite a node that it almost matched, or why a backend declined a call."""

    node: str
    reason: str


@dataclass(frozen=True)
class Rewrite:
    """One rewrite that a pass applied; `index` counts the rewrites of the pass from 0.

    `anchor` is the name of the value that the pass matched. `origin` is where this value comes from in the model, such
    as "layer 3, attention.py:176". `made` names the values that the rewrite added and that still exist after the pass.
    Names are as in a program's text, without "%".
    """

    index: int
    anchor: str
    origin: str
    made: tuple[str, ...] = ()


class Snapshot:
    """The text of a program, printed only when `text` is first read: some compiles never read it.

    The program must not change before that. `print_program` is an argument because this module cannot import the
    printer, which imports this module.
    """

    def __init__(self, program: object, print_program: Callable[[Any], str]) -> None:
        self._program: object | None = program
        self._print = print_program
        self._text = ""

    def of(self, program: object) -> bool:
        """Return whether this snapshot holds the object `program` itself and has not printed it yet."""
        return self._program is program

    @property
    def text(self) -> str:
        if self._program is not None:
            self._text, self._program = self._print(self._program), None
        return self._text


@dataclass(frozen=True)
class PassRecord:
    """The record of one run of one pass, on the program of the model's entry `entry`.

    `bucket` names the program's bucket class (range of step sizes); None if it has none. `stage` is the pipeline stage
    of the program after the pass. `op_count_diff` maps ops to the change in their number of calls. `peak_bytes` is the
    most resident memory of the process during the run; None if the system does not report it. No key that identifies an
    artifact depends on `seconds` and `peak_bytes`.
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
        """Return the record as it is written to passes.json: without programs, time and memory.

        Each rewrite is a list [anchor, origin, made]: the value that was rewritten, where it comes from in the model,
        and the values that were added.
        """
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
