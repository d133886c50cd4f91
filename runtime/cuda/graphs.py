"""The captured decode steps of a plan."""

import math
import time
from collections.abc import Mapping

import torch

from ingot.runtime.bucket import Bucket
from ingot.runtime.cuda.addresses import Addresses
from ingot.runtime.cuda.decode_graph import DecodeGraph
from ingot.runtime.cuda.graph_memory import GraphMemory
from ingot.runtime.cuda.graph_sizes import GraphChoice
from ingot.runtime.cuda.handle import CudaStepHandle

# A capture that is begun ends: only half of the time that there is can be counted on.
_CERTAIN = 0.5


class DecodeGraphs:
    """Graphs of the sizes that `choice` knows, captured and launched on the current stream.

    `buckets` serves each size; `sizes` are the load-time dims, `pages` the entries of a sequence in the page table.
    With `resident`, the weights and states as everybody else sees them, each launch checks that nothing has moved.
    """

    def __init__(
        self,
        choice: GraphChoice,
        buckets: Mapping[int, Bucket],
        sizes: Mapping[str, int],
        pages: int,
        device: torch.device,
        resident: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.choice = choice
        self.seconds: dict[int, float] = {}  # that capturing took, by size
        self._buckets = buckets
        self._sizes, self._pages, self._device = sizes, pages, device
        self._resident = resident
        self._graphs: dict[int, DecodeGraph] = {}
        self._addresses: dict[int, Addresses] = {}
        self._memory: GraphMemory | None = None

    def launch(self, inputs: Mapping[str, torch.Tensor], rows: int, *, rated: bool) -> CudaStepHandle:
        """Start a decode step of `rows` sequences, which some graph holds."""
        size = self.choice.serving(rows, self._graphs)
        graph = self.capture(size)
        if size in self._addresses:
            self._addresses[size].check(self._watched(graph))
        return graph.launch(inputs, rows, rated=rated)

    def capture(self, size: int) -> DecodeGraph:
        """The graph of this size, captured when it is not there yet."""
        if size not in self._graphs:
            begin = time.perf_counter()
            dims = {**self._sizes, **dict.fromkeys("TBL", size), "P": self._pages}
            graph = DecodeGraph(self._buckets[size], size, self._pages, dims, self._device, self._shared_memory())
            if self._resident is not None:
                self._addresses[size] = Addresses.of(self._watched(graph), f"the graph of {size} sequences")
            self._graphs[size] = graph
            self.seconds[size] = time.perf_counter() - begin
        return self._graphs[size]

    def capture_next(self, seconds: float = math.inf) -> bool:
        """Capture the size that is likeliest to be needed, if that can be done in so many seconds."""
        size = self.choice.next(self._graphs)
        # The first capture of a bucket class loads its code, and takes longer; others take as long as any did.
        if size is None or max(self.seconds.values(), default=0.0) > _CERTAIN * seconds:
            return False
        self.capture(size)
        return True

    def _shared_memory(self) -> GraphMemory:
        if self._memory is None:
            arena = max(bucket.plan.memory.activations for bucket in self._buckets.values())
            self._memory = GraphMemory(arena, strict=self._resident is not None)
        return self._memory

    def _watched(self, graph: DecodeGraph) -> dict[str, torch.Tensor]:
        return {**(self._resident or {}), **graph.buffers}
