"""The protocols that backends keep: each keeps those of what it can do. Passes see backends as objects of these types,
and import none."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from torch import fx

from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.artifact.tuning import Choice
from ingot.ir.layout import Layout
from ingot.ir.machine.target import Target
from ingot.ir.program import Program, Region


@dataclass(frozen=True)
class Yes:
    """A claim. `cost` ranks backends, and the lower one wins where they are not timed. It holds when the weights, by
    the op's parameters, lie in `layouts`; one that is not named may lie in any. `batch_invariant`: a row's bits do not
    depend on the other rows of the step, nor on which of the bucket classes that ask for it serves the step. `timed`:
    the call by itself may be timed against other backends; not where it is computed in a region with others, or where
    the claim only stands in for missing ones."""

    cost: float
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    batch_invariant: bool = False
    timed: bool = True

    def takes(self, layouts: Mapping[str, Layout]) -> bool:
        """Whether weights in these layouts are as the claim wants them."""
        return all(layouts.get(name, wanted) is wanted for name, wanted in self.layouts.items())


@dataclass(frozen=True)
class No:
    """A refusal with its reason; every one is kept."""

    reason: str


# One claim, several that want their weights in different layouts, or none.
Claim = Yes | No | tuple[Yes, ...]


def alternatives(claim: Claim) -> tuple[Yes, ...]:
    """The claims in an answer."""
    if isinstance(claim, No):
        return ()
    return (claim,) if isinstance(claim, Yes) else claim


class Backend(Protocol):
    """What computes calls. Every backend claims; what else it can do is said by the protocols below that it keeps, and
    asked with `isinstance`."""

    name: str

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Claim:
        """Whether the backend would compute these nodes, taken together, and how it wants their weights. Reads only."""
        ...


@runtime_checkable
class FunctionBackend(Backend, Protocol):
    """Computes single calls by functions: those of its library, or ones that are there already."""

    def dry_run(self, node: fx.Node) -> Callable[..., Any]:
        """A function of tensors without data that allocates as the call does when it needs most."""
        ...


@runtime_checkable
class Builder(Backend, Protocol):
    """Builds executables from sources, with compilers."""

    def sources(self) -> Sequence[Path]:
        """Files whose text decides what is emitted; part of an executable's key."""
        ...

    def toolchain(self) -> dict[str, str]:
        """Versions of the compilers that it uses; part of an executable's key."""
        ...


@runtime_checkable
class LibraryBuilder(Builder, Protocol):
    """Has a library of kernels, which is built once for a target."""

    def emit_library(self, key: str, target: Target, directory: Path) -> Executable:
        """Build the kernels into `directory`, an empty folder; `key` becomes the executable's id."""
        ...


@runtime_checkable
class Compiler(Builder, Protocol):
    """Emits executables for programs. `compiles_calls`: for each single call that it takes, too, for just the types of
    that call."""

    compiles_calls: bool

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        """Compile a body into `directory`, an empty folder; `key` becomes the executable's id."""
        ...

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        """Of a body that it compiled into `directory`: bytes that one call allocates at its peak, its results among
        them, with dims of these sizes."""
        ...


@runtime_checkable
class RegionCompiler(Compiler, Protocol):
    """Emits executables for regions: several calls in one."""

    def cover(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]] | None:
        """The regions that the fusible calls `nodes`, which it was given, make, views around them included. None:
        whatever hangs together is one."""
        ...

    def warm_up(self) -> None:
        """Import what `emit` needs, in a process that will soon be asked to emit."""
        ...


@runtime_checkable
class Splitter(Backend, Protocol):
    """Computes the parts of some fused calls better than the whole."""

    def takes_apart(self, node: fx.Node, target: Target, bucket: BucketClass) -> bool:
        """Whether it would rather have the parts of this call, for the regions at both its ends."""
        ...


@runtime_checkable
class Tunable(Compiler, Protocol):
    """Has kernels with tile sizes: which ones a body gets can be asked, given, and timed."""

    def choices(self, body: Program, target: Target) -> tuple[Choice, ...]:
        """The tile sizes that `emit` would compile `body` with."""
        ...

    def with_choices(self, choices: Sequence[Choice]) -> Self:
        """The same backend, which takes these too wherever they are about what it compiles. Raises OptionError for
        sizes that its kernels cannot have."""
        ...

    def measures(self, choice: Choice) -> bool:
        """Whether it has other sizes to try for what `choice` is about."""
        ...

    def measure(self, choice: Choice, target: Target, seconds: float) -> Choice:
        """The fastest sizes that were found on this machine's GPU in about so many seconds, `choice` among them.
        Raises BackendError where not even that runs."""
        ...


def call_compilers(backends: Iterable[Backend]) -> list[Compiler]:
    """Those that compile single calls."""
    return [one for one in backends if isinstance(one, Compiler) and one.compiles_calls]


def has_call_kernels(backend: Backend) -> bool:
    """Whether it has kernels for single calls, in a library or compiled for their types."""
    return isinstance(backend, LibraryBuilder) or bool(call_compilers([backend]))


def sources_of(backend: Backend) -> Sequence[Path]:
    """Its sources; none for one that builds nothing."""
    return backend.sources() if isinstance(backend, Builder) else ()


def toolchain_of(backend: Backend) -> dict[str, str]:
    """The versions of its compilers; none for one that builds nothing."""
    return backend.toolchain() if isinstance(backend, Builder) else {}


def signature_of(region: Region) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Input and output types of a region, as text."""
    inputs = tuple(str(value_type) for value_type in region.body.input_types().values())
    outputs = tuple(str(node.meta["type"]) for node in region.body.output_nodes().values())
    return inputs, outputs
