"""The execution contexts of an engine: one for steps that run at once, and one for each size of captured steps."""

from collections.abc import Callable, Iterable
from typing import Any

from ingot.ir.errors import BackendError

Sizes = tuple[int, ...]
Describe = Callable[[Sizes], Iterable[tuple[str, tuple[int, ...]]]]


class Contexts:
    """Returns execution contexts of a TensorRT engine, with the shapes of a call set.

    library   the module `tensorrt`
    engine    the engine, deserialized
    describe  the name and the shape of each input with symbols, given the sizes of the symbols

    A CUDA graph is bound to the state of the context that it was captured from, so its shapes must not change
    afterwards (TensorRT's best practices, "CUDA Graphs"). A context also has to run once after its shapes change,
    before a graph is captured. Ingot runs each size once before it captures it. That run takes the *free* context; the
    capture takes this context away for its sizes, and the next run makes a new free one. So only sizes that are
    captured have contexts of their own. All contexts get their device memory from the caller.
    """

    def __init__(self, library: Any, engine: Any, describe: Describe, where: str) -> None:
        self._engine, self._describe, self._where = engine, describe, where
        self._strategy = library.ExecutionContextAllocationStrategy.USER_MANAGED
        self._free: tuple[Any, Sizes | None] | None = None
        self._captured: dict[Sizes, Any] = {}

    def take(self, sizes: Sizes, *, capturing: bool) -> Any:
        """Return the context for a call with these sizes of symbols. `capturing`: a CUDA graph is being captured.

        Raises BackendError if the engine has no such sizes, or if a capture begins with sizes that have not run.
        """
        if capturing:
            return self._for_capture(sizes)
        context, last = self._free or (self._new(), None)
        if last != sizes:
            self._free = context, None  # until all shapes are set
            self._set_shapes(context, sizes)
            self._free = context, sizes
        return context

    def _for_capture(self, sizes: Sizes) -> Any:
        if (known := self._captured.get(sizes)) is not None:
            return known
        if self._free is None or self._free[1] != sizes:
            raise BackendError(
                f"a CUDA graph is captured of a TensorRT engine with sizes {sizes} that have not run before",
                where=self._where,
                expected="a run with the same sizes before",
            )
        self._captured[sizes], self._free = self._free[0], None
        return self._captured[sizes]

    def _new(self) -> Any:
        context = self._engine.create_execution_context(self._strategy)
        if context is None:
            raise BackendError("TensorRT makes no execution context: the GPU may lack memory", where=self._where)
        return context

    def _set_shapes(self, context: Any, sizes: Sizes) -> None:
        for name, shape in self._describe(sizes):
            if not context.set_input_shape(name, shape):
                raise BackendError(
                    f"the TensorRT engine takes no input {name} of shape {list(shape)}",
                    where=self._where,
                    expected="a shape of the bucket class that it was built for",
                )
