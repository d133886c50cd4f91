"""The engine process: load an artifact, then serve the requests of the server process, in one thread.

    python -m ingot.serve.engine.process FD [CORES]

FD is the engine's end of a Unix socket pair, and CORES are the cores that the process may use, as in "0,1". The process
ends when the server closes the other end. It ignores SIGINT and SIGTERM: a service manager sends them to all processes
of a service, and the server still drains its requests.
"""

import logging
import os
import signal
import socket
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from ingot.error_text import encode_error
from ingot.ir.errors import IngotError, InternalError, RequestError
from ingot.runtime.engines.outputs import EmbeddingOutput
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.serve.engine.adapter_orders import AdapterOrders
from ingot.serve.engine.channel import Channel, ServerGone
from ingot.serve.engine.deltas import DeltaReport
from ingot.serve.engine.messages import (
    Abort,
    Add,
    Delta,
    Failed,
    LoadAdapter,
    Order,
    Pool,
    PrefixCacheReset,
    Ready,
    Refused,
    ResetPrefixCache,
    Start,
    Stats,
    Step,
    ToEngine,
    UnloadAdapter,
    Vector,
    VectorKind,
)
from ingot.serve.engine.orders import Orders
from ingot.serve.engine.prepared_grammars import PreparedGrammars
from ingot.serve.engine.vector_values import vector_bytes
from ingot.serve.garbage import keep_loaded_objects
from ingot.serve.llm import LLM
from ingot.serve.logs import set_up_logs

log = logging.getLogger("ingot.engine")


def main() -> None:
    """Serve the requests of the socket in the first argument until the server closes it. Exit with 1 on errors."""
    if len(sys.argv) > 2:
        os.sched_setaffinity(0, map(int, sys.argv[2].split(",")))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_up_logs(None, logging.WARNING)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    if not serve_connection(connection):
        sys.exit(1)


def serve_connection(connection: socket.socket) -> bool:
    """Serve the requests of a socket until the server closes it, and return True.

    After an error of loading or of a step, send it to the server, close the socket and return False.
    """
    channel = Channel(connection)
    try:
        try:
            _serve(channel)
        except IngotError as error:
            channel.send(Failed(encode_error(error)))
        except ServerGone:
            raise
        except Exception as error:
            log.exception("the engine failed")
            channel.send(Failed(encode_error(InternalError(f"the engine failed: {type(error).__name__}: {error}"))))
        channel.close()
    except ServerGone:
        return True
    return False


def _serve(channel: Channel) -> None:
    """Load the artifact of the first message, then serve requests. Raises ServerGone, and any error of a step."""
    first, *rest = channel.receive(wait=True)
    if not isinstance(first, Start):
        raise InternalError(f"the first message is {type(first).__name__}", expected="Start")
    llm = LLM(first.artifact, **first.options)
    requests = _Requests(llm, channel)
    failed = requests.adapters.load_all(first.adapters)
    llm.on_fault(channel.wake)
    keep_loaded_objects()
    channel.send(Ready(requests.max_num_seqs, llm.timings, requests.vectors, requests.adapters.max_loras, failed))
    requests.send_counts()
    for message in rest:
        requests.take(message)
    prepares = True
    while True:
        working = requests.can_step
        for message in channel.receive(wait=not working and not prepares):
            requests.take(message)
            prepares = True
        requests.add_prepared()
        requests.adapters.finish()
        if requests.can_step:
            requests.step()
        else:
            requests.send_changed_counts()
            prepares = llm.idle()  # raises the error of a rank that is gone, after a wake


