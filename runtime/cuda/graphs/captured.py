"""The captured steps of a plan."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict

import torch

from ingot.ir.errors import InternalError
from ingot.runtime.bucket import Bucket
from ingot.runtime.cuda.graphs.addresses import Addresses
from ingot.runtime.cuda.graphs.choice import GraphChoice
from ingot.runtime.cuda.graphs.memory import GraphMemory
from ingot.runtime.cuda.graphs.step_graph import StepGraph
from ingot.runtime.cuda.handle import CudaStepHandle
from ingot.runtime.late_step import LateStep
from ingot.runtime.step import StepLayout, StepSizes
from ingot.runtime.step_outputs import StepOutputs

# A capture that is begun ends: only half of the time that there is can be counted on.
_CERTAIN = 0.5


class Graphs:
    """Graphs of the steps in `buckets`, captured and launched on the current stream. `choice` says which is captured
    ahead of need.

    Steps take the inputs of `layout` and give `gives`. `sizes` are the load-time dims, `memory` what graphs share. With
    `resident`, the weights and states as everybody else sees them, each launch checks that nothing has moved.
    `seconds` tells how long each capture took, by the sizes of the graphs that are there.
    """

    def __init__(
        self,
        choice: GraphChoice,
        buckets: Mapping[StepSizes, Bucket],
        layout: StepLayout,
        gives: StepOutputs,
        sizes: Mapping[str, int],
        memory: GraphMemory,
        device: torch.device,
        resident: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.seconds: dict[StepSizes, float] = {}
        self._choice = choice
        self._buckets = buckets
        self._layout, self._gives = layout, gives
        self._sizes, self._memory, self._device = sizes, memory, device
        self._resident = resident
        self._graphs: dict[StepSizes, StepGraph] = {}
        self._addresses: dict[StepSizes, Addresses] = {}

    def launch(
        self, inputs: Mapping[str, torch.Tensor], size: StepSizes, step: StepSizes, *, rated: bool
    ) -> CudaStepHandle | LateStep:
        """Start a step of the sizes `step` by the graph of `size`, which is captured when it is not there yet."""
        if (graph := self._graphs.get(size)) is None:
            graph = self.capture(size)
        if size in self._addresses:
            self._addresses[size].check(self._watched(graph))
        return graph.launch(inputs, step, rated=rated)

    def capture(self, size: StepSizes) -> StepGraph:
        """The graph of these sizes, captured when it is not there yet. Raises InternalError for sizes that no graph can
        have."""
        if size not in self._graphs:
            if size not in self._buckets:
                raise InternalError(f"no graph can hold steps of {size.T} tokens of {size.B} sequences")
            begin = time.perf_counter()
            dims = {**self._sizes, **asdict(size)}
            graph = StepGraph(self._buckets[size], self._layout, self._gives, size, dims, self._device, self._memory)
            if self._resident is not None:
                self._addresses[size] = Addresses.of(self._watched(graph), graph.what)
            self._graphs[size] = graph
            self.seconds[size] = time.perf_counter() - begin
        return self._graphs[size]

    def capture_for(self, rows: int) -> None:
        """Capture the least that holds so many sequences, if there is such."""
        if (size := next((size for size in self._buckets if rows <= size.B and not size.shares), None)) is not None:
            self.capture(size)

    def capture_all(self) -> None:
        for size in self._buckets:
            self.capture(size)

    def capture_next(self, seconds: float = math.inf) -> bool:
        """Capture what is likeliest to be needed, if that can be done in so many seconds."""
        size = self._choice.next(self._graphs)
        if size is None or self._expected(size) > _CERTAIN * seconds:
            return False
        self.capture(size)
        return True

    def _expected(self, size: StepSizes) -> float:
        """Seconds that capturing it will take: the most that one of its bucket class took, or any; without end where
        none was captured yet."""
        alike = [taken for other, taken in self.seconds.items() if self._buckets[other] is self._buckets[size]]
        return max(alike or self.seconds.values(), default=math.inf)

    def _watched(self, graph: StepGraph) -> dict[str, torch.Tensor]:
        return {**(self._resident or {}), **graph.buffers}
