"""The backend protocols: a backend implements those that match its abilities. Passes use backends through these types
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
    """A claim: the backend can compute the nodes.

    `cost` ranks backends that are not timed; the lowest wins. `layouts` holds the weight layouts that the claim needs,
    by the op's parameter; a weight that is not named may have any layout. `batch_invariant`: a row's bits do not depend
    on the other rows of the step, nor on which batch-invariant bucket class serves the step. `timed`: the call alone
    may be timed against other backends. It is false if the call runs in a region with others, or if the claim only
    replaces missing ones.
    """

    cost: float
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    batch_invariant: bool = False
    timed: bool = True

    def takes(self, layouts: Mapping[str, Layout]) -> bool:
        """Return whether these weight layouts satisfy the claim."""
        return all(layouts.get(name, wanted) is wanted for name, wanted in self.layouts.items())


@dataclass(frozen=True)
class No:
    """A refusal with its reason, which is recorded."""

    reason: str


# One claim, several that need different weight layouts, or a refusal.
Claim = Yes | No | tuple[Yes, ...]


def alternatives(claim: Claim) -> tuple[Yes, ...]:
    """Return the claims in an answer."""
    if isinstance(claim, No):
        return ()
    return (claim,) if isinstance(claim, Yes) else claim


class Backend(Protocol):
    """A component that computes calls. Every backend implements `claim`. The protocols below are its further abilities,
    tested with `isinstance`."""

    name: str

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Claim:
        """Return whether the backend computes these nodes together, with the weight layouts it needs. Has no side
        effects."""
        ...


@runtime_checkable
class FunctionBackend(Backend, Protocol):
    """Computes single calls by functions, from its own library or an existing one."""

    def dry_run(self, node: fx.Node) -> Callable[..., Any]:
        """Return a function of meta tensors that allocates what the call allocates in its worst case."""
        ...


@runtime_checkable
class Builder(Backend, Protocol):
    """Builds executables from source files with compilers."""

    def sources(self) -> Sequence[Path]:
        """Return the files that determine the emitted code; part of an executable's key."""
        ...

    def toolchain(self) -> dict[str, str]:
        """Return the versions of the compilers; part of an executable's key."""
        ...


@runtime_checkable
class LibraryBuilder(Builder, Protocol):
    """Has a kernel library that is built once per target."""

    def emit_library(self, key: str, target: Target, directory: Path) -> Executable:
        """Build the kernels into `directory`, an empty folder; `key` becomes the executable's id."""
        ...


@runtime_checkable
class Compiler(Builder, Protocol):
    """Emits executables for programs. `compiles_calls`: it also compiles each single call that it claims, for the types
    of that call."""

    compiles_calls: bool

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        """Compile a body into `directory`, an empty folder; `key` becomes the executable's id."""
        ...

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        """Return the peak bytes that one call of a body in `directory` allocates, results included, with dims of
        `sizes`."""
        ...


@runtime_checkable
class RegionCompiler(Compiler, Protocol):
    """Emits executables for regions: several calls in one."""

    def cover(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]] | None:
        """Return the regions that it makes of the fusible calls `nodes`, with the views around them. None: each
        connected set of calls is one region."""
        ...

    def warm_up(self) -> None:
        """Import the modules that `emit` needs, in a process that will soon emit."""
        ...


@runtime_checkable
class Splitter(Backend, Protocol):
    """Computes some fused calls better in parts."""

    def takes_apart(self, node: fx.Node, target: Target, bucket: BucketClass) -> bool:
        """Return whether to decompose this call, so that its parts join the regions before and after it."""
        ...


@runtime_checkable
class Tunable(Compiler, Protocol):
    """Has kernels with tile sizes that can be read, set and timed."""

    def choices(self, body: Program, target: Target) -> tuple[Choice, ...]:
        """Return the tile sizes that `emit` would compile `body` with."""
        ...

    def with_choices(self, choices: Sequence[Choice]) -> Self:
        """Return the same backend with these tile sizes for the kernels that they name. Raises OptionError for sizes
        that its kernels do not support."""
        ...

    def measures(self, choice: Choice) -> bool:
        """Return whether it can try other sizes for the kernel of `choice`."""
        ...

    def measure(self, choice: Choice, target: Target, seconds: float) -> Choice:
        """Return the fastest sizes found on this machine's GPU in about `seconds`, including those of `choice`. Raises
        BackendError if not even `choice` runs."""
        ...


def call_compilers(backends: Iterable[Backend]) -> list[Compiler]:
    """Return the backends that compile single calls."""
    return [one for one in backends if isinstance(one, Compiler) and one.compiles_calls]


def has_call_kernels(backend: Backend) -> bool:
    """Return whether it has kernels for single calls, in a library or compiled for their types."""
    return isinstance(backend, LibraryBuilder) or bool(call_compilers([backend]))


def sources_of(backend: Backend) -> Sequence[Path]:
    """Return the backend's sources; empty if it builds nothing."""
    return backend.sources() if isinstance(backend, Builder) else ()


def toolchain_of(backend: Backend) -> dict[str, str]:
    """Return the versions of the backend's compilers; empty if it builds nothing."""
    return backend.toolchain() if isinstance(backend, Builder) else {}


def signature_of(region: Region) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the input and output types of a region, as text."""
    inputs = tuple(str(value_type) for value_type in region.body.input_types().values())
    outputs = tuple(str(node.meta["type"]) for node in region.body.output_nodes().values())
    return inputs, outputs
