"""Beam search over an engine process: each beam of a step is a request. The event loop runs between the steps."""

from collections.abc import Sequence
from typing import Protocol

from ingot.runtime.engines.beams import BeamSearch, step_params
from ingot.runtime.engines.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from ingot.runtime.params.beam_search_params import BeamSearchParams
from ingot.runtime.params.prompt import Prompt
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.serve.engine.delta_stream import DeltaStream
from ingot.serve.engine.messages import Delta, TokenLogprob


class Submits(Protocol):
    """The method of `AsyncLLM` that sends a request to the engine."""

    def submit(
        self, prompt: Prompt, params: SamplingParams, *, stream: bool, priority: int, adapter: str | None
    ) -> DeltaStream: ...


class AsyncBeamSearch:
    """The beam search of one prompt by the engine of `llm`. Call `run` once, and then `close`, which may come earlier.

    search     what it has found so far
    params     its parameters
    priority   the priority of its requests
    adapter    the LoRA adapter of its requests; None: the model alone
    """

    def __init__(
        self, llm: Submits, search: BeamSearch, params: BeamSearchParams, priority: int, adapter: str | None = None
    ) -> None:
        self._llm, self._priority, self._adapter = llm, priority, adapter
        self._sampling = step_params(params)
        self._streams: list[DeltaStream] = []
        self._closed = False
        self.search = search

    async def run(self) -> bool:
        """Search until all beams have ended. Return False if `close` was called before that.

        Raises QueueFullError if too many requests wait for a step, EngineDeadError if the engine is not running.
        """
        while self.search.beams and not self._closed:
            prompts = self.search.prompts()
            try:
                for prompt in prompts:
                    self._streams.append(
                        self._llm.submit(
                            prompt, self._sampling, stream=False, priority=self._priority, adapter=self._adapter
                        )
                    )
                found = [delta for stream in self._streams async for deltas in stream for delta in deltas]
            finally:
                self._end_step()
            if not self._closed:
                self.search.extend(_outputs(prompts, found))
        return not self._closed

    def close(self) -> None:
        """End the search: abort the requests of its step in flight."""
        self._closed = True
        for stream in self._streams:
            stream.close()

    def _end_step(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams = []


def by_token(entry: Sequence[TokenLogprob]) -> dict[int, Logprob]:
    """Return the log-probabilities of one token by token id, in the same order."""
    return {token: Logprob(value, rank, text) for token, value, rank, text in entry}


def _outputs(prompts: Sequence[Prompt], deltas: Sequence[Delta]) -> list[RequestOutput]:
    """Return the outputs of the requests of a step. A request that is not streamed has one delta."""
    outputs: list[RequestOutput] = []
    for prompt, delta in zip(prompts, deltas, strict=True):
        logprobs = [by_token(entry) for entry in delta.logprobs or ()]
        reason: FinishReason = "length" if logprobs else "error"
        one = CompletionOutput(0, "", delta.token_ids, None, logprobs, reason, delta.stop_reason)
        outputs.append(RequestOutput("", None, prompt.token_ids, [one], True, None, delta.num_cached))
    return outputs
