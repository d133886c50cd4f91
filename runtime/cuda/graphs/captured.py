"""The captured CUDA graphs of a plan's steps, by their sizes."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from ingot.ir.errors import InternalError
from ingot.runtime.cuda.graphs.addresses import Addresses
from ingot.runtime.cuda.graphs.choice import GraphChoice
from ingot.runtime.cuda.graphs.delayed import DelayedEndings
from ingot.runtime.cuda.graphs.memory import GraphMemory
from ingot.runtime.cuda.graphs.step_graph import StepGraph
from ingot.runtime.cuda.handle import CudaStepHandle
from ingot.runtime.steps.bucket import Bucket
from ingot.runtime.steps.late_step import LateStep
from ingot.runtime.steps.step import StepLayout, StepSizes
from ingot.runtime.steps.step_outputs import StepOutputs

# A capture cannot be interrupted, so it must fit into this share of the available time.
_CERTAIN = 0.5


class Graphs:
    """Captures and launches CUDA graphs of steps, on the current stream.

    choice         chooses the next graph to capture before a step needs it
    buckets        the steps that can be captured: sizes -> compiled instructions
    layout         where each input is in the buffer of step inputs
    step_outputs   describes the outputs that the graphs return
    sizes          the symbolic dims that are known at load time: `pages`, `R` (maximum running sequences), `S` (slots
                   of convolution and scan states)
    memory         the memory that all graphs share
    device         the GPU
    resident       for debugging: the weights and states by name; each launch checks that none has moved. None: no
                   checks
    apart          capture the endings as graphs of their own, for steps whose endings wait for the host
    delayed        runs endings next to later forward passes; None: endings run at once
    seconds        (attribute) sizes of a graph -> how long its capture took
    """

    def __init__(
        self,
        choice: GraphChoice,
        buckets: Mapping[StepSizes, Bucket],
        layout: StepLayout,
        step_outputs: StepOutputs,
        sizes: Mapping[str, int],
        memory: GraphMemory,
        device: torch.device,
        resident: Mapping[str, torch.Tensor] | None = None,
        *,
        apart: bool = False,
        delayed: DelayedEndings | None = None,
    ) -> None:
        self.seconds: dict[StepSizes, float] = {}
        self._choice = choice
        self._buckets = buckets
        self._layout, self._step_outputs = layout, step_outputs
        self._sizes, self._memory, self._device = sizes, memory, device
        self._resident = resident
        self._options: dict[str, Any] = {"apart": apart, "delayed": delayed}
        self._graphs: dict[StepSizes, StepGraph] = {}
        self._addresses: dict[StepSizes, Addresses] = {}

    def launch(
        self, inputs: Mapping[str, torch.Tensor], size: StepSizes, step: StepSizes, *, returns_logprobs: bool
    ) -> CudaStepHandle | LateStep:
        """Start a step by replaying a CUDA graph, and return the step's handle. If some inputs are filled only later,
        it is a LateStep.

        inputs             the step's inputs on the host; they are padded to `size`
        size               the sizes of the graph, which is captured first if needed
        step               the sizes of the step
        returns_logprobs   copy log-probabilities to the host
        """
        if (graph := self._graphs.get(size)) is None:
            graph = self.capture(size)
        if size in self._addresses:
            self._addresses[size].check(self._watched(graph))
        return graph.launch(inputs, step, returns_logprobs=returns_logprobs)

    def capture(self, size: StepSizes) -> StepGraph:
        """Return the CUDA graph for steps of these sizes. Capture it first if needed. Raises InternalError if no graph
        can have these sizes."""
        if size not in self._graphs:
            if size not in self._buckets:
                raise InternalError(f"no graph can hold steps of {size.T} tokens of {size.B} sequences")
            begin = time.perf_counter()
            dims = {**self._sizes, **asdict(size)}
            bucket, layout, outputs = self._buckets[size], self._layout, self._step_outputs
            graph = StepGraph(bucket, layout, outputs, size, dims, self._device, self._memory, **self._options)
            if self._resident is not None:
                self._addresses[size] = Addresses.of(self._watched(graph), graph.what)
            self._graphs[size] = graph
            self.seconds[size] = time.perf_counter() - begin
        return self._graphs[size]

    def capture_for(self, rows: int) -> None:
        """Capture the smallest CUDA graph that can replay a decode step of batch size `rows`. Do nothing if no graph
        can."""
        if (size := next((size for size in self._buckets if rows <= size.B and not size.shares), None)) is not None:
            self.capture(size)

    def capture_all(self) -> None:
        for size in self._buckets:
            self.capture(size)

    def capture_next(self, seconds: float = math.inf) -> bool:
        """Capture the CUDA graph that steps will most likely need next, and return True. `seconds` is how long the host
        is idle. Return False if no graph is left, or if a capture may take too long."""
        size = self._choice.next(self._graphs)
        if size is None or self._expected(size) > _CERTAIN * seconds:
            return False
        self.capture(size)
        return True

    def _expected(self, size: StepSizes) -> float:
        """Return how many seconds the capture of the CUDA graph of these sizes may take.

        This is the longest capture so far of a graph with the same compiled plan. If there is none, it is the longest
        capture so far, or infinity without any.
        """
        same_class = [taken for other, taken in self.seconds.items() if self._buckets[other] is self._buckets[size]]
        return max(same_class or self.seconds.values(), default=math.inf)

    def _watched(self, graph: StepGraph) -> dict[str, torch.Tensor]:
        return {**(self._resident or {}), **graph.buffers}
