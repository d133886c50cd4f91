"""The memory that captured graphs share, and the check that no caller keeps outputs which the next graph overwrites."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from ingot.ir.errors import BackendError, InternalError


class GraphMemory:
    """The memory for activations and outputs that all CUDA graphs of an executor share. Each launch of a graph
    overwrites it. `launches` counts launches.

    arena    the bytes to allocate at the first capture, enough for the largest graph. Without it, a large graph that is
             captured after small ones would find no block large enough, and allocate more
    strict   for debugging: raise an error if a launch overwrites an output that a caller still holds
    check    (also an attribute) called before each launch, and when its results are there; raises an error if
             results are not valid, or no graph may be launched any more
    """

    def __init__(self, arena: int, *, strict: bool = False, check: Callable[[], None] = lambda: None) -> None:
        self.launches = 0
        self.check = check
        self._strict = strict
        self._lent: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self._arena = arena
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def captured(self, graph: torch.cuda.CUDAGraph, what: str, where: str = "") -> Iterator[None]:
        """Capture the work inside the `with` block as `graph`, on the current stream. Raises BackendError if it cannot
        be captured. In that error, `what` names the graph and `where` the place."""
        if self._keeper is None and self._arena:
            self._keeper, arena = torch.cuda.CUDAGraph(), self._arena  # the pool lives as long as any graph in it
            with self.captured(self._keeper, "the memory of graphs"):
                torch.empty(arena, dtype=torch.uint8, device="cuda")[:1].zero_()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            _end(graph)
            raise
        if problem := _end(graph):
            raise BackendError(f"{what} cannot be captured: {problem}", where=where)

    def begin_launch(self) -> None:
        """Count a launch of a CUDA graph, just before it. The launch overwrites the shared memory. With `strict`,
        raises InternalError if a caller still holds an output of an earlier launch."""
        self.check()
        held = [name for name, tensor in self._lent if tensor() is not None]
        self._lent.clear()
        if held:
            raise InternalError(
                f"the output '{held[0]}' of a step is held while the next one overwrites it",
                expected="a copy of outputs that are kept longer",
            )
        self.launches += 1

    def lend(self, outputs: Mapping[str, torch.Tensor], launch: int) -> dict[str, torch.Tensor]:
        """Return views of the outputs of a launch, by name. `launch` is the number of that launch. Raises InternalError
        if a later launch has overwritten the outputs."""
        if launch != self.launches:
            raise InternalError("the outputs of a step are read after a later step has overwritten them")
        lent = {name: value.view(value.shape) for name, value in outputs.items()}
        if self._strict:
            self._lent += [(name, weakref.ref(value)) for name, value in lent.items()]
        return lent


def _end(graph: torch.cuda.CUDAGraph) -> str:
    """End the capture of a graph, and return the text of its error; "" if it worked."""
    try:
        graph.capture_end()
    except RuntimeError as error:
        return str(error)
    return ""
