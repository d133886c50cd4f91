"""Beam search over HTTP, by vLLM's fields `use_beam_search` and `length_penalty`; `n` is the number of beams."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ingot.runtime.engines.beams import BeamSearch, BeamSearchSequence
from ingot.runtime.params.beam_search_params import MAX_BEAM_WIDTH, BeamSearchParams
from ingot.runtime.params.prompt import Prompt
from ingot.runtime.params.sampling_params import SamplingParams, changed_fields
from ingot.runtime.text.detokenizer import TokenDecoder
from ingot.runtime.text.tokenizer import Tokenizer
from ingot.serve.async_llm import AsyncLLM
from ingot.serve.engine.messages import Delta, TokenLogprob
from ingot.serve.http.errors import HttpError, checked
from ingot.serve.http.sampling_fields import SamplingFields, given_params, sampling_params

# Sampling parameters that a beam search has too, or that concern its texts only.
_SHARED = frozenset({"n", "temperature", "max_tokens", "logprobs", "ignore_eos", "include_stop_str_in_output"}) | {
    "skip_special_tokens",
    "spaces_between_special_tokens",
}


@dataclass(frozen=True)
class BeamRequest:
    """A beam search that a client wants.

    search     its parameters
    sampling   the parameters that a request without beams would have: those for texts and log-probabilities count
    """

    search: BeamSearchParams
    sampling: SamplingParams
    top_p: None = None

    @property
    def n(self) -> int:
        return self.search.beam_width

    @property
    def max_tokens(self) -> int:
        return self.search.max_tokens

    @property
    def temperature(self) -> float:
        return self.search.temperature


def request_params(
    fields: SamplingFields, defaults: SamplingParams, *, max_tokens: int, logprobs: int | None
) -> SamplingParams | BeamRequest:
    """Return a request's sampling parameters, or its beam search if it wants one. The arguments are those of
    `sampling_params`. Raises RequestError, or HttpError, for a bad value.

    A beam search has only the temperature of `defaults`, as in vLLM. Above 0, which it usually is, each beam also
    continues with a sampled token.
    """
    if fields.use_beam_search:
        given = {"temperature": defaults.temperature, **given_params(fields)}
        return _beam_request(fields, {**given, "max_tokens": max_tokens, "logprobs": logprobs})
    penalty = fields.length_penalty
    checked(400, "length_penalty", penalty, penalty in (None, 1.0), "use_beam_search = true with length_penalty")
    return sampling_params(fields, defaults, max_tokens=max_tokens, logprobs=logprobs)


def _beam_request(fields: SamplingFields, given: dict[str, Any]) -> BeamRequest:
    """Return the beam search of a request with the sampling parameters `given`, by name."""
    if fields.stream:
        raise HttpError(400, "beam search is not streamed: the best sequence is known only at the end", param="stream")
    width = given.get("n", 1)
    checked(400, "n", width, width <= MAX_BEAM_WIDTH, f"at most {MAX_BEAM_WIDTH} beams with use_beam_search")
    sampling = SamplingParams(**{**given, "n": 1})
    for name in changed_fields(sampling):
        if name not in _SHARED:
            raise HttpError(400, f"{name} is not supported with use_beam_search: {_reason(name)}", param=name)
    search = BeamSearchParams(
        width,
        given["max_tokens"],
        ignore_eos=sampling.ignore_eos,
        temperature=sampling.temperature,
        length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
    )
    return BeamRequest(search, sampling)


def _reason(name: str) -> str:
    if name == "prompt_logprobs":
        return "only outputs have log-probabilities; leave out echo with logprobs, too"
    if name.startswith("stop") or name == "min_tokens":
        return "only the model's end tokens end a sequence"
    return "beams continue with the likeliest tokens of the model itself"


class BeamStream:
    """The results of a beam search as deltas, like those of a request that is not streamed: all at the end, one for
    each sequence. The best sequence is number 0. It has the methods of a DeltaStream.

    engine   the number of the engine that metrics count the search for: the first one. Its tokens may come from several
    """

    engine = 0

    def __init__(
        self, llm: AsyncLLM, prompt: Prompt, wanted: BeamRequest, *, priority: int, adapter: str | None = None
    ) -> None:
        self._running = llm.open_beam_search(prompt, wanted.search, priority=priority, adapter=adapter)
        self._wanted, self._tokenizer = wanted, llm.model.tokenizer
        self.ended = self.failed = False

    def close(self) -> None:
        """End the search from the caller's side."""
        self.ended = True
        self._running.close()

    async def __anext__(self) -> list[Delta]:
        """Search, and return a delta for each sequence; a second call ends the iteration."""
        if self.ended:
            raise StopAsyncIteration
        try:
            whole = await self._running.run()
        except Exception:
            self.ended = self.failed = True
            raise
        if not whole:
            raise StopAsyncIteration
        self.ended = True
        return await asyncio.to_thread(_deltas, self._running.search, self._wanted, self._tokenizer)


def _deltas(search: BeamSearch, wanted: BeamRequest, tokenizer: Tokenizer | None) -> list[Delta]:
    """Return the sequences that a beam search has found as deltas."""
    deltas: list[Delta] = []
    for index, one in enumerate(search.best()):
        token_ids = one.tokens[len(one.orig_prompt.token_ids) :]
        logprobs = None
        if (most := wanted.sampling.logprobs) is not None:
            logprobs = [_entry(one, at, token, most, tokenizer) for at, token in enumerate(token_ids)]
        text = "" if tokenizer is None else _text(one, token_ids, wanted, tokenizer)
        delta = Delta(0, index, token_ids, text, logprobs, one.finish_reason, one.stop_reason)
        delta.num_cached = search.num_cached
        deltas.append(delta)
    return deltas


def _text(one: BeamSearchSequence, token_ids: Sequence[int], wanted: BeamRequest, tokenizer: Tokenizer) -> str:
    ends = one.finish_reason == "stop" and not wanted.search.include_stop_str_in_output
    decoder = TokenDecoder(
        tokenizer,
        one.orig_prompt.token_ids,
        skip_special_tokens=wanted.sampling.skip_special_tokens,
        spaces_between_special_tokens=wanted.sampling.spaces_between_special_tokens,
    )
    parts = [decoder.push(token) for token in (token_ids[:-1] if ends else token_ids)]
    return "".join(parts) + decoder.finish()


def _entry(one: BeamSearchSequence, at: int, token: int, most: int, tokenizer: Tokenizer | None) -> list[TokenLogprob]:
    """Return the log-probabilities of the token number `at` of an output, and of the `most` likeliest at its place."""
    found = one.logprobs[at]
    shown = [token, *(other for other, entry in found.items() if entry.rank <= most and other != token)]
    return [
        (
            other,
            found[other].logprob,
            found[other].rank,
            None if tokenizer is None else tokenizer.decode_alone(other, skip_special_tokens=False),
        )
        for other in shown
    ]
