"""The records of pass runs: the program before and after each run, its rewrites and refusals."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Numerics(enum.Enum):
    """How much a pass may change the results of a program.

    EXACT: they stay bitwise the same under the interpreter, but for the sign of a zero. ROUNDING: the error against a
    float64 interpretation is at most 1.25 times that of the program before, plus the tolerance of the dtype. LOSSY:
    they may change, as with quantization, and need a quality score.
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
    """One rewrite that a pass applied; `index` counts them from 0.

    `anchor` is the name of the value at which it was applied, `origin` where that comes from in the model. `made` names
    the values that it added and that exist at the end of the pass. Names are as in a program's text, without "%".
    """

    index: int
    anchor: str
    origin: str
    made: tuple[str, ...] = ()


class Snapshot:
    """The text of a program, printed when it is first read, because some compiles never read it.

    The program must not change until then. The printer is an argument, because this module cannot import programs:
    they import it.
    """

    def __init__(self, program: object, print_program: Callable[[Any], str]) -> None:
        self._program: object | None = program
        self._print = print_program
        self._text = ""

    def of(self, program: object) -> bool:
        """Return whether this is a snapshot of the object `program` that is not printed yet."""
        return self._program is program

    @property
    def text(self) -> str:
        if self._program is not None:
            self._text, self._program = self._print(self._program), None
        return self._text


@dataclass(frozen=True)
class PassRecord:
    """The record of one run of one pass, on the program of the model's entry `entry`.

    `bucket` names the bucket class (range of step sizes) of the program, if it has one. `stage` is the pipeline stage
    that the pass leads to. `op_count_diff` maps ops to the change in their number of calls. `peak_bytes` is the most
    resident memory of the process during the run; None if the system does not report it. No identity of an artifact
    includes `seconds` and `peak_bytes`.
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

        Each rewrite is a list [anchor, origin, made].
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
