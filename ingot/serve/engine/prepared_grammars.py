"""Requests with new grammars wait here until another thread has compiled them, so that no step waits for that."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ingot.ir.errors import IngotError
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.serve.engine.messages import Add


class PreparedGrammars:
    """Keeps the requests whose grammars are being compiled.

    engine   the engine of the process
    wake     wakes the engine's thread if it waits for messages; called in another thread
    """

    def __init__(self, engine: Any, wake: Callable[[], None]) -> None:
        self._engine, self._wake = engine, wake
        self._kept: dict[int, tuple[Add, Future[Any]]] = {}

    @property
    def num_kept(self) -> int:
        """Return the number of requests that wait for their grammars."""
        return len(self._kept)

    def keep(self, request: Add) -> bool:
        """Begin to compile a request's grammar, keep the request, and return True. If it has none, or if its grammar is
        compiled already, return False. So it does for invalid parameters, which the engine refuses."""
        if (given := request.params.get("structured_outputs")) is None or not hasattr(self._engine, "grammars"):
            return False
        try:
            params = SamplingParams(structured_outputs=given).structured_outputs
        except IngotError:
            return False
        assert params is not None
        if self._engine.grammars.has(params):
            return False
        self._kept[request.key] = request, self._engine.grammars.prepare(params, self._wake)
        return True

    def forget(self, key: int) -> bool:
        """Drop a kept request. Return whether there was one of this key."""
        return self._kept.pop(key, None) is not None

    def prepared(self) -> list[tuple[Add, BaseException | None]]:
        """Return the requests whose grammars are compiled, in the order of arrival, and keep them no longer. An error
        is the reason why a grammar was refused."""
        done = [(request, future) for request, future in self._kept.values() if future.done()]
        for request, _ in done:
            del self._kept[request.key]
        return [(request, future.exception()) for request, future in done]
