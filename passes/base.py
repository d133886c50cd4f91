"""The base class of passes: a frozen dataclass with options as fields and a numerics contract."""

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
from ingot.ir.stored.calibrated import CalibratedWeights
from ingot.ir.text import bucket_text, print_region_body
from ingot.passes.rewrite import Rewriter

# Functions of the driver that compile. `Emit` returns the executable of each region, by the region's name.
# `EmitLibrary` returns a backend's kernel library.
Emit = Callable[[Sequence[Region]], Mapping[str, Executable]]
EmitLibrary = Callable[[LibraryBuilder], Executable]
# Returns the peak bytes that a call of each region allocates, by the region's name, for the given sizes of dims.
Measure = Callable[[Sequence[Region], Mapping[str, int]], Mapping[str, int]]


@dataclass(frozen=True)
class Contest:
    """A call that several backends can compute alone, so that timing can choose the fastest.

    body       a program with only this call
    backends   names of these backends, the one with the lowest estimated cost first
    regions    by backend that would compile the call as a region of its own: the program of that region
    """

    body: Program
    backends: tuple[str, ...]
    regions: Mapping[str, Program] = field(default_factory=dict)

    def region(self, backend: str) -> Region:
        """Return the call as a region that `backend` is to compile. A call and a region can differ in bounds of dims.

        If the backend wins, its code is the one that the program needs, and is not compiled again.
        """
        return Region("call", self.regions.get(backend, self.body), backend)

    @property
    def call(self) -> tuple[str, ...]:
        """Return the call and its types as lines of text. Calls that differ only in their weights have equal text."""
        return tuple(print_region_body(self.body).splitlines())

    @property
    def bucket(self) -> str:
        return "any" if self.body.bucket is None else bucket_text(self.body.bucket)

    @cached_property
    def key(self) -> str:
        """Return the key of this call in the tuning log, which stores the times of its backends."""
        return call_key(self.call, self.bucket)


# (entry, name of the pass) -> source line of a call -> why the pass must not begin a fusion at this call.
SkippedFusions = Mapping[tuple[str, str], Mapping[str, str]]
# Takes distinct contests. Returns the times of each, or the reason why its backends are not timed. The function
# argument returns calls that are compiled in any case; anything that must be built for timing is built along with them.
TimeCalls = Callable[[Sequence[Contest], Callable[[], Sequence[Region]]], Sequence[BackendTimes | str]]


@dataclass(frozen=True)
class PassContext:
    """Facts that a pass may read besides the program.

    target            the machine to compile for, such as "sm_90"
    max_seq_len       most tokens of a sequence
    max_batch         most sequences in a step
    max_tokens        most tokens in a step
    backends          the backends that may compute calls, preferred ones first
    deterministic     True: results of a request must not depend on the other requests of a step
    bucket            the bucket class (a range of step sizes) that is compiled now; None: the program is still one for
                      all classes
    buckets           all bucket classes
    weight_budget     limit on the bytes of all weights; 1.0 allows each weight once, more allows second layouts
    emit              function that compiles regions (calls compiled together); None: not available
    emit_library      function that builds the kernels of a backend; None: not available
    measure           function that runs compiled regions and returns their peak memory; None: it is estimated with the
                      reference implementations
    decided           times that an earlier compile measured: key of a Contest (calls that several backends claim) ->
                      time of each backend
    time_calls        function that times the backends of the other Contests; None: the lowest estimated cost wins
    expected          pass name -> how many rewrites it must apply at least
    mesh              mesh axis -> number of devices, for axes of several devices; pipeline stages are no axis here
    first_layers      the first layer of each pipeline stage; empty: there is only one
    skipped_fusions   fusions that passes must not make: with these weights, they would change results too much
    calibrated        what a calibration computed for the weights; None: there was no calibration
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
    first_layers: tuple[int, ...] = ()
    skipped_fusions: SkippedFusions = field(default_factory=dict)
    calibrated: CalibratedWeights | None = None

    def any_bucket(self) -> BucketClass:
        """Return the bucket class (a range of step sizes) that is compiled now, for questions to backends.

        While a program is still one for all classes, it is a class for all steps.
        """
        features = owed_features(deterministic=self.deterministic)
        return self.bucket or BucketClass(name="any", tokens=(1, self.max_tokens), features=features)

    def counts(self, claim: Yes) -> bool:
        """Return whether a backend's claim (its offer to compute a call) may be chosen.

        In deterministic mode, the backend's results must not depend on the other requests of a step.
        """
        return claim.batch_invariant or not self.deterministic


class Pass(ABC):
    """A rewrite of a program. Subclasses are frozen dataclasses, and their fields are options of `--passes`.

    numerics   how results may change: EXACT, ROUNDING or LOSSY. It may be a property that depends on the options.
    joins      for passes that run only if the user names them. Such a pass runs last in the phase that leads to this
               stage.
    by_bucket  whether such a pass runs once for each bucket class (a range of step sizes), in the phase that does so
    follows    the pass of this phase after which such a pass runs; "": it runs last. It also runs last if that pass is
               left out.
    on_mesh    whether such a pass is only for a mesh whose ranks hold parts of each layer
    """

    name: ClassVar[str]
    numerics: ClassVar[Numerics]
    joins: ClassVar[Stage] = Stage.FUSED
    by_bucket: ClassVar[bool] = False
    follows: ClassVar[str] = ""
    on_mesh: ClassVar[bool] = False

    @abstractmethod
    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        """Rewrite `rewriter.program` in place. Call `rewriter.take` before each rewrite.

        If `take` returns False, leave the matched calls unchanged.
        """

    def options(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]  # subclasses are dataclasses

    def source_hash(self) -> str:
        """Return the SHA-256 of the file that defines the pass.

        It is part of the keys of cached results, so that results of changed passes are not used.
        """
        return hashlib.sha256(Path(inspect.getfile(sys.modules[type(self).__module__])).read_bytes()).hexdigest()


def check_pass_class(made: object, name: str) -> type[Pass]:
    """Return `made` if it is a valid pass class. Another package offers it as the pass `name`.

    Raises OptionError if it is no valid pass class.
    """
    if not isinstance(made, type) or not issubclass(made, Pass):
        raise _misfit(name, made, "is", "a subclass of ingot.passes.base.Pass")
    if getattr(made, "name", None) != name:
        raise _misfit(name, made, f"has the name {getattr(made, 'name', None)!r} in its class", f'name = "{name}"')
    if not isinstance(getattr(made, "numerics", None), Numerics | property):
        kinds = ", ".join(f"Numerics.{kind.name}" for kind in Numerics)
        raise _misfit(name, made, "has no numerics contract:", f"`numerics` is one of {kinds}")
    if not isinstance(made.joins, Stage):
        raise _misfit(name, made, "has no stage to join:", "`joins` is a Stage")
    params = vars(made).get("__dataclass_params__")  # of the class itself: a subclass may lack the decorator
    if params is None or not params.frozen:
        raise _misfit(name, made, "is", "a frozen dataclass: @dataclass(frozen=True) above the class")
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
