"""The orders of an operator to the engine process: to pause, to go on, to record a profile."""

from collections.abc import Callable
from typing import Any, Literal

from ingot.error_text import encode_error
from ingot.ir.errors import IngotError, InternalError, RequestError
from ingot.serve.engine.channel import Channel
from ingot.serve.engine.messages import Add, Done, Order, Pool
from ingot.serve.engine.profiler import Profiler


class Orders:
    """Carries out orders, and keeps the requests that arrive during a pause.

    engine    the engine of the process
    channel   to the server; it gets a `Done` for each order
    add       queues a request in the engine. After a pause it is called with each kept request, in order of arrival
    """

    def __init__(self, engine: Any, channel: Channel, add: Callable[[Add | Pool], None]) -> None:
        self._engine, self._channel, self._add = engine, channel, add
        self._state: Literal["running", "draining", "paused"] = "running"
        self._drain: Order | None = None
        self._kept: dict[int, Add | Pool] = {}
        self._profiler = Profiler()

    @property
    def steps(self) -> bool:
        """Return whether the engine may run steps. It may not while it is paused."""
        return self._state != "paused"

    @property
    def num_kept(self) -> int:
        """Return the number of requests that wait for the end of a pause."""
        return len(self._kept)

    def keep(self, request: Add | Pool) -> bool:
        """Keep a new request until the end of a pause, and return True. Without a pause, return False."""
        if self._state == "running":
            return False
        self._kept[request.key] = request
        return True

    def forget(self, key: int) -> bool:
        """Drop a kept request. Return whether there was one of this key."""
        return self._kept.pop(key, None) is not None

    def take(self, order: Order) -> None:
        """Carry out an order, and answer it. A drain is answered by `after_step`, when no request runs."""
        try:
            match order.action:
                case "pause":
                    self._state = "paused"
                case "drain":
                    self._end_drain("another pause has begun")
                    self._state, self._drain = "draining", order
                    self.after_step()
                    return
                case "resume":
                    self._resume()
                case "profile":
                    self._profiler.start()
                case "stop_profile":
                    self._profiler.stop(order.argument)
        except IngotError as error:
            self._channel.send(Done(order.number, encode_error(error)))
        except Exception as error:  # an order that fails leaves the engine as it is
            fault = InternalError(f"{order.action} failed: {type(error).__name__}: {error}")
            self._channel.send(Done(order.number, encode_error(fault)))
        else:
            self._channel.send(Done(order.number, None))

    def after_step(self) -> None:
        """End a drain if no request runs any more. The engine process calls this after each step and abort."""
        if self._drain is not None and not self._engine.has_unfinished():
            self._state = "paused"
            self._channel.send(Done(self._drain.number, None))
            self._drain = None

    def _resume(self) -> None:
        self._end_drain("the engine goes on")
        self._state = "running"
        kept, self._kept = self._kept, {}
        for request in kept.values():
            self._add(request)

    def _end_drain(self, reason: str) -> None:
        """Answer a drain that is not complete, because a later order ends it."""
        if self._drain is not None:
            error = RequestError(f"the pause did not come about: {reason}", expected="one order at a time")
            self._channel.send(Done(self._drain.number, encode_error(error)))
            self._drain = None
