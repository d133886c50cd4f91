"""How the memory that a plan was given is shared out: what serving needs before the first KV page, and the pages."""

from dataclasses import dataclass

from ingot.ir.plan import Plans


@dataclass(frozen=True)
class MemoryNeed:
    """What serving a plan takes, in bytes.

    weights      resident tensors, each once
    activations  what a step allocates at its peak, the outputs of the step before it and the inputs
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
        """Entries share weights and states, and one step of one of them runs at a time: the most of each."""
        memories = [plan.memory for plan in plans.plans.values()]
        return MemoryNeed(
            weights=max(memory.weights for memory in memories),
            activations=max(
                bucket.memory.activations + plan.memory.outputs + plan.memory.inputs
                for plan in plans.plans.values()
                for bucket in plan.buckets
            ),
            states=max(memory.states for memory in memories),
            page=max(memory.page for memory in memories),
            sequence=max(memory.page * memory.pages_per_sequence for memory in memories),
        )

    @property
    def fixed(self) -> int:
        """Bytes before the first KV page."""
        return self.weights + self.activations + self.states

    def pages_within(self, memory: int) -> int:
        """KV pages that fit into `memory` bytes beside all else; negative when that does not fit itself."""
        return (memory - self.fixed) // self.page
