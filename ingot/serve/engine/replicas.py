"""Several engine processes that serve one model. Each request goes to one of them, and to another if that one dies."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.ir.errors import EngineDeadError, IngotError
from ingot.serve.engine.client import EngineClient, EngineLimits, State, check_queue
from ingot.serve.engine.delta_stream import DeltaStream
from ingot.serve.engine.messages import VectorKind
from ingot.serve.engine.place import Place
from ingot.serve.engine.routing import Router
from ingot.serve.engine.sent_request import SentRequest
from ingot.serve.engine.vector_answer import VectorAnswer

log = logging.getLogger("ingot.serve")
# Of several replicas, the state of the whole is the first of these that one of them has.
_STATES: tuple[State, ...] = ("ready", "starting", "sleeping", "dead", "closed")
# A request that ends the engine's process would otherwise end one replica after the other.
_MOST_MOVES = 1
# A replica that has cached a whole prompt may have so many more sequences than the least loaded one. With 16, up to
# eight replicas find 99 % of what one with the cache of all finds, and with 4 they find 92 % (test_routing.py).
_BOUND = 16
# But at most this share of the sequences that a step can hold, so that none waits while another replica has room.
_BOUND_SHARE = 1 / 4


class Replicas:
    """Runs an engine process in each of `places`, and sends each request to one of them. It has the interface of
    `EngineClient`, and all methods run in one event loop.

    engines      the client of each process, in the order of `places`
    state        "ready" while one replica is; "dead" when all are
    page_size    tokens of a KV page
    adapters     name -> folder of the LoRA adapters that requests can use; all replicas load them

    `artifact`, `options` and `limits` are as in `EngineClient`. Restarts are limited for each replica, and the queue
    for all together.
    """

    def __init__(
        self,
        artifact: Path,
        options: dict[str, Any],
        limits: EngineLimits,
        places: Sequence[Place],
        page_size: int,
        adapters: dict[str, str] | None = None,
    ) -> None:
        self.adapters = {} if adapters is None else adapters
        self.engines = tuple(
            EngineClient(
                *(artifact, place.options(options), limits, self.adapters),
                index=index,
                place=place,
                rescue=self._rescue,
            )
            for index, place in enumerate(places)
        )
        self.options, self.limits = options, limits
        self._router = Router(len(self.engines), page_size)
        self._started = False
        self._emptied = [0] * len(self.engines)
        self._routes_by_prefix = options.get("enable_prefix_caching") is not False

    @property
    def state(self) -> State:
        """Return the state of the whole."""
        found = {engine.state for engine in self.engines}
        return next(state for state in _STATES if state in found)

    @property
    def paused(self) -> bool:
        """Return whether an operator has paused the replicas."""
        return any(engine.paused for engine in self.engines)

    @property
    def max_num_seqs(self) -> int:
        """Return the sequences that a step of one replica can hold; 0 before the first start."""
        return max(engine.max_num_seqs for engine in self.engines)

    @property
    def max_loras(self) -> int:
        """Return the LoRA adapters on a device at once; 0: none can be used, or before the first start."""
        return max(engine.max_loras for engine in self.engines)

    @property
    def vectors(self) -> VectorKind | None:
        """Return what the model's vectors are, as in `EngineClient`."""
        return next((engine.vectors for engine in self.engines if engine.vectors is not None), None)

    @property
    def num_unfinished(self) -> int:
        """Return the number of requests that have not ended."""
        return sum(engine.num_unfinished for engine in self.engines)

    async def start(self) -> None:
        """Start all replicas, and wait until they are ready. Later calls wait until one is.

        Raises the IngotError that kept one from starting; then all end.
        """
        if self._started:
            while self.state == "starting":
                await self.state_change()
            ready_engines(self.engines)
            return
        self._started = True
        try:
            await asyncio.gather(*(engine.start() for engine in self.engines))
        except BaseException:
            await self.close()
            raise

    async def state_change(self) -> None:
        """Wait until the state of a replica differs from what it was at this call."""
        changes = [asyncio.ensure_future(engine.state_change()) for engine in self.engines]
        try:
            await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for change in changes:
                change.cancel()

    def add(
        self,
        prompt_ids: list[int],
        params: dict[str, Any],
        num_sequences: int,
        *,
        stream: bool,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> DeltaStream:
        """Send a request to a replica. The arguments and errors are those of `EngineClient.add`."""
        self.check_room(num_sequences)
        engine = self._engine_for(prompt_ids, _prefix_salt(cache_salt, adapter), num_sequences)
        return engine.add(
            *(prompt_ids, params, num_sequences),
            stream=stream,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
        )

    def pool(
        self, prompt_ids: list[int], params: dict[str, Any], *, priority: int = 0, cache_salt: str | None = None
    ) -> VectorAnswer:
        """Send a request for a vector to a replica. The arguments and errors are those of `EngineClient.pool`."""
        self.check_room(1)
        engine = self._engine_for(prompt_ids, cache_salt, 1)
        return engine.pool(prompt_ids, params, priority=priority, cache_salt=cache_salt)

    def check_room(self, num_sequences: int) -> None:
        """Raise EngineDeadError if no replica is ready, QueueFullError if so many further sequences do not fit."""
        ready = self._ready()
        most = self.limits.max_waiting + sum(engine.max_num_seqs for engine in ready)
        check_queue(sum(engine.num_sequences for engine in ready), num_sequences, most)

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix caches of all replicas. Return False if one of them runs requests, and its cache has not
        changed. Raises EngineDeadError if no replica is ready."""
        return all(await asyncio.gather(*(engine.reset_prefix_cache() for engine in self._ready())))

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter in all replicas that are ready, and return when requests can use it. The others load it
        when they have started.

        Raises EngineDeadError, or the error of a replica. Then no replica has it.
        """
        ready = self._ready()
        found = await asyncio.gather(*(one.order_adapter(name, folder) for one in ready), return_exceptions=True)
        if errors := [one for one in found if isinstance(one, BaseException)]:
            loaded = [engine for engine, one in zip(ready, found, strict=True) if one is None]
            await asyncio.gather(*(one.order_adapter(name, None) for one in loaded), return_exceptions=True)
            raise errors[0]
        self.adapters[name] = folder

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter in all replicas. Requests that use it run to their end. Raises EngineDeadError."""
        self.adapters.pop(name, None)  # at once, so that no request comes after the message
        await asyncio.gather(*(one.order_adapter(name, None) for one in self._ready()), return_exceptions=True)

    async def close(self) -> None:
        """End all replicas. Requests in flight end with EngineDeadError."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    def _ready(self) -> list[EngineClient]:
        """Return the replicas that are ready. Raises EngineDeadError if there are none."""
        return ready_engines(self.engines)

    def _engine_for(self, prompt_ids: list[int], cache_salt: str | None, num_sequences: int) -> EngineClient:
        """Return the replica that gets a request. Raises EngineDeadError if none is ready."""
        ready = self._ready()
        # If the queue of all has room, one of them has.
        ready = [one for one in ready if one.num_sequences + num_sequences <= one.most_sequences] or ready
        for engine in ready:
            if self._emptied[engine.index] != engine.emptied:
                self._emptied[engine.index] = engine.emptied
                self._router.forget(engine.index)
        index = self._router.route(
            prompt_ids if self._routes_by_prefix else (),
            cache_salt,
            {engine.index: engine.num_sequences for engine in ready},
            min(_BOUND, int(self.max_num_seqs * _BOUND_SHARE)),
            max(engine.stats.pages for engine in ready),
        )
        return self.engines[index]

    def _rescue(self, requests: Sequence[SentRequest]) -> list[SentRequest]:
        """Send requests of a replica that has died to others. Return those that no other takes."""
        left = []
        for request in requests:
            message = request.message
            try:
                if request.moves >= _MOST_MOVES:
                    raise EngineDeadError("the request has moved before")
                salt = _prefix_salt(message.cache_salt, getattr(message, "adapter", None))
                self._engine_for(message.prompt_ids, salt, request.num_sequences).adopt(request)
            except IngotError:
                left.append(request)
        if moved := len(requests) - len(left):
            log.warning("%d requests of a replica that has died go to others", moved)
        return left


def _prefix_salt(cache_salt: str | None, adapter: str | None) -> str | None:
    """Return the salt of a request's prefix for the router: requests of other adapters share no cached pages."""
    return cache_salt if adapter is None else f"{adapter}\0{cache_salt or ''}"


def ready_engines(engines: Sequence[EngineClient]) -> list[EngineClient]:
    """Return the engines that are ready. Raises EngineDeadError if there are none."""
    ready = [engine for engine in engines if engine.state == "ready"]
    if not ready:
        raise engines[0].not_ready()
    return ready
