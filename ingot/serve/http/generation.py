"""The generation for one HTTP request: one engine request for each prompt, their deltas merged, their metrics."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ingot.runtime.grammar.params import FAILED
from ingot.runtime.params.prompt import Prompt
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.serve.engine.delta_stream import DeltaStream
from ingot.serve.engine.messages import Delta
from ingot.serve.http.beam_search import BeamRequest, BeamStream
from ingot.serve.http.errors import HttpError, check_priority
from ingot.serve.http.metrics import Metrics
from ingot.serve.http.serving import Serving
from ingot.serve.http.tracing import add_to_span

Receive = Callable[[], Awaitable[Any]]  # ASGI's `receive`


class Generation:
    """The prompts of one HTTP request while they are served.

    Iterate over it for tuples of the index of a prompt and its new deltas. Close it in any case: that aborts the
    requests that have not ended. With `stream`, the engine sends a delta after each step, else only at the end.
    `model` is the model that the request names, which may be a LoRA adapter.
    Raises RequestError, QueueFullError or EngineDeadError if the engine does not take all prompts.

    num_cached   prompt tokens that were found in the prefix cache, over all prompts so far
    num_tokens   generated tokens so far
    """

    def __init__(
        self,
        serving: Serving,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | BeamRequest],
        *,
        stream: bool,
        priority: int,
        model: str | None = None,
    ) -> None:
        if serving.draining:
            raise HttpError(503, "the server is shutting down", code="shutting_down")
        check_priority(priority)
        self.prompts, self.params = prompts, params
        self.num_cached = self.num_tokens = 0
        self._streams: list[DeltaStream | BeamStream] = []
        self._times: list[_Times] = []
        self._first: tuple[int, list[Delta]] | None = None
        self._watching: asyncio.Task[None] | None = None
        add_to_span(self)
        adapter = serving.adapter_of(model)
        try:
            for prompt, one in zip(prompts, params, strict=True):
                own: DeltaStream | BeamStream
                if isinstance(one, BeamRequest):
                    own = BeamStream(serving.llm, prompt, one, priority=priority, adapter=adapter)
                else:
                    own = serving.llm.submit(prompt, one, stream=stream, priority=priority, adapter=adapter)
                self._streams.append(own)
                self._times.append(_Times(serving.metrics, own, prompt, streamed=stream))
        except BaseException:
            self.close()
            raise
        serving.polling.begin()
        self._next = self._next_of_one if len(self._streams) == 1 else self._merged().__anext__

    @property
    def num_prompt_tokens(self) -> int:
        """Return the tokens of all prompts together."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def first_token_s(self) -> float | None:
        """Return the seconds to the first token. None: there was none yet, or the request is not streamed."""
        return min((one.first_token_s for one in self._times if one.first_token_s is not None), default=None)

    async def begin(self, receive: Receive) -> None:
        """Wait for the first deltas, so that an error before them has a status of its own. Raises the engine's errors.

        From now on, this generation is closed if the client leaves.
        """
        self._watching = asyncio.create_task(self._watch(receive))
        self._first = await anext(self, None)

    @contextlib.asynccontextmanager
    async def closed_if_left(self, receive: Receive) -> AsyncIterator[None]:
        """Close this generation if the client leaves inside the block."""
        watching = asyncio.create_task(self._watch(receive))
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.close()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> tuple[int, list[Delta]]:
        first, self._first = self._first, None
        return await self._next() if first is None else first

    def close(self) -> None:
        """Abort the requests that have not ended."""
        for stream, times in zip(self._streams, self._times, strict=True):
            stream.close()
            times.end("error" if stream.failed else "abort")
        if self._watching is not None:
            self._watching.cancel()

    async def _next_of_one(self) -> tuple[int, list[Delta]]:
        return self._counted(0, await self._streams[0].__anext__())

    async def _merged(self) -> AsyncIterator[tuple[int, list[Delta]]]:
        waiting = {asyncio.ensure_future(_next(stream)): index for index, stream in enumerate(self._streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    index = waiting.pop(one)
                    if (some := one.result()) is not None:
                        waiting[asyncio.ensure_future(_next(self._streams[index]))] = index
                        yield self._counted(index, some)
        finally:
            for one in waiting:
                one.cancel()

    def _counted(self, index: int, deltas: list[Delta]) -> tuple[int, list[Delta]]:
        times = self._times[index]
        for delta in deltas:
            if delta.finish_reason == "error":
                status = 400 if str(delta.stop_reason).startswith(FAILED) else 500
                raise HttpError(status, f"the request failed: {delta.stop_reason}", code="generation_failed")
            self.num_tokens += len(delta.token_ids)
            if delta.index == 0 and delta.num_cached is not None:
                self.num_cached += delta.num_cached - times.num_cached
                times.num_cached = delta.num_cached
            times.count(delta)
        if self._streams[index].ended:
            times.end(deltas[-1].finish_reason or "stop")
        return index, deltas


async def _next(stream: DeltaStream | BeamStream) -> list[Delta] | None:
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None


class _Times:
    """The metrics of one engine request. Only streamed requests have times of single tokens: the others get all their
    tokens at the end."""

    def __init__(self, metrics: Metrics, stream: DeltaStream | BeamStream, prompt: Prompt, *, streamed: bool) -> None:
        self._streamed = streamed
        self._all_metrics, self._stream = metrics, stream
        self._metrics = metrics.of_engine(stream.engine)
        self._prompt_len = len(prompt.token_ids)
        self._begin = self._last = time.monotonic()
        self._first: float | None = None
        self._tokens = 0
        self._ended = False
        self.num_cached = 0

    @property
    def first_token_s(self) -> float | None:
        """Return the seconds to the first token. None: there was none yet, or the request is not streamed."""
        return None if self._first is None or not self._streamed else self._first - self._begin

    def count(self, delta: Delta) -> None:
        """Count the tokens of a delta, which has just arrived."""
        now, number = time.monotonic(), len(delta.token_ids)
        if number == 0:
            return
        if self._first is None:
            self._first = now
            self._metrics = self._all_metrics.of_engine(self._stream.engine)  # it may have moved before
            self._metrics.prompt_tokens.inc(self._prompt_len)
            if self._streamed:
                self._metrics.first_token.observe(now - self._begin)
        elif delta.index == 0 and self._streamed:
            self._metrics.tokens.observe((now - self._last) / number)
        self._last = now
        self._tokens += number
        self._metrics.tokens.count(number)

    def end(self, reason: str) -> None:
        """Count the end of the request. Later calls have no effect."""
        if self._ended:
            return
        self._ended = True
        now, metrics = time.monotonic(), self._metrics
        metrics.finished[reason].inc()
        metrics.whole.observe(now - self._begin)
        metrics.prompt_lengths.observe(self._prompt_len)
        metrics.output_lengths.observe(self._tokens)
        if self._streamed and self._first is not None and self._tokens > 1:
            metrics.per_token.observe((now - self._first) / (self._tokens - 1))
