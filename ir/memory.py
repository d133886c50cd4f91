"""How the memory that a plan was given is shared out: what serving needs before the first KV page, and the pages."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ingot.ir.plan import Plan, Plans

if TYPE_CHECKING:
    from ingot.ir.types import TensorType


@dataclass(frozen=True)
class MemoryNeed:
    """What serving a plan takes, in bytes.

    weights      resident tensors, each once
    activations  what a step allocates at its peak with its inputs, and the outputs of the last step of each entry
    states       states that do not grow with the KV pages
    page         one KV page of all layers
    sequence     the KV pages of a sequence at full length
    """

    weights: int
    activations: int
    states: int
    page: int
    sequence: int

    @staticmethod
    def of(plans: Plans) -> "MemoryNeed":
        """Steps of all entries run one after the other, so the most that one of them allocates counts. What a step gave
        may be held while steps of other entries run, so the outputs of all entries count. Each plan counts the weights
        of all entries, and the states of its own: those of one name are one."""
        memories = [plan.memory for plan in plans.plans.values()]
        states, page = memories[0].states, memories[0].page
        if len(memories) > 1:  # a plan alone has counted its states, and needs no types, nor torch for them
            states, page = state_bytes(planned_states(plans.plans.values()).values())
        return MemoryNeed(
            weights=max(memory.weights for memory in memories),
            activations=max(
                bucket.memory.activations + plan.memory.inputs
                for plan in plans.plans.values()
                for bucket in plan.buckets
            )
            + sum(memory.outputs for memory in memories),
            states=states,
            page=page,
            sequence=page * max(memory.pages_per_sequence for memory in memories),
        )

    @property
    def fixed(self) -> int:
        """Bytes before the first KV page."""
        return self.weights + self.activations + self.states

    def pages_within(self, memory: int) -> int:
        """KV pages that fit into `memory` bytes beside all else; negative when that does not fit itself."""
        return (memory - self.fixed) // self.page


def state_bytes(states: Iterable[tuple["TensorType", Mapping[str, int]]]) -> tuple[int, int]:
    """(bytes of the states that do not grow with the KV pages, bytes of one page of those that do), each state by its
    type and the sizes of its dims."""
    kinds = {True: 0, False: 0}
    for state_type, sizes in states:
        paged = "pages" in state_type.shape
        kinds[paged] += math.prod(state_type.bind({**sizes, "pages": 1})) * state_type.dtype.itemsize
    return kinds[False], kinds[True]


def planned_states(plans: Iterable[Plan]) -> dict[str, tuple["TensorType", Mapping[str, int]]]:
    """The states of these plans by name, each by its type and the largest sizes of its dims."""
    from ingot.ir.parse import parse_type  # not at the top: `--help` loads no torch

    return {
        name: (parse_type(state.type), {dim: most for dim, (_, most) in plan.dims.items()})
        for plan in plans
        for name, state in plan.states.items()
    }
