"""The protocols that backends (cpu, inductor, triton, ...) implement, one protocol per ability.

Passes use backends only through these types and import no backend.
"""

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
    """A backend's answer to `Backend.claim` that it can compute the nodes.

    `cost` ranks backends that are not timed; the lowest wins. `layouts` maps parameters of the op to the weight layouts
    (row-major or column-major) that the backend needs; weights of other parameters may have any layout.
    `batch_invariant`: the bits of a row do not depend on the other rows of the step. They are also the same in every
    batch-invariant bucket class (range of step sizes). `timed`: the call alone may be timed against other backends. It
    is False if the call is compiled together with other calls, or if the backend is only a fallback for calls that no
    other backend claims.
    """

    cost: float
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    batch_invariant: bool = False
    timed: bool = True

    def takes(self, layouts: Mapping[str, Layout]) -> bool:
        """Return whether the backend can use weights that are stored in `layouts`, given by parameter of the op."""
        return all(layouts.get(name, wanted) is wanted for name, wanted in self.layouts.items())


@dataclass(frozen=True)
class No:
    """A backend's answer to `Backend.claim` that it cannot compute the nodes. The trace records `reason`."""

    reason: str


# One claim, several that need different weight layouts, or a refusal.
Claim = Yes | No | tuple[Yes, ...]


def alternatives(claim: Claim) -> tuple[Yes, ...]:
    """Return each `Yes` in the answer `claim` of a backend, one per way in which it can compute the nodes.

    Empty if the answer is `No`.
    """
    if isinstance(claim, No):
        return ()
    return (claim,) if isinstance(claim, Yes) else claim


class Backend(Protocol):
    """A component that computes calls of ops. Every backend implements `claim`.

    Further abilities are protocols that derive from this one, such as `Compiler`; callers test for them with
    `isinstance`.
    """

    name: str

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Claim:
        """Return whether the backend can compute the calls `nodes` together, in steps of the bucket class `bucket`.

        A bucket class is a range of step sizes. The answer is `Yes` with cost and weight layouts, several `Yes`, or
        `No` with a reason. Has no side effects.
        """
        ...


@runtime_checkable
class FunctionBackend(Backend, Protocol):
    """A backend that computes single calls with functions of a kernel library.

    The library is the backend's own, or an existing one such as cuBLAS.
    """

    def dry_run(self, node: fx.Node) -> Callable[..., Any]:
        """Return a function with which the memory planner measures the peak memory of the call `node`.

        The planner calls it with the call's arguments as meta tensors, and counts the bytes that it allocates. It
        allocates as much as the call does for the data that need the most memory.
        """
        ...


@runtime_checkable
class Builder(Backend, Protocol):
    """A backend that builds executables from its source files with compilers."""

    def sources(self) -> Sequence[Path]:
        """Return the source files that determine the compiled code.

        Their contents are part of its key in the compile cache.
        """
        ...

    def toolchain(self) -> dict[str, str]:
        """Return the versions of the compilers by name.

        They are part of the compiled code's key in the compile cache.
        """
        ...


@runtime_checkable
class LibraryBuilder(Builder, Protocol):
    """A backend with a kernel library for ops, which is built once per target and not per program."""

    def emit_library(self, key: str, target: Target, directory: Path) -> Executable:
        """Build the kernel library into `directory`, an empty folder. `key` becomes the id of the executable."""
        ...


@runtime_checkable
class Compiler(Builder, Protocol):
    """A backend that compiles programs to executables.

    `compiles_calls`: it also compiles each single call that it claims, specialized to the types of its arguments.
    """

    compiles_calls: bool

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        """Compile the program `body` of a region or call into `directory`, an empty folder.

        `key` becomes the id of the returned executable.
        """
        ...

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        """Return the peak bytes that one call of `executable` allocates, results included.

        `emit` compiled it from `body` into `directory`. `sizes` maps symbols such as "T" to sizes. `threads` is the
        number of CPU threads that compute the call.
        """
        ...


@runtime_checkable
class RegionCompiler(Compiler, Protocol):
    """A backend that compiles regions: connected calls that become one executable."""

    def cover(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]] | None:
        """Divide fusible calls into regions: return the calls and views of each region.

        `nodes` holds the calls. None: make one region of each connected set of calls.
        """
        ...

    def warm_up(self) -> None:
        """Import the modules that `emit` needs. A new worker process calls this, so that its first `emit` is quick."""
        ...


@runtime_checkable
class Splitter(Backend, Protocol):
    """A backend that computes some fused ops faster if they are decomposed into the ops that they fuse."""

    def takes_apart(self, node: fx.Node, target: Target, bucket: BucketClass) -> bool:
        """Return whether to decompose the call `node` of a fused op into simpler ops.

        These can then be compiled together with the calls before and after.
        """
        ...


@runtime_checkable
class Tunable(Compiler, Protocol):
    """A backend with kernels whose tile sizes can be read, set and timed."""

    def choices(self, body: Program, target: Target) -> tuple[Choice, ...]:
        """Return the tile sizes of each kernel that `emit` would compile for the program `body`."""
        ...

    def with_choices(self, choices: Sequence[Choice]) -> Self:
        """Return a copy of this backend that uses `choices`: tile sizes, each for one kernel and problem.

        Raises OptionError for sizes that a kernel does not support.
        """
        ...

    def measures(self, choice: Choice) -> bool:
        """Return whether `measure` can try other tile sizes for the kernel of `choice`."""
        ...

    def measure(self, choice: Choice, target: Target, seconds: float) -> Choice:
        """Return the fastest tile sizes for the kernel and problem of `choice`, found by timing for about `seconds`.

        The sizes of `choice` itself are among those timed. Raises BackendError if not even these run on this machine's
        GPU.
        """
        ...


def call_compilers(backends: Iterable[Backend]) -> list[Compiler]:
    """Return the backends that can compile a single call, specialized to the types of its arguments."""
    return [one for one in backends if isinstance(one, Compiler) and one.compiles_calls]


def has_call_kernels(backend: Backend) -> bool:
    """Return whether a backend has kernels for single calls: in a kernel library, or compiled for each call."""
    return isinstance(backend, LibraryBuilder) or bool(call_compilers([backend]))


def sources_of(backend: Backend) -> Sequence[Path]:
    """Return the source files of a backend's executables; empty if it builds none."""
    return backend.sources() if isinstance(backend, Builder) else ()


def toolchain_of(backend: Backend) -> dict[str, str]:
    """Return the versions of a backend's compilers by name; empty if it builds no executables."""
    return backend.toolchain() if isinstance(backend, Builder) else {}


def signature_of(region: Region) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return two tuples: the types of a region's inputs and of its outputs, as text like "f32[T, 64]"."""
    inputs = tuple(str(value_type) for value_type in region.body.input_types().values())
    outputs = tuple(str(node.meta["type"]) for node in region.body.output_nodes().values())
    return inputs, outputs
