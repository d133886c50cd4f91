"""How the memory that a plan was given is shared out: what serving needs before the first KV page, and the pages."""

from dataclasses import dataclass

from ingot.ir.plan import Plan


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
    def of(plan: Plan) -> "MemoryNeed":
        memory = plan.memory
        return MemoryNeed(
            weights=memory.weights,
            activations=max(bucket.memory.activations for bucket in plan.buckets) + memory.outputs + memory.inputs,
            states=memory.states,
            page=memory.page,
            sequence=memory.page * memory.pages_per_sequence,
        )

    @property
    def fixed(self) -> int:
        """Bytes before the first KV page."""
        return self.weights + self.activations + self.states

    def pages_within(self, memory: int) -> int:
        """KV pages that fit into `memory` bytes beside all else; negative when that does not fit itself."""
        return (memory - self.fixed) // self.page
