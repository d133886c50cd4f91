"""The vector of one request on its way to the caller."""

import asyncio
from collections.abc import Callable

from ingot.serve.engine.messages import Vector


class VectorAnswer:
    """The answer to a request for a vector, which the client of the engine fills. It has the methods that the client
    calls of a `DeltaStream`.

    on_leave   called once if the caller closes the answer before the vector has come
    engine     the number of the engine that serves the request
    begun      False: the only part of an answer is the vector
    """

    begun = False

    def __init__(self, on_leave: Callable[[], None], engine: int = 0) -> None:
        self._result: asyncio.Future[Vector | None] = asyncio.get_running_loop().create_future()
        self._on_leave = on_leave
        self.engine = engine
        self._error: Exception | None = None

    @property
    def ended(self) -> bool:
        """Return whether the engine will send no more."""
        return self._error is not None or self._result.done()

    @property
    def failed(self) -> bool:
        """Return whether an error ended the request."""
        return self._error is not None

    def put(self, vector: Vector) -> None:
        """Set the vector."""
        if not self.ended:
            self._result.set_result(vector)

    def move(self, on_leave: Callable[[], None], engine: int) -> None:
        """Let another engine serve the request."""
        self._on_leave, self.engine = on_leave, engine

    def fail(self, error: Exception) -> None:
        """End the request with an error, which the caller gets."""
        if not self.ended:
            self._error = error
            self._result.set_result(None)

    def close(self) -> None:
        """End the request from the caller's side. The engine aborts it, unless it has ended."""
        if not self.ended:
            self._result.set_result(None)
            self._on_leave()

    async def vector(self) -> Vector | None:
        """Wait for the vector, and return it. None if the caller has closed the answer. Raises the error that ended the
        request."""
        vector = await asyncio.shield(self._result)
        if self._error is not None:
            raise self._error
        return vector
