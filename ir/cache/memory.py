"""How the memory that a plan was given is shared out: what serving needs before the first page, and the pages."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ingot.ir.artifact.plan import GroupMemory, Plan, Plans
from ingot.ir.cache.groups import CacheGroup
from ingot.ir.cache.scratch_pages import Scratch, scratch_of

if TYPE_CHECKING:
    from ingot.ir.types import TensorType


@dataclass(frozen=True)
class MemoryNeed:
    """What serving a plan takes, in bytes.

    weights      resident tensors, each once
    activations  what a step allocates at its peak with its inputs, and the outputs of the last step of each entry
    states       states by device row
    groups       groups of caches by name
    slot         a slot, in all states that stand once per sequence
    sequences    those that run at once, each of which has a slot
    scratch      the scratch pages of groups with a window, by name
    granularity  bytes in multiples of which the device maps memory into ranges of addresses
    """

    weights: int
    activations: int
    states: int
    groups: Mapping[str, GroupMemory]
    slot: int = 0
    sequences: int = 1
    scratch: Mapping[str, Scratch] = field(default_factory=dict)
    granularity: int = 1

    @staticmethod
    def of(plans: Plans, granularity: int | None = 1) -> "MemoryNeed":
        """Steps of all entries run one after the other, so the most that one of them allocates counts. What a step gave
        may be held while steps of other entries run, so the outputs of all entries count. Each plan counts the weights
        of all entries, and the states of its own: those of one name are one. `granularity` None: on a device that gives
        caches no memory in common, so no group has scratch pages."""
        memories = [plan.memory for plan in plans.plans.values()]
        states, slot, groups = memories[0].states, memories[0].slot, memories[0].groups
        if len(memories) > 1:  # a plan alone has counted its states, and needs no types, nor torch for them
            states, slot, groups = state_memory(planned_states(plans.plans.values()))
        return MemoryNeed(
            weights=max(memory.weights for memory in memories),
            activations=max(
                bucket.memory.activations + plan.memory.inputs
                for plan in plans.plans.values()
                for bucket in plan.buckets
            )
            + sum(memory.outputs for memory in memories),
            states=states,
            groups=groups,
            slot=slot,
            sequences=max(plan.dims.get("B", (1, 1))[1] for plan in plans.plans.values()),
            scratch=scratch_of(plans, on_device=granularity is not None),
            granularity=granularity or 1,
        )

    @property
    def fixed(self) -> int:
        """Bytes before the first page, and before the first slot that no running sequence needs."""
        return self.weights + self.activations + self.states + self.sequences * self.slot + self.scratch_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch pages of all groups."""
        return sum(one.bytes(self.granularity) for one in self.scratch.values())

    @property
    def page(self) -> int:
        """Bytes of one page of each group."""
        return sum(group.page for group in self.groups.values())

    @property
    def sequence(self) -> int:
        """Bytes of the pages that one sequence at full length needs, with those that are never handed out."""
        return sum(self.least(name) * group.page for name, group in self.groups.items())

    def least(self, name: str) -> int:
        """The pages of a group with which one sequence at full length can be served."""
        return self.groups[name].pages_per_sequence + CacheGroup.named(name).reserved

    def most(self, name: str, sequences: int) -> int:
        """The pages of a group beyond which more are of no use to so many sequences."""
        own = sequences * self.groups[name].pages_per_sequence
        # With scratch pages a long piece needs as many at once, while the step in flight may still read as many.
        steps = 2 if self.has_scratch(name) else 1
        return own + steps * self.beside(name) + CacheGroup.named(name).reserved

    def beside(self, name: str) -> int:
        """The pages of a group that a step writes at most beside those that sequences hold between steps. With scratch
        pages these are the pages that a piece of a prompt leaves to later steps."""
        group = self.groups[name]
        return min(group.pages_per_step, group.pages_per_sequence) if self.has_scratch(name) else group.pages_per_step

    def has_scratch(self, name: str) -> bool:
        """Whether a group has scratch pages."""
        return name in self.scratch and self.scratch[name].pages > 0

    def pages_within(self, memory: int) -> int:
        """Pages of each group that fit into `memory` bytes beside all else; negative when that does not fit itself."""
        return (memory - self.fixed) // self.page


class PlannedState(NamedTuple):
    """A state: its group, its type, and the largest sizes of the dims of the plan."""

    group: str
    type: "TensorType"
    sizes: Mapping[str, int]


def state_memory(states: Mapping[str, PlannedState]) -> tuple[int, int, dict[str, GroupMemory]]:
    """(bytes of the states by device row, bytes of a slot, the groups of those that grow with the pages). States are by
    name."""
    kept = slot = 0
    pages: dict[str, int] = {}
    counts: dict[str, tuple[int, int]] = {}
    for one in states.values():
        size = math.prod(one.type.bind({**one.sizes, "pages": 1, "S": 1})) * one.type.dtype.itemsize
        if "S" in one.type.shape:
            slot += size
            continue
        if "pages" not in one.type.shape:
            kept += size
            continue
        group = CacheGroup.named(one.group)
        pages[group.name] = pages.get(group.name, 0) + size
        table, page_size = one.sizes.get("P", 0), _page_size(one.type)
        between = group.pages_between_steps(table * page_size, page_size)
        beside = 0 if not group.forgets else min(table - between, -(-one.sizes.get("T", 1) // page_size))
        before = counts.get(group.name, (0, 0))
        counts[group.name] = max(before[0], between), max(before[1], beside)
    found = {
        name: GroupMemory(page=size, pages_per_sequence=counts[name][0], pages_per_step=counts[name][1])
        for name, size in pages.items()
    }
    return kept, slot, dict(sorted(found.items()))


def _page_size(cache: "TensorType") -> int:
    """Tokens of a page of a cache, [pages, 2, page_size, …]; where it is of another shape any number does."""
    size = cache.shape[2] if len(cache.shape) > 2 else 1
    return size if isinstance(size, int) else 1


def planned_states(plans: Iterable[Plan]) -> dict[str, PlannedState]:
    """The states of these plans by name."""
    from ingot.ir.parse import parse_type  # not at the top: `--help` loads no torch

    return {
        name: PlannedState(state.group, parse_type(state.type), {dim: most for dim, (_, most) in plan.dims.items()})
        for plan in plans
        for name, state in plan.states.items()
    }
