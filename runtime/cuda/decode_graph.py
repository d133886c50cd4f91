"""Decode steps of one size as captured graphs: the host's inputs go in and the tokens come out by the graph itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ingot.ir.errors import BackendError, InternalError
from ingot.runtime.bucket import Bucket
from ingot.runtime.cuda.handle import CudaStepHandle
from ingot.runtime.cuda.staging import DeviceInputs, HostInputs, PinnedInts, move

# Steps whose inputs or tokens may be on their way at once: the one that runs, and the one that is prepared meanwhile.
# Each has pinned memory of its own, which its graph copies from and to, hence a graph of its own.
_IN_FLIGHT = 2


class DecodeGraph:
    """Steps of up to `rows` sequences that feed one token each, served by `bucket`.

    `pages` are the entries of a sequence in the page table, `sizes` the dims of the step, `pool` the memory that graphs
    share. It is captured on the current stream. Raises BackendError when that fails.
    """

    def __init__(
        self, bucket: Bucket, rows: int, pages: int, sizes: Mapping[str, int], device: torch.device, pool: Any
    ) -> None:
        inputs = DeviceInputs(rows, pages, device)
        # Once without a graph, on padding alone, which changes no state: libraries set themselves up, and what is wrong
        # is said by the call that is.
        move(inputs.flat, inputs.flat)
        bucket.run(inputs.views, sizes)
        torch.cuda.current_stream().synchronize()
        self._sides = [_Side(bucket, inputs, sizes, pool) for _ in range(_IN_FLIGHT)]
        self._turn = 0

    def launch(self, inputs: Mapping[str, torch.Tensor], rows: int, *, rated: bool) -> CudaStepHandle:
        """Start a step on the current stream. The handle is to be read before the next step but one is launched."""
        side = self._sides[self._turn]
        self._turn = (self._turn + 1) % _IN_FLIGHT
        return side.launch(inputs, rows, rated=rated)


class _Side:
    """One of the graphs that take turns, with the pinned memory at both its ends."""

    def __init__(self, bucket: Bucket, inputs: DeviceInputs, sizes: Mapping[str, int], pool: Any) -> None:
        self._bucket = bucket.plan.bucket.name
        self._inputs = HostInputs(inputs.sizes)
        self._tokens = PinnedInts([inputs.rows])
        self._retired = torch.cuda.Event()
        self._launches = 0
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            move(self._inputs.flat.device, inputs.flat)
            self._outputs = bucket.run(inputs.views, sizes)
            move(self._outputs["tokens"], self._tokens.device)
        except BaseException:
            _end(self._graph)
            raise
        if problem := _end(self._graph):
            raise BackendError(
                f"a decode step of {inputs.rows} sequences cannot be captured: {problem}",
                where=f"bucket class {self._bucket}",
            )

    def launch(self, inputs: Mapping[str, torch.Tensor], rows: int, *, rated: bool) -> CudaStepHandle:
        self._retired.synchronize()  # the step before last has taken its inputs, and given its tokens
        self._inputs.fill(inputs)
        self._graph.replay()
        self._launches += 1
        outputs = {name: value[:rows] for name, value in self._outputs.items()}
        return CudaStepHandle(self._bucket, outputs, self._reader(rows), self._retired, rated=rated)

    def _reader(self, rows: int) -> "TokenReader":
        return TokenReader(self._tokens.host, rows, self._launches, self)

    @property
    def launches(self) -> int:
        return self._launches


class TokenReader:
    """The tokens of one launch, as long as no later one has taken their place."""

    def __init__(self, tokens: torch.Tensor, rows: int, launch: int, side: _Side) -> None:
        self._tokens, self._rows, self._launch, self._side = tokens, rows, launch, side

    def __call__(self) -> list[int]:
        if self._side.launches != self._launch:
            raise InternalError("the tokens of a step are read after a later step has taken their place")
        tokens: list[int] = self._tokens[: self._rows].tolist()
        return tokens


def _end(graph: torch.cuda.CUDAGraph) -> str:
    """End a capture; what was wrong with it, "" when nothing was."""
    try:
        graph.capture_end()
    except RuntimeError as error:
        return str(error)
    return ""


def graph_sizes(candidates: Sequence[int], largest: int) -> list[int]:
    """The sizes of graphs for batches up to `largest`, the last of which the largest batch fills."""
    return sorted({*(size for size in candidates if size < largest), min(largest, candidates[-1])})
