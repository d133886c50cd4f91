"""The memory that serving a plan needs: weights, activations and states first, then pages of KV caches."""

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
    """The memory that serving a model needs on one device, in bytes.

    weights      all weights, each once
    activations  peak allocation of a step with its inputs, and the outputs of the last step of each entry
    states       the states with a row per running sequence, such as the last token
    groups       the groups of KV caches by name, with the bytes of their pages
    slot         the recurrent states of one sequence, such as those of convolutions, added up
    sequences    the most sequences that run at once (not bytes)
    scratch      by cache group, the pages for keys and values that only the step that writes them reads
    granularity  the device maps memory into address ranges in multiples of this many bytes
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
        """Return the memory that serving a model needs, from the plans of all its entries (programs).

        Entries run one after the other, so the largest allocation of a step counts. The outputs of all entries count,
        because they may be held while other entries run. Weights and states that entries share count once.
        `granularity`: the device maps memory in multiples of this many bytes. None: it cannot map the same memory into
        several caches, so no cache group has scratch pages.
        """
        memories = [plan.memory for plan in plans.plans.values()]
        states, slot, groups = memories[0].states, memories[0].slot, memories[0].groups
        if len(memories) > 1:  # a single plan has counted its states already, without importing torch for their types
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
        """Return the bytes that serving needs in addition to the pages of KV caches.

        These are weights, activations, states with a row or slot per running sequence, and scratch pages.
        """
        return self.weights + self.activations + self.states + self.sequences * self.slot + self.scratch_bytes

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of the scratch pages of all cache groups.

        These pages hold keys and values that only the step that writes them reads.
        """
        return sum(one.bytes(self.granularity) for one in self.scratch.values())

    @property
    def page(self) -> int:
        """Return the bytes of one page in every group of KV caches, added up."""
        return sum(group.page for group in self.groups.values())

    @property
    def sequence(self) -> int:
        """Return the bytes of pages that serving one sequence of full length needs, in all groups of KV caches.

        Includes pages that a pool reserves and never allocates.
        """
        return sum(self.least(name) * group.page for name, group in self.groups.items())

    def least(self, name: str) -> int:
        """Return the fewest pages of the cache group `name` that suffice to serve one sequence of full length."""
        return self.groups[name].pages_per_sequence + CacheGroup.named(name).reserved

    def most(self, name: str, sequences: int) -> int:
        """Return the most pages that `sequences` running sequences can use in the cache group `name`."""
        own = sequences * self.groups[name].pages_per_sequence
        # With scratch pages, a long prompt chunk needs this many at once, and the step in flight may read as many.
        steps = 2 if self.has_scratch(name) else 1
        return own + steps * self.extra_in_step(name) + CacheGroup.named(name).reserved

    def extra_in_step(self, name: str) -> int:
        """Return how many pages a step can need in the cache group `name` in addition to the pages held between steps.

        With scratch pages, only pages count that later steps read too; the others are scratch pages.
        """
        group = self.groups[name]
        return min(group.pages_per_step, group.pages_per_sequence) if self.has_scratch(name) else group.pages_per_step

    def has_scratch(self, name: str) -> bool:
        """Return whether the cache group `name` has scratch pages, for keys and values that only one step reads."""
        return name in self.scratch and self.scratch[name].pages > 0

    def pages_within(self, memory: int) -> int:
        """Return how many pages each cache group can have if serving may use `memory` bytes in total.

        Negative if the other memory (weights, activations, states) alone exceeds `memory`.
        """
        return (memory - self.fixed) // self.page


class PlannedState(NamedTuple):
    """A state of a plan: its group, its tensor type, and the largest size of each symbol (such as "T") in the plan."""

    group: str
    type: "TensorType"
    sizes: Mapping[str, int]


def state_memory(states: Mapping[str, PlannedState]) -> tuple[int, int, dict[str, GroupMemory]]:
    """Return (bytes of row states, bytes of a slot, cache groups by name) of `states`, given by name.

    Row states have a row per running sequence, such as the last token. A slot holds the recurrent states of one
    sequence, such as those of convolutions. The cache groups come with the bytes and numbers of their pages.
    """
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
        extra = 0 if not group.forgets else min(table - between, -(-one.sizes.get("T", 1) // page_size))
        before = counts.get(group.name, (0, 0))
        counts[group.name] = max(before[0], between), max(before[1], extra)
    found = {
        name: GroupMemory(page=size, pages_per_sequence=counts[name][0], pages_per_step=counts[name][1])
        for name, size in pages.items()
    }
    return kept, slot, dict(sorted(found.items()))


def _page_size(cache: "TensorType") -> int:
    """Return the number of tokens per page of a KV cache [pages, parts, page_size, …]; 1 if the type shows none."""
    size = cache.shape[2] if len(cache.shape) > 2 else 1
    return size if isinstance(size, int) else 1


def planned_states(plans: Iterable[Plan]) -> dict[str, PlannedState]:
    """Return the states of all `plans` by name. States of the same name in several plans are the same state."""
    from ingot.ir.parse import parse_type  # here, so that `--help` does not import torch

    return {
        name: PlannedState(state.group, parse_type(state.type), {dim: most for dim, (_, most) in plan.dims.items()})
        for plan in plans
        for name, state in plan.states.items()
    }
