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
    activations  the largest allocation of a step, its inputs, and the last outputs of each entry (program of the model)
    states       the states with a row per running sequence, such as the last token
    groups       the bytes of a page and the numbers of pages, by name of the KV cache group
    slot         the recurrent states of one sequence, such as those of convolutions
    sequences    the most sequences that run at once (not bytes)
    scratch      the scratch pages (pages that are used in one step only), by name of the KV cache group
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
        """Return the memory that serving a model needs, from the plans of its entries (its programs).

        Entries run one after the other, so only the largest allocation of a step counts. The outputs of all entries
        count, because they may be kept while other entries run. Weights and states count once, even if several entries
        use them.

        `granularity` is the unit in which the device maps memory, in bytes. None means that the device cannot map one
        piece of memory into several caches. Then no KV cache group has scratch pages.
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
        """Return the bytes that serving needs without the pages of KV caches.

        They are for weights, activations, states of running sequences, and scratch pages.
        """
        return self.weights + self.activations + self.states + self.sequences * self.slot + self.scratch_bytes

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of the scratch pages of all KV cache groups.

        Scratch pages hold keys and values that are used in one step only.
        """
        return sum(one.bytes(self.granularity) for one in self.scratch.values())

    @property
    def page(self) -> int:
        """Return the bytes of one page of each KV cache group, added up."""
        return sum(group.page for group in self.groups.values())

    @property
    def sequence(self) -> int:
        """Return the bytes of the pages for one sequence of full length, in all KV cache groups.

        Pages that a pool reserves and never allocates are included.
        """
        return sum(self.least(name) * group.page for name, group in self.groups.items())

    def least(self, name: str) -> int:
        """Return the fewest pages with which the KV cache group `name` can serve one sequence of full length."""
        return self.groups[name].pages_per_sequence + CacheGroup.named(name).reserved

    def most(self, name: str, sequences: int) -> int:
        """Return the most pages that `sequences` running sequences can use in the KV cache group `name`."""
        own = sequences * self.groups[name].pages_per_sequence
        # With scratch pages, a long prompt chunk needs this many at once, and the step in flight may read as many.
        steps = 2 if self.has_scratch(name) else 1
        return own + steps * self.extra_in_step(name) + CacheGroup.named(name).reserved

    def extra_in_step(self, name: str) -> int:
        """Return how many more pages the KV cache group `name` may need during a step than between steps.

        Scratch pages, which are used in one step only, do not count.
        """
        group = self.groups[name]
        return min(group.pages_per_step, group.pages_per_sequence) if self.has_scratch(name) else group.pages_per_step

    def has_scratch(self, name: str) -> bool:
        """Return whether the KV cache group `name` has scratch pages.

        Scratch pages hold keys and values that are used in one step only.
        """
        return name in self.scratch and self.scratch[name].pages > 0

    def pages_within(self, memory: int) -> int:
        """Return how many pages each KV cache group can have if serving may use `memory` bytes in all.

        The result is negative if weights, activations and states alone need more.
        """
        return (memory - self.fixed) // self.page


class PlannedState(NamedTuple):
    """A state that a plan has: a tensor that stays on the device between steps.

    `group` names the states with the same page or row numbers. `type` is the tensor type. `sizes` maps symbols such as
    "T" to their largest sizes in the plan.
    """

    group: str
    type: "TensorType"
    sizes: Mapping[str, int]


def state_memory(states: Mapping[str, PlannedState]) -> tuple[int, int, dict[str, GroupMemory]]:
    """Return (bytes of row states, bytes of a slot, KV cache groups by name) for `states`, which are given by name.

    Row states have a row per running sequence, such as its last token. A slot holds the recurrent states of one
    sequence, such as the state of a convolution. A KV cache group comes with the bytes and numbers of its pages.
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
    """Return the number of tokens in a page of a KV cache, from its type [pages, parts, page_size, …].

    Returns 1 if the type does not show it.
    """
    size = cache.shape[2] if len(cache.shape) > 2 else 1
    return size if isinstance(size, int) else 1


def planned_states(plans: Iterable[Plan]) -> dict[str, PlannedState]:
    """Return the states of all `plans` by name. A name means one state, even if several plans have it."""
    from ingot.ir.parse import parse_type  # here, so that `--help` does not import torch

    return {
        name: PlannedState(state.group, parse_type(state.type), {dim: most for dim, (_, most) in plan.dims.items()})
        for plan in plans
        for name, state in plan.states.items()
    }
