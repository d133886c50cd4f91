"""Beam search over an engine: continue the best sequences of each prompt, token by token. The rules are vLLM's.

Each step runs every beam as a request for one token with log-probabilities. Beams share the pages of their common
tokens through the prefix cache, so such a request computes at most the last page of its beam.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ingot.runtime.beam_search_params import CANDIDATES_PER_BEAM, BeamSearchParams
from ingot.runtime.outputs import FinishReason, Logprob, RequestOutput
from ingot.runtime.prompt import Prompt
from ingot.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class BeamSearchSequence:
    """One sequence that a beam search has found.

    orig_prompt     the prompt
    tokens          the tokens of prompt and output, with an end token
    logprobs        for each output token the log-probabilities of the likeliest tokens, by id
    cum_logprob     the sum of the log-probabilities of the output's tokens
    text            the text of `tokens`, with special tokens; None during the search, and without a tokenizer
    finish_reason   "stop" for an end token, "length", or "error": the model returned logits that are not finite, or the
                    device has no memory for a step. None during the search
    stop_reason     the text of a memory error
    """

    orig_prompt: Prompt
    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class BeamSearchOutput:
    """The result of a beam search for one prompt: at most `beam_width` sequences, the one of the best score first."""

    sequences: list[BeamSearchSequence]


class _Decoder(Protocol):
    """The method of `Tokenizer` that returns the text of tokens."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


# Runs prompts with sampling parameters, and returns their outputs in order.
Run = Callable[[Sequence[Prompt], SamplingParams], Sequence[RequestOutput]]


class BeamSearch:
    """The beam search of one prompt.

    end_tokens    the model's end tokens
    max_seq_len   the most tokens of a sequence, prompt and output together
    """

    def __init__(self, prompt: Prompt, params: BeamSearchParams, end_tokens: Collection[int], max_seq_len: int) -> None:
        self._params = params
        self._ends = frozenset() if params.ignore_eos else frozenset(end_tokens)
        self._most = min(max_seq_len, len(prompt.token_ids) + params.max_tokens)
        self._ended: list[BeamSearchSequence] = []
        self._failed: list[BeamSearchSequence] = []
        self.beams = [BeamSearchSequence(prompt, list(prompt.token_ids))]

    def extend(self, outputs: Sequence[RequestOutput]) -> None:
        """Continue every beam by one token. `outputs` are the results of requests for the tokens of `beams`, in their
        order. The best sequences without an end token become the new beams, unless they have all their tokens."""
        longer: list[BeamSearchSequence] = []
        for beam, output in zip(self.beams, outputs, strict=True):
            found = output.outputs[0]
            if not found.logprobs:
                self._failed.append(replace(beam, finish_reason="error", stop_reason=found.stop_reason))
                continue
            entry = found.logprobs[0]
            for token, one in entry.items():
                sequence = replace(
                    beam,
                    tokens=[*beam.tokens, token],
                    logprobs=[*beam.logprobs, entry],
                    cum_logprob=beam.cum_logprob + one.logprob,
                )
                if token in self._ends:
                    self._ended.append(replace(sequence, finish_reason="stop"))
                else:
                    longer.append(sequence)
        self.beams = self._best(longer)
        if self.beams and len(self.beams[0].tokens) >= self._most:
            self._ended += [replace(beam, finish_reason="length") for beam in self.beams]
            self.beams = []

    def result(self, decoder: _Decoder | None) -> BeamSearchOutput:
        """Return the best sequences. If none ended in another way, these are sequences that ended with an error."""
        found = self._best(self._ended or self._failed)
        return BeamSearchOutput([replace(one, text=self._text(one, decoder)) for one in found])

    def _best(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(sequences, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, sequence: BeamSearchSequence) -> float:
        length = len(sequence.tokens) - (sequence.tokens[-1] in self._ends)
        return float(sequence.cum_logprob / length**self._params.length_penalty)

    def _text(self, sequence: BeamSearchSequence, decoder: _Decoder | None) -> str | None:
        if decoder is None:
            return None
        ended = sequence.finish_reason == "stop" and not self._params.include_stop_str_in_output
        tokens = sequence.tokens[:-1] if ended else sequence.tokens
        return decoder.decode(tokens, skip_special_tokens=False)


def beam_search(searches: Sequence[BeamSearch], params: BeamSearchParams, run: Run) -> None:
    """Run the beam searches of several prompts together until all have ended. `run` serves the requests of a step."""
    sampling = SamplingParams(
        temperature=params.temperature,
        max_tokens=1,
        logprobs=CANDIDATES_PER_BEAM * params.beam_width,
        ignore_eos=True,  # an end token is a candidate like any other
        detokenize=False,
    )
    while going := [search for search in searches if search.beams]:
        beams = [beam for search in going for beam in search.beams]
        prompts = [replace(beam.orig_prompt, text=None, token_ids=beam.tokens) for beam in beams]
        outputs = iter(run(prompts, sampling))
        for search in going:
            search.extend([next(outputs) for _ in search.beams])
