"""How the memory that a plan was given is shared out: what serving needs before the first KV page, and the pages."""

import math
from dataclasses import dataclass

from ingot.ir.plan import Plans


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
        # A plan alone has counted its states; only the union of several needs types, and torch for them.
        states, page = (memories[0].states, memories[0].page) if len(memories) == 1 else _union(plans)
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


def _union(plans: Plans) -> tuple[int, int]:
    """The bytes of the states of all entries: of those that do not grow with the KV pages, and of one page."""
    from ingot.ir.parse import parse_type

    paged: dict[str, int] = {}
    others: dict[str, int] = {}
    for plan in plans.plans.values():
        sizes = {**{name: most for name, (_, most) in plan.dims.items()}, "pages": 1}
        for name, state in plan.states.items():
            state_type = parse_type(state.type)
            size = math.prod(state_type.bind(sizes)) * state_type.dtype.itemsize
            (paged if "pages" in state_type.shape else others)[name] = size
    return sum(others.values()), sum(paged.values())
