"""The server's side of the engine process: start it, send requests, deliver deltas, start it again when it dies."""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ingot.error_text import decode_error
from ingot.ir.errors import EngineDeadError, IngotError, InternalError, QueueFullError
from ingot.runtime.module_command import module_command
from ingot.serve.engine.connection import EngineConnection
from ingot.serve.engine.delta_stream import DeltaStream
from ingot.serve.engine.messages import (
    Abort,
    Add,
    Delta,
    Done,
    Failed,
    Message,
    Order,
    Pool,
    PrefixCacheReset,
    Ready,
    Refused,
    ResetPrefixCache,
    Start,
    Stats,
    Step,
    ToServer,
    Vector,
    VectorKind,
    adapter_message,
)
from ingot.serve.engine.place import ANYWHERE, Place
from ingot.serve.engine.sent_request import SentRequest
from ingot.serve.engine.vector_answer import VectorAnswer
from ingot.serve.engine.wakeups import Wakeups

State = Literal["starting", "ready", "sleeping", "dead", "closed"]
Action = Literal["pause", "drain", "resume", "profile", "stop_profile"]
log = logging.getLogger("ingot.serve")


@dataclass(frozen=True)
class EngineLimits:
    """Limits of the client, in requests and seconds.

    max_waiting       sequences that may wait for a place in a step; more are refused with QueueFullError
    restarts, within  an engine that dies more often than `restarts` times in `within` seconds is not started again
    step_timeout      an engine with requests that completes no step for so long counts as hung, and is killed
    """

    max_waiting: int = 4096
    restarts: int = 3
    within: float = 600.0
    step_timeout: float = 300.0


def start_process(connection: socket.socket, place: Place) -> "subprocess.Popen[bytes]":
    """Start an engine process that serves the requests of `connection`, one end of a socket pair."""
    return subprocess.Popen(
        module_command("ingot.serve.engine.process", str(connection.fileno()), *place.arguments),
        env={**os.environ, **place.variables},
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches only the server
    )


