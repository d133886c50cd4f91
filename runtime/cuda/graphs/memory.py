"""What captured graphs have in common: memory, and whose results lie in it."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ingot.ir.errors import BackendError, InternalError


class GraphMemory:
    """The memory of everything that lives within a captured step, its outputs included. Each graph overwrites what the
    one before it left there; `launches` counts them.

    `arena` bytes are taken at once, or a large graph that is captured after small ones would find no piece that is
    large enough, and take more. With `strict` it is an error if an output is still held when it is overwritten.
    """

    def __init__(self, arena: int, *, strict: bool = False) -> None:
        self.launches = 0
        self._strict = strict
        self._lent: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self._arena = arena
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def captured(self, graph: torch.cuda.CUDAGraph, what: str, where: str = "") -> Iterator[None]:
        """What runs within becomes `graph`, on the current stream. Raises BackendError when it cannot."""
        if self._keeper is None and self._arena:
            self._keeper, arena = torch.cuda.CUDAGraph(), self._arena  # the pool lasts as long as a graph of it
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
        """A graph is about to overwrite what lies here. Raises InternalError for an output that is still held."""
        held = [name for name, tensor in self._lent if tensor() is not None]
        self._lent.clear()
        if held:
            raise InternalError(
                f"the output '{held[0]}' of a step is held while the next one overwrites it",
                expected="a copy of what is kept longer",
            )
        self.launches += 1

    def lend(self, outputs: Mapping[str, torch.Tensor], launch: int) -> dict[str, torch.Tensor]:
        """The outputs of the `launch`th launch. Raises InternalError when others lie there by now."""
        if launch != self.launches:
            raise InternalError("the outputs of a step are read after a later step has taken their place")
        lent = {name: value.view(value.shape) for name, value in outputs.items()}
        if self._strict:
            self._lent += [(name, weakref.ref(value)) for name, value in lent.items()]
        return lent


def _end(graph: torch.cuda.CUDAGraph) -> str:
    """End a capture; what was wrong with it, "" when nothing was."""
    try:
        graph.capture_end()
    except RuntimeError as error:
        return str(error)
    return ""