class _Requests:
    """The engine and its requests.

    max_num_seqs   sequences that a step can hold
    vectors        what the model's vectors are; None for a model that generates tokens
    adapters       loads and unloads LoRA adapters
    """

    def __init__(self, llm: LLM, channel: Channel) -> None:
        self.engine: Any = llm.llm_engine
        self.vectors = _vector_kind(self.engine)
        self.max_num_seqs = self.engine.occupancy.free_rows
        self._channel = channel
        self._keys: set[int] = set()  # of the requests in the engine
        self._grammars = PreparedGrammars(self.engine, channel.wake)
        self._orders = Orders(self.engine, channel, self._add)
        self.adapters = AdapterOrders(self.engine, channel)
        self._sent: Stats | None = None  # the counts sent last

    @property
    def can_step(self) -> bool:
        """Return whether there is a step to run, and the engine is not paused."""
        return self._orders.steps and bool(self.engine.has_unfinished())

    def take(self, message: ToEngine) -> None:
        """Do what a message says."""
        match message:
            case Add() | Pool():
                if not self._orders.keep(message):
                    self._add(message)
            case Abort(key):
                waited = self._orders.forget(key) or self._grammars.forget(key)
                if not waited and key in self._keys:
                    self._keys.remove(key)
                    self.engine.abort(str(key))
                    self._orders.after_step()
            case Order():
                self._orders.take(message)
            case ResetPrefixCache():
                self._channel.send(PrefixCacheReset(self.engine.reset_prefix_cache()))
                self.send_counts()
            case LoadAdapter():
                self.adapters.load(message)
            case UnloadAdapter():
                self.adapters.unload(message)
            case Start():
                raise InternalError("a second Start", expected="one, as the first message")

    def send_counts(self) -> None:
        """Send the counts of requests and pages, without a step."""
        self._send_step([])

    def send_changed_counts(self) -> None:
        """Send the counts if they differ from the last ones sent, such as after a refusal that no step follows."""
        if self._stats() != self._sent:
            self.send_counts()

    def _send_step(self, deltas: list[Delta], vectors: Sequence[Vector] = ()) -> None:
        self._sent = self._stats()
        self._channel.send(Step(deltas, self._sent, list(vectors)))

    def add_prepared(self) -> None:
        """Queue the requests whose grammars are compiled now."""
        for message, error in self._grammars.prepared():
            if error is None:
                self._add(message)
            else:
                self._refuse(message, error)

    def _add(self, message: Add | Pool) -> None:
        if isinstance(message, Add) and self._grammars.keep(message):
            return
        try:
            if isinstance(message, Pool):
                self._add_pooling(message)
            else:
                self._add_sampling(message)
        except Exception as error:
            self._refuse(message, error)
            return
        self._keys.add(message.key)

    def _refuse(self, message: Add | Pool, error: BaseException) -> None:
        """End a request with an error. A fault of this program that one request causes ends that request alone."""
        if not isinstance(error, IngotError):
            log.error("a request failed", exc_info=error)
            error = InternalError(f"the request failed: {type(error).__name__}: {error}")
        self._channel.send(Refused(message.key, encode_error(error)))

    def _add_sampling(self, message: Add) -> None:
        """Queue a request for tokens. Raises RequestError."""
        from ingot.runtime.engines.engine import Engine, EngineRequest
        from ingot.runtime.params.prompt import Prompt

        if not isinstance(self.engine, Engine):
            raise RequestError(
                "the model makes vectors and no tokens",
                expected="an artifact whose entry 'main' has an ending that samples",
                hint="send the request to /v1/embeddings, /classify or /pooling",
            )
        params = SamplingParams(**message.params)
        prompt = Prompt(None, message.prompt_ids, message.cache_salt)
        report = DeltaReport(message.key, params.n)
        request = EngineRequest(
            str(message.key), prompt, params, message.stream, message.priority, report, adapter=message.adapter
        )
        self.engine.add_requests([request])

    def _add_pooling(self, message: Pool) -> None:
        """Queue a request for a vector. Raises RequestError."""
        from ingot.runtime.engines.pooling_engine import PoolingRequest
        from ingot.runtime.params.pooling_params import PoolingParams
        from ingot.runtime.params.prompt import Prompt

        if self.vectors is None:
            raise RequestError(
                "the model makes tokens and no vectors",
                expected="an artifact whose entry 'main' has the ending 'pool'",
            )
        prompt = Prompt(None, message.prompt_ids, message.cache_salt)
        params = PoolingParams(**message.params)
        self.engine.add_requests([PoolingRequest(str(message.key), prompt, params, message.priority)])

    def step(self) -> None:
        """Do one step and send what is new. Sends a message after every step, so that the server sees the progress."""
        deltas: list[Delta] = []
        vectors: list[Vector] = []
        for output in self.engine.step():
            if isinstance(output, EmbeddingOutput):
                vectors.append(_vector(output))
                self._keys.remove(vectors[-1].key)
            else:
                deltas += output.deltas
                if output.finished:
                    self._keys.remove(output.key)
        self._send_step(deltas, vectors)
        self._orders.after_step()

    def _stats(self) -> Stats:
        now, cache = self.engine.occupancy, self.engine.prefix_cache_stats
        return Stats(
            now.waiting + self._orders.num_kept + self._grammars.num_kept,
            now.running,
            now.pages_held,
            now.pages_releasing,
            now.pages_kept,
            now.pages,
            now.preemptions,
            cache.queries,
            cache.hits,
            self.engine.steps_ended,
            self.engine.seconds_waited,
            self.adapters.running,
            self.adapters.waiting,
            now.forced_tokens,
        )


def _vector_kind(engine: Any) -> VectorKind | None:
    from ingot.runtime.engines.pooling_engine import PoolingEngine

    if not isinstance(engine, PoolingEngine):
        return None
    return VectorKind(engine.width, engine.unit, engine.classes)


def _vector(output: EmbeddingOutput) -> Vector:
    values = vector_bytes(array("f", output.embedding))
    return Vector(int(output.request_id), values, output.finish_reason, output.stop_reason, output.num_cached_tokens)


if __name__ == "__main__":
    main()
