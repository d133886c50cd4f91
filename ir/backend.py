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
    """A backend's answer to `Backend.claim`: it can compute the calls.

    cost             ranks backends that are not timed; the lowest cost wins
    layouts          the weight layout that the backend needs, by parameter of the op; a weight that is not named may
                     have any layout
    batch_invariant  the bits of a row do not depend on the other rows of the step, nor on which batch-invariant bucket
                     class (range of step sizes) computes it
    timed            the call may be timed alone, against other backends; False if a compiler joins it with other calls,
                     or if the backend is only a fallback
    """

    cost: float
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    batch_invariant: bool = False
    timed: bool = True

    def takes(self, layouts: Mapping[str, Layout]) -> bool:
        """Return whether the backend can read weights in these layouts.

        `layouts` maps a parameter of the op to its weight's layout.
        """
        return all(layouts.get(name, wanted) is wanted for name, wanted in self.layouts.items())


@dataclass(frozen=True)
class No:
    """A backend's answer to `Backend.claim` that it cannot compute the nodes. The trace records `reason`."""

    reason: str


# One claim, several that need different weight layouts, or a refusal.
Claim = Yes | No | tuple[Yes, ...]


def alternatives(claim: Claim) -> tuple[Yes, ...]:
    """Return all `Yes` answers in a backend's answer `claim`; empty for a `No`.

    There are several if the backend can compute the calls in several ways, with different weight layouts.
    """
    if isinstance(claim, No):
        return ()
    return (claim,) if isinstance(claim, Yes) else claim


class Backend(Protocol):
    """A component that computes calls of ops.

    Every backend implements `claim`, which says whether it can compute a call.

    Some backends can do more, such as compile. Each such ability is a protocol derived from this one (`Compiler`,
    `Builder`, …). Callers test for it with `isinstance`.
    """

    name: str

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Claim:
        """Return whether the backend can compute the calls `nodes` together, in steps of the bucket class `bucket`.

        A bucket class is a range of step sizes. The answer is one `Yes`, several, or a `No`. A `Yes` has a cost and
        weight layouts. A `No` has a reason. The method has no side effects.
        """
        ...


@runtime_checkable
class FunctionBackend(Backend, Protocol):
    """A backend that computes a call with a function of a kernel library.

    The library belongs to the backend, or exists already, as cuBLAS does.
    """

    def dry_run(self, node: fx.Node) -> Callable[..., Any]:
        """Return a function that allocates as much memory as the call `node` does, for memory planning.

        The memory planner runs it on meta tensors and counts the allocated bytes. If the amount depends on the data,
        the function allocates the largest amount.
        """
        ...


@runtime_checkable
class Builder(Backend, Protocol):
    """A backend that builds executables from its source files with compilers."""

    def sources(self) -> Sequence[Path]:
        """Return the source files that determine the compiled code.

        The key of that code in the compile cache depends on the contents of these files.
        """
        ...

    def toolchain(self) -> dict[str, str]:
        """Return the compilers' versions, by compiler name.

        The key of the compiled code in the compile cache depends on them.
        """
        ...


@runtime_checkable
class LibraryBuilder(Builder, Protocol):
    """A backend with a library of kernels for ops. The library is built once per target and serves all programs."""

    def emit_library(self, key: str, target: Target, directory: Path) -> Executable:
        """Build the kernel library into `directory`, an empty folder. `key` becomes the id of the executable."""
        ...


@runtime_checkable
class Compiler(Builder, Protocol):
    """A backend that compiles programs to executables.

    If `compiles_calls` is True, it can also compile a call alone, for the types of its arguments.
    """

    compiles_calls: bool

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        """Compile the program `body` into the empty folder `directory`.

        `body` holds a single call, or the calls of a region, which are compiled together. `key` becomes the id of the
        returned executable.
        """
        ...

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        """Return the peak bytes that one run of `executable` allocates, results included.

        `executable` is the result of `emit` for the program `body` and the folder `directory`. `sizes` maps symbols
        such as "T" to sizes. `threads` is the number of CPU threads of the run.
        """
        ...


@runtime_checkable
class RegionCompiler(Compiler, Protocol):
    """A backend that compiles regions. A region is a set of connected calls that are compiled together."""

    def cover(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]] | None:
        """Group the calls `nodes` into regions, which are compiled together. Return the calls and views of each region.

        All `nodes` are assigned to this backend. None means that each set of connected calls becomes one region.
        """
        ...

    def warm_up(self) -> None:
        """Import the modules that `emit` needs, so that the first `emit` of a new worker process is quick."""
        ...


@runtime_checkable
class Splitter(Backend, Protocol):
    """A backend that computes some fused ops faster as separate simpler ops."""

    def takes_apart(self, node: fx.Node, target: Target, bucket: BucketClass) -> bool:
        """Return whether to replace the call `node` of a fused op by calls of simpler ops.

        A compiler can then compile these together with the calls before and after.
        """
        ...


@runtime_checkable
class Tunable(Compiler, Protocol):
    """A backend with kernels whose tile sizes can be read, set and timed."""

    def choices(self, body: Program, target: Target) -> tuple[Choice, ...]:
        """Return the tile sizes of each kernel that `emit` would compile for the program `body`."""
        ...

    def with_choices(self, choices: Sequence[Choice]) -> Self:
        """Return a copy of this backend with the tile sizes `choices`.

        Each choice holds the sizes for one kernel and problem (the shapes and dtypes of a call). Raises OptionError for
        sizes that a kernel does not support.
        """
        ...

    def measures(self, choice: Choice) -> bool:
        """Return whether `measure` has other tile sizes to compare for the kernel of `choice`."""
        ...

    def measure(self, choice: Choice, target: Target, seconds: float) -> Choice:
        """Time a kernel with several tile sizes for about `seconds`, and return the fastest sizes.

        `choice` names the kernel and the problem. The sizes of `choice` are timed too. Raises BackendError if the
        kernel does not even run with these on this GPU.
        """
        ...

    def tuning_sources(self) -> Sequence[Path]:
        """Return the source files that determine which sizes `measure` tries and how it times them.

        `sources` need not contain them, because they do not determine compiled code. The keys of cached tile sizes
        depend on the contents of both.
        """
        ...


def call_compilers(backends: Iterable[Backend]) -> list[Compiler]:
    """Return the backends that can compile a call alone, for the types of its arguments."""
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
    """Return the types of a region's inputs, and the types of its outputs, as text like "f32[T, 64]".

    A region is a set of calls that are compiled together.
    """
    inputs = tuple(str(value_type) for value_type in region.body.input_types().values())
    outputs = tuple(str(node.meta["type"]) for node in region.body.output_nodes().values())
    return inputs, outputs
