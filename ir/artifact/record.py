"""The records of pass runs: the program before and after each run, its rewrites and refusals."""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any


class Numerics(enum.Enum):
    """How much a pass may change the results of a program.

    EXACT     not at all: the interpreter computes equal bits, except for the sign of zeros
    ROUNDING  the error against float64 may grow by a factor of 1.25, plus the tolerance of the dtype. It is the root
              mean square of a tensor's errors; the largest one may grow by 4
    LOSSY     more than that, as in quantization; the change needs a quality score
    """

    EXACT = "exact"
    ROUNDING = "rounding"
    LOSSY = "lossy"


@dataclass(frozen=True)
class Refusal:
    """Why a pass did not rewrite a node that it almost matched, or why a backend declined a call."""

    node: str
    reason: str


def encode_refusals(refusals: Iterable[Refusal]) -> dict[str, Any]:
    """Return refusals as the JSON value of an `ingot.ir.artifact.refusals.RefusalTable`."""
    reasons: dict[str, int] = {}
    nodes = [
        [node, [reasons.setdefault(one.reason, len(reasons)) for one in group]]
        for node, group in groupby(refusals, key=lambda one: one.node)
    ]
    return {"reasons": list(reasons), "nodes": nodes}


@dataclass(frozen=True)
class Rewrite:
    """One rewrite that a pass applied.

    index   the number of the rewrite in the pass, from 0
    anchor  the name of the value that the pass matched
    origin  where this value comes from in the model, such as "layer 3, attention.py:176"
    made    the names of values that the rewrite added and that still exist after the pass

    Names are as in a program's text, without "%".
    """

    index: int
    anchor: str
    origin: str
    made: tuple[str, ...] = ()


class Snapshot:
    """The text of a program, which is printed only when `text` is first read. Some compiles never read it.

    The program must not change before that. `print_program` is an argument, because the printer imports this module.
    """

    def __init__(self, program: object, print_program: Callable[[Any], str]) -> None:
        self._program: object | None = program
        self._print = print_program
        self._text = ""

    def of(self, program: object) -> bool:
        """Return whether this is a snapshot of the object `program` that has not been printed yet."""
        return self._program is program

    @property
    def text(self) -> str:
        if self._program is not None:
            self._text, self._program = self._print(self._program), None
        return self._text


@dataclass(frozen=True)
class PassRecord:
    """The record of one run of a pass on one program.

    name           the pass
    entry          the entry (program of the model)
    options        the options of the pass
    source_hash    the hash of the pass's source code
    bucket         the program's bucket class (range of step sizes); None if it has none
    stage          the program's pipeline stage after the pass
    rewrites       the rewrites that the pass applied
    refusals       the nodes that it almost rewrote, and why it did not
    op_count_diff  the change in the number of calls, by op
    numerics       how much the pass may change results
    seconds        the time of the run
    peak_bytes     the peak of the process's resident memory during the run; None if the system does not report it
    before, after  the program before and after the pass

    No key that identifies an artifact depends on `seconds` and `peak_bytes`.
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
        """Return the record as passes.json holds it: without programs, time and memory.

        Each rewrite is a list [anchor, origin, made]: the matched value, where it comes from in the model, and the
        added values.
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
            "refusals": encode_refusals(self.refusals),
            "op_count_diff": self.op_count_diff,
            "numerics": self.numerics.value,
        }
