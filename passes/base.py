"""What a pass is: a frozen dataclass whose fields are its options, with a numerics contract."""

import dataclasses
import hashlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from ingot.ir.artifact.backend_times import BackendTimes, call_key
from ingot.ir.artifact.plan import BucketClass, Executable, owed_features
from ingot.ir.artifact.record import Numerics
from ingot.ir.backend import Backend, LibraryBuilder, Yes
from ingot.ir.errors import OptionError
from ingot.ir.machine.target import Target
from ingot.ir.program import Program, Region, Stage
from ingot.ir.text import bucket_text, print_region_body
from ingot.passes.rewrite import Rewriter

# What compiles, given by the driver: an executable for each region by the region's name; a backend's kernels.
Emit = Callable[[Sequence[Region]], Mapping[str, Executable]]
EmitLibrary = Callable[[LibraryBuilder], Executable]
# Bytes that calls of regions allocate at their peak, by the region's name, with dims of the given sizes.
Measure = Callable[[Sequence[Region], Mapping[str, int]], Mapping[str, int]]


@dataclass(frozen=True)
class Contest:
    """A call that several backends would compute by itself: a program of its own, and their names, the cheapest claim
    first."""

    body: Program
    backends: tuple[str, ...]

    @property
    def call(self) -> tuple[str, ...]:
        """The call with its types: equal for equal calls of other weights."""
        return tuple(print_region_body(self.body).splitlines())

    @property
    def bucket(self) -> str:
        return "any" if self.body.bucket is None else bucket_text(self.body.bucket)

    @cached_property
    def key(self) -> str:
        """That of its `BackendTimes`."""
        return call_key(self.call, self.bucket)


# The times of each contest, all different, or why the backends are not timed. The function gives calls that will be
# compiled in any case: where something has to be built to be timed, they are built beside it.
TimeCalls = Callable[[Sequence[Contest], Callable[[], Sequence[Region]]], Sequence[BackendTimes | str]]


@dataclass(frozen=True)
class PassContext:
    """What passes may know beside the program.

    `max_seq_len`, `max_batch` and `max_tokens` bound a step. `backends` come as objects behind `ir`'s protocol, the
    preferred ones first. `buckets` are all bucket classes, `bucket` the one that is lowered. `weight_budget` bounds the
    resident weights, in multiples of their size in one copy. `emit` and `emit_library` compile regions and kernels,
    `measure` runs what was compiled; they are absent where nothing is to be compiled, and a region's memory is then
    that of its references. `decided` says which backend computes calls, by the keys of contests, and `time_calls`
    times backends for the others; where it is absent, the cheapest claim wins. `mesh` holds the sizes of axes above
    one.
    """

    target: Target
    max_seq_len: int
    max_batch: int
    max_tokens: int
    backends: tuple[Backend, ...] = ()
    deterministic: bool = False
    bucket: BucketClass | None = None
    buckets: tuple[BucketClass, ...] = ()
    weight_budget: float = 1.0
    emit: Emit | None = None
    emit_library: EmitLibrary | None = None
    measure: Measure | None = None
    decided: Mapping[str, BackendTimes] = field(default_factory=dict)
    time_calls: TimeCalls | None = None
    expected: Mapping[str, int] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)

    def any_bucket(self) -> BucketClass:
        """The bucket class that holds every step: what a pass before LOWERED asks backends about."""
        features = owed_features(deterministic=self.deterministic)
        return self.bucket or BucketClass(name="any", tokens=(1, self.max_tokens), features=features)

    def counts(self, claim: Yes) -> bool:
        """Whether a claim is one to choose from: in deterministic mode those alone that are batch-invariant."""
        return claim.batch_invariant or not self.deterministic


class Pass(ABC):
    """A rewrite of a program. Subclasses are frozen dataclasses; their fields are the options of the command line.

    `numerics` may be a property, where the options decide what the pass promises. `joins` is for passes that run on
    request, those of other packages among them: the stage whose phase they end.
    """

    name: ClassVar[str]
    numerics: ClassVar[Numerics]
    joins: ClassVar[Stage] = Stage.FUSED

    @abstractmethod
    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        """Change `rewriter.program` and count the matches there."""

    def options(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]  # subclasses are dataclasses

    def source_hash(self) -> str:
        """SHA-256 of the file that defines the pass: part of every identity that the pass bears on."""
        return hashlib.sha256(Path(inspect.getfile(sys.modules[type(self).__module__])).read_bytes()).hexdigest()


def check_pass_class(made: object, name: str) -> type[Pass]:
    """`made`, which another package gives as its pass `name`, if it is made as passes are. Raises OptionError."""
    if not isinstance(made, type) or not issubclass(made, Pass):
        raise _misfit(name, made, "gives", "a subclass of ingot.passes.base.Pass")
    if getattr(made, "name", None) != name:
        raise _misfit(name, made, f"calls itself {getattr(made, 'name', None)!r} and gives", f'name = "{name}"')
    if not isinstance(getattr(made, "numerics", None), Numerics | property):
        kinds = ", ".join(f"Numerics.{kind.name}" for kind in Numerics)
        raise _misfit(name, made, "does not say what it promises:", f"`numerics` is one of {kinds}")
    if not isinstance(made.joins, Stage):
        raise _misfit(name, made, "does not say where it runs:", "`joins` is a Stage")
    params = vars(made).get("__dataclass_params__")  # of the class itself: a subclass may lack the decorator
    if params is None or not params.frozen:
        raise _misfit(name, made, "gives", "a frozen dataclass: @dataclass(frozen=True) above the class")
    missing = (dataclasses.MISSING, dataclasses.MISSING)
    fields = dataclasses.fields(made)  # type: ignore[arg-type]  # a dataclass
    if bare := [one.name for one in fields if (one.default, one.default_factory) == missing]:
        raise _misfit(name, made, f"has options without a default ({', '.join(bare)}):", "a default for each option")
    if left := sorted(made.__abstractmethods__):
        raise _misfit(name, made, f"does not define {', '.join(left)}:", "run(self, rewriter, context)")
    return made


def _misfit(name: str, made: object, problem: str, expected: str) -> OptionError:
    shown = f"{made.__module__}.{made.__qualname__}" if isinstance(made, type) else repr(made)
    return OptionError(f"the pass '{name}' {problem} {shown}", where="--passes", expected=expected)
