"""The protocols that backends keep. Passes see backends as objects of these types and import none."""

from collections.abc import Callable, Mapping, Sequence
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
    """A claim. `cost` ranks providers, and the lower one wins where they are not timed. It holds when the weights, by
    the op's parameters, lie in `layouts`; one that is not named may lie in any. `batch_invariant`: a row's bits do not
    depend on the other rows of the step, nor on which of the bucket classes that ask for it serves the step. `timed`:
    the call by itself may be timed against other providers; not where it is computed in a region with others, or where
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
    """The compile side of a backend.

    `compiles_regions`: it emits executables for subgraphs. `compiles_calls`: it emits an executable for each single
    call that it takes, for just the types of that call. `emits_library`: it has kernels, which are built once for a
    target. One with none of these brings functions that are there already.
    """

    name: str
    compiles_regions: bool
    compiles_calls: bool
    emits_library: bool

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Claim:
        """Whether the backend would compute these nodes, taken together, and how it wants their weights. Reads only."""
        ...

    def cover(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]] | None:
        """For a region compiler: the regions that the fusible calls `nodes`, which it was given, make, views around
        them included. None: whatever hangs together is one."""
        ...

    def takes_apart(self, node: fx.Node, target: Target, bucket: BucketClass) -> bool:
        """Whether the backend would rather have the parts of this fused call, for the regions at both its ends."""
        ...

    def warm_up(self) -> None:
        """Import what `emit` needs, in a process that will soon be asked to emit."""
        ...

    def dry_run(self, node: fx.Node) -> Callable[..., Any]:
        """For a call that the backend computes by itself: a function of tensors without data that allocates as the
        call does when it needs most."""
        ...

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        """For a region that the backend compiled into `directory`: bytes that one call allocates at its peak, its
        results among them, with dims of these sizes."""
        ...

    def sources(self) -> Sequence[Path]:
        """Files whose text decides what is emitted; part of an executable's key."""
        ...

    def toolchain(self) -> dict[str, str]:
        """Versions of the compilers that `emit` uses; part of an executable's key."""
        ...

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        """Compile a region's body into `directory`, an empty folder; `key` becomes the executable's id."""
        ...

    def emit_library(self, key: str, target: Target, directory: Path) -> Executable:
        """Build the kernels of an op provider into `directory`, an empty folder."""
        ...


@runtime_checkable
class Tunable(Backend, Protocol):
    """A backend whose kernels have tile sizes: which ones a body gets can be asked, told, and timed."""

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


def signature_of(region: Region) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Input and output types of a region, as text."""
    inputs = tuple(str(value_type) for value_type in region.body.input_types().values())
    outputs = tuple(str(node.meta["type"]) for node in region.body.output_nodes().values())
    return inputs, outputs