class EngineClient:
    """Runs one engine process, and sends it requests. All methods run in one event loop.

    state         "starting" until the engine has loaded the artifact, also after a restart; "ready"; "sleeping" between
                  `suspend` and `wake`; "dead" when it is not started again; "closed"
    stats         the counts of the last step
    restarts      how often the engine was started again
    timings       the seconds of each phase of the last start, as in `LLM.timings`
    options       the arguments of `LLM` that the engine gets; limits: those of this client
    max_num_seqs  sequences that a step can hold; 0 before the first start
    num_sequences
                  sequences of all requests that have not ended
    max_loras     LoRA adapters on the device at once; 0: none can be used
    vectors       what the model's vectors are; None for a model that generates tokens, and before the first start
    paused        whether the engine runs no steps until it is resumed; a restarted engine is paused again
    emptied       how often the prefix cache has become empty
    index         the number of this engine among the replicas; place: what its process runs on
    adapters      name -> folder of the LoRA adapters that requests can use. Restarted engines, too, load them

    `rescue` is called when the engine has ended by itself, with the requests that had not begun. It returns those that
    end with EngineDeadError; another engine has taken the others.
    """

    def __init__(
        self,
        artifact: Path,
        options: dict[str, Any],
        limits: EngineLimits,
        adapters: dict[str, str] | None = None,
        *,
        index: int = 0,
        place: Place = ANYWHERE,
        rescue: Callable[[Sequence[SentRequest]], Sequence[SentRequest]] = lambda requests: requests,
    ) -> None:
        self.state: State = "starting"
        self.stats = Stats()
        self.restarts = 0
        self.timings: dict[str, float] = {}
        self.vectors: VectorKind | None = None
        self.paused = False
        self.emptied = 0
        self.index, self.place = index, place
        self.options = options
        self.adapters = {} if adapters is None else adapters
        self._start = Start(str(artifact), options, self.adapters)
        self._given: dict[str, str] = {}  # the adapters in the last Start
        self.limits = limits
        self.max_num_seqs = self.max_loras = 0
        self._keys = itertools.count(1)
        self._rescue = rescue
        self._requests: dict[int, SentRequest] = {}  # by key
        self.num_sequences = 0
        self._wakeups = Wakeups()
        self._connection: EngineConnection | None = None
        self._resets: deque[asyncio.Future[bool]] = deque()
        self._orders: dict[int, asyncio.Future[None]] = {}  # by number
        self._awake, self._stopped = asyncio.Event(), asyncio.Event()
        self._awake.set()
        self._error: IngotError | None = None
        self._last_sign = time.monotonic()
        self._changed = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine and wait until it is ready. Raises the IngotError that kept it from starting."""
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(self._supervise())
        while self.state == "starting":
            await self.state_change()
        if self.state != "ready":
            raise self._error or self.not_ready()

    def state_change(self) -> Coroutine[Any, Any, object]:
        """Wait until `state` differs from what it was at this call."""
        return self._changed.wait()

    @property
    def engines(self) -> tuple["EngineClient", ...]:
        """Return all engines that serve the model: this one."""
        return (self,)

    @property
    def num_unfinished(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._requests)

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
        """Send a request to the engine and return its deltas.

        `params` and `adapter` are as in `Add`. `num_sequences` is the request's n.

        Raises EngineDeadError if no engine is ready, QueueFullError if too many sequences wait. A request that the
        engine refuses raises its RequestError from the stream.
        """
        key = next(self._keys)
        self.check_room(num_sequences)
        answer = DeltaStream(num_sequences, lambda: self._abort(key), self._wakeups, self.index)
        message = Add(key, prompt_ids, params, stream, priority, cache_salt, adapter)
        self._send_request(SentRequest(message, answer, num_sequences))
        return answer

    def pool(
        self, prompt_ids: list[int], params: dict[str, Any], *, priority: int = 0, cache_salt: str | None = None
    ) -> VectorAnswer:
        """Send a request for the vector of a prompt, and return its answer. `params` as in `Pool`.

        Raises as `add`. A request that the engine refuses raises its RequestError from the answer.
        """
        key = next(self._keys)
        self.check_room(1)
        answer = VectorAnswer(lambda: self._abort(key), self.index)
        self._send_request(SentRequest(Pool(key, prompt_ids, params, priority, cache_salt), answer, 1))
        return answer

    def adopt(self, request: SentRequest) -> None:
        """Serve a request that another engine had not begun, even if the queue is full: it was accepted before. The
        caller notices nothing. Raises EngineDeadError if this engine is not ready."""
        key = next(self._keys)
        self._send_request(request.renumbered(key))
        request.answer.move(lambda: self._abort(key), self.index)

    @property
    def most_sequences(self) -> int:
        """Return how many sequences may run or wait at once."""
        return self.limits.max_waiting + self.max_num_seqs

    def check_room(self, num_sequences: int) -> None:
        """Raise EngineDeadError if no engine is ready, QueueFullError if so many further sequences do not fit."""
        if self.state != "ready" or self._connection is None:
            raise self.not_ready()
        check_queue(self.num_sequences, num_sequences, self.most_sequences)

    def _send_request(self, request: SentRequest) -> None:
        # Before the request is counted, so that a message that cannot be encoded leaves no trace. Answers come in
        # a later pass of the event loop.
        self._send(request.message)
        if not self._requests:
            self._last_sign = time.monotonic()
        self._requests[request.message.key] = request
        self.num_sequences += request.num_sequences

    def _send(self, message: Message) -> None:
        """Send a message to the engine. Raises EngineDeadError if none is ready."""
        if self.state != "ready" or self._connection is None:
            raise self.not_ready()
        self._connection.send(message)

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Return False if requests run, and nothing has changed. Raises EngineDeadError."""
        self._send(ResetPrefixCache())
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resets.append(answer)
        return await answer

    async def order(self, action: Action, argument: str = "") -> None:
        """Let the engine carry out an order, as described in `Order`. Raises EngineDeadError, or the engine's error."""
        number = next(self._keys)
        await self._done(number, Order(number, action, argument))

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter, and return when requests can use it. Raises EngineDeadError, or the engine's error."""
        await self.order_adapter(name, folder)
        self.adapters[name] = folder

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Requests that use it run to their end. Raises as `load_adapter`."""
        self.adapters.pop(name, None)  # at once, so that no request comes after the message
        await self.order_adapter(name, None)

    async def order_adapter(self, name: str, folder: str | None) -> None:
        """Let the engine load an adapter, or unload it if `folder` is None; `adapters` stays. Raises as both."""
        number = next(self._keys)
        await self._done(number, adapter_message(number, name, folder))

    def _catch_up(self) -> None:
        """Let an engine that has just started load and unload the adapters that have come and gone since its Start."""
        later = {name: folder for name, folder in self.adapters.items() if name not in self._given}
        for name, folder in {**later, **dict.fromkeys(self._given.keys() - self.adapters.keys())}.items():
            self._send(adapter_message(next(self._keys), name, folder))

    async def _done(self, number: int, message: Message) -> None:
        """Send a message, and wait for its `Done`. Raises EngineDeadError, or the engine's error."""
        self._send(message)
        answer = self._orders[number] = asyncio.get_running_loop().create_future()
        try:
            await answer
        finally:
            self._orders.pop(number, None)

    async def suspend(self) -> None:
        """End the engine process until `wake`, and return when its memory is free. Requests in flight end with
        EngineDeadError. Raises EngineDeadError if no engine is ready."""
        if self.state != "ready" or self._connection is None:
            raise self.not_ready()
        self._awake.clear()
        self._stopped.clear()
        self._become("sleeping")
        self.fail_all(EngineDeadError("the request was ended, because the engine sleeps", hint="send it again later"))
        self._connection.close()
        await self._stopped.wait()

    async def wake(self) -> None:
        """Start the engine again after `suspend`, and return when it is ready. Without one, return when the engine is
        ready. Raises as `start`."""
        if not self._awake.is_set():
            self._awake.set()
            self._become("starting")
        await self.start()

    async def close(self) -> None:
        """End the engine. Requests in flight end with EngineDeadError."""
        self._become("closed")
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._fail_all()

    def _become(self, state: State) -> None:
        if self.state in ("closed", state):
            return
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    def not_ready(self) -> EngineDeadError:
        """Return the error of a request while no engine is ready."""
        what = {"starting": "is starting", "sleeping": "sleeps"}.get(self.state, "has ended")
        return EngineDeadError(f"the engine {what}", expected="a ready engine", hint="try again later")

    def _abort(self, key: int) -> None:
        if self._forget(key) and self._connection is not None:
            self._connection.send(Abort(key))

    def _forget(self, key: int) -> SentRequest | None:
        request = self._requests.pop(key, None)
        if request is not None:
            self.num_sequences -= request.num_sequences
        return request

    async def _supervise(self) -> None:
        """Run engines until the client closes, or until they die too often."""
        try:
            await self._restarting()
        except Exception:
            log.exception("the supervisor of the engine failed")
        finally:
            self._become("dead")
            self._fail_all()
            self._stopped.set()

    async def _restarting(self) -> None:
        deaths: deque[float] = deque()
        was_ready = False
        while True:
            await self._run_once()
            was_ready = was_ready or self.state in ("ready", "sleeping")
            if not self._awake.is_set():
                self._fail_all()
                self._stopped.set()
                await self._awake.wait()
                continue
            self._become("starting")
            self._lose_all()
            now = time.monotonic()
            deaths.append(now)
            while deaths[0] < now - self.limits.within:
                deaths.popleft()
            if not was_ready or len(deaths) > self.limits.restarts:
                log.error("the engine has ended %d times, and is not started again", len(deaths))
                return
            self.restarts += 1
            log.error("the engine has ended; starting it again (%d of %d)", len(deaths), self.limits.restarts)
            await asyncio.sleep(min(len(deaths) - 1, 5))  # the first time at once

    async def _run_once(self) -> None:
        """Start an engine, and return when it has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = start_process(theirs, self.place)
        self._connection = connection = await EngineConnection.open(ours, self._take)
        self._given = dict(self.adapters)
        connection.send(self._start)
        self._last_sign = time.monotonic()
        try:
            while not await connection.closed_within(1.0):
                self._kill_if_hung(process)
        finally:
            self._connection = None
            connection.close()
            process.kill()  # no effect if it has ended
            await asyncio.to_thread(process.wait)

    def _kill_if_hung(self, process: "subprocess.Popen[bytes]") -> None:
        silent = time.monotonic() - self._last_sign
        if self.state == "ready" and not self.paused and self._requests and silent > self.limits.step_timeout:
            log.error("the engine has completed no step for %d s; killing it", silent)
            process.kill()

    def _lose_all(self) -> None:
        """End all requests because the engine has ended, but for those that had not begun and that others take."""
        waiting = [request for request in self._requests.values() if not request.answer.begun]
        for request in waiting:
            self._forget(request.message.key)
        for request in self._rescue(waiting):
            request.answer.fail(_ended())
        self._fail_all()

    def _fail_all(self) -> None:
        """End all requests and orders with EngineDeadError, because the engine has ended."""
        self.emptied += 1
        error = _ended()
        self.fail_all(error)
        while self._resets:
            answer = self._resets.popleft()
            if not answer.done():
                answer.set_exception(error)
        for done in self._orders.values():
            if not done.done():
                done.set_exception(error)
        self.stats = Stats(preemptions=0)

    def fail_all(self, error: IngotError) -> None:
        """End all requests with an error. A running engine aborts them."""
        for key in list(self._requests):
            request = self._forget(key)
            assert request is not None
            request.answer.fail(error)
            if self.state == "ready" and self._connection is not None:
                self._connection.send(Abort(key))

    def _deliver(self, part: Delta | Vector) -> None:
        """Give a delta or a vector to its request."""
        request = self._requests.get(part.key)
        if request is not None:  # otherwise it was aborted while this part was on its way
            answer = request.answer
            answer.put(part)  # type: ignore[arg-type]  # the engine answers `Add` with deltas, and `Pool` with a vector
            if answer.ended:
                self._forget(part.key)

    def _take(self, message: ToServer) -> None:
        """Act on a message of the engine."""
        self._last_sign = time.monotonic()
        match message:
            case Step(deltas, stats, vectors):
                self.stats = stats
                for delta in deltas:
                    self._deliver(delta)
                for vector in vectors:
                    self._deliver(vector)
            case Refused(key, error):
                request = self._forget(key)
                if request is not None:
                    request.answer.fail(decode_error(error))
            case Ready(max_num_seqs, timings, vectors, max_loras, failed):
                if failed and not self.restarts and not self.max_num_seqs:  # the first start
                    self._error = decode_error(next(iter(failed.values())))
                    self._become("dead")
                    return
                for name, text in failed.items():
                    log.error("the adapter '%s' cannot be loaded again: %s", name, decode_error(text))
                    self.adapters.pop(name, None)
                self.max_num_seqs, self.timings, self.vectors = max_num_seqs, timings, vectors
                self.max_loras = max_loras
                self._given = {name: folder for name, folder in self._given.items() if name not in failed}
                self._become("ready")
                self._catch_up()
                if self.paused:
                    self._send(Order(next(self._keys), "pause"))
            case Failed(error):
                self._error = decode_error(error)
                log.error("the engine failed: %s", self._error)
            case PrefixCacheReset(done):
                self.emptied += int(done)
                answer = self._resets.popleft()
                if not answer.done():
                    answer.set_result(done)
            case Done(number, error):
                self._finish_order(number, error)
            case _:
                raise InternalError(f"a message of type {type(message).__name__} from the engine")

    def _finish_order(self, number: int, error: dict[str, str] | None) -> None:
        """Answer an order. Its caller may have left."""
        answer = self._orders.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(decode_error(error))


def check_queue(present: int, further: int, most: int) -> None:
    """Raise QueueFullError if `further` sequences do not fit, because `present` ones run or wait, of at most `most`."""
    if present + further > most:
        raise QueueFullError(
            f"{present} sequences run or wait, and {further} more do not fit",
            expected=f"at most {most}",
            hint="try again later, or send fewer at once",
        )


def _ended() -> EngineDeadError:
    return EngineDeadError("the engine ended while the request ran", hint="send the request again")
