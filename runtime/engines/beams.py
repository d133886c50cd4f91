"""Beam search over an engine: continue the best sequences of each prompt, token by token. The rules are vLLM's.

Each step runs every beam as a request for one token with log-probabilities. Beams share the pages of their common
tokens through the prefix cache, so such a request computes at most the last page of its beam.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from ingot.ir.errors import RequestError
from ingot.runtime.engines.outputs import FinishReason, Logprob, RequestOutput
from ingot.runtime.params.beam_search_params import CANDIDATES_PER_BEAM, BeamSearchParams
from ingot.runtime.params.prompt import Prompt
from ingot.runtime.params.sampling_params import SamplingParams


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


class _Candidate(NamedTuple):
    """A beam and one more token. Only the best candidates become sequences, which copy their tokens.

    entry   the log-probabilities of the likeliest tokens at the token's place; total: the sum with this token's
    """

    score: float
    beam: BeamSearchSequence
    token: int
    entry: dict[int, Logprob]
    total: float

    def sequence(self, finish_reason: FinishReason | None = None) -> BeamSearchSequence:
        beam = self.beam
        return replace(
            beam,
            tokens=[*beam.tokens, self.token],
            logprobs=[*beam.logprobs, self.entry],
            cum_logprob=self.total,
            finish_reason=finish_reason,
        )


class BeamSearch:
    """The beam search of one prompt.

    end_tokens    the model's end tokens
    max_seq_len   the most tokens of a sequence, prompt and output together
    beams         (attribute) the sequences to continue; empty when the search has ended
    num_cached    (attribute) tokens of the prompt that the first step found in the prefix cache; None before it
    """

    def __init__(self, prompt: Prompt, params: BeamSearchParams, end_tokens: Collection[int], max_seq_len: int) -> None:
        self._params = params
        self._ends = frozenset() if params.ignore_eos else frozenset(end_tokens)
        self._most = min(max_seq_len, len(prompt.token_ids) + params.max_tokens)
        self._ended: list[BeamSearchSequence] = []
        self._failed: list[BeamSearchSequence] = []
        self.beams = [BeamSearchSequence(prompt, list(prompt.token_ids))]
        self.num_cached: int | None = None

    def prompts(self) -> list[Prompt]:
        """Return the prompts of the next step: the tokens of each of `beams`."""
        return [replace(beam.orig_prompt, text=None, token_ids=beam.tokens) for beam in self.beams]

    def extend(self, outputs: Sequence[RequestOutput]) -> None:
        """Continue every beam by one token. `outputs` are the results of requests for the tokens of `beams`, in their
        order. The best sequences without an end token become the new beams, unless they have all their tokens."""
        if self.num_cached is None:
            self.num_cached = outputs[0].num_cached_tokens
        longer: list[_Candidate] = []
        ended: list[_Candidate] = []
        for beam, output in zip(self.beams, outputs, strict=True):
            found = output.outputs[0]
            if not found.logprobs:
                self._failed.append(replace(beam, finish_reason="error", stop_reason=found.stop_reason))
                continue
            entry = found.logprobs[0]
            for token, one in entry.items():
                total, ends = beam.cum_logprob + one.logprob, token in self._ends
                score = self._score(total, len(beam.tokens) + (not ends))
                (ended if ends else longer).append(_Candidate(score, beam, token, entry, total))
        self._ended = self._best([*self._ended, *(one.sequence("stop") for one in self._top(ended))])
        self.beams = [one.sequence() for one in self._top(longer)]
        if self.beams and len(self.beams[0].tokens) >= self._most:
            self._ended += [replace(beam, finish_reason="length") for beam in self.beams]
            self.beams = []

    def best(self) -> list[BeamSearchSequence]:
        """Return the best sequences, without texts. If none ended in another way, these are sequences that ended with
        an error."""
        return self._best(self._ended or self._failed)

    def result(self, decoder: _Decoder | None) -> BeamSearchOutput:
        """Return the best sequences with their texts. `decoder` makes the texts; None: they have none."""
        return BeamSearchOutput([replace(one, text=self._text(one, decoder)) for one in self.best()])

    def _top(self, candidates: list[_Candidate]) -> list[_Candidate]:
        return sorted(candidates, key=lambda one: one.score, reverse=True)[: self._params.beam_width]

    def _best(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        def score(one: BeamSearchSequence) -> float:
            return self._score(one.cum_logprob, len(one.tokens) - (one.tokens[-1] in self._ends))

        return sorted(sequences, key=score, reverse=True)[: self._params.beam_width]

    def _score(self, total: float, length: int) -> float:
        return float(total / length**self._params.length_penalty)

    def _text(self, sequence: BeamSearchSequence, decoder: _Decoder | None) -> str | None:
        if decoder is None:
            return None
        ended = sequence.finish_reason == "stop" and not self._params.include_stop_str_in_output
        tokens = sequence.tokens[:-1] if ended else sequence.tokens
        return decoder.decode(tokens, skip_special_tokens=False)


def step_params(params: BeamSearchParams) -> SamplingParams:
    """Return the sampling parameters of the requests of a step: one token each, with the likeliest tokens."""
    return SamplingParams(
        temperature=params.temperature,
        max_tokens=1,
        logprobs=CANDIDATES_PER_BEAM * params.beam_width,
        ignore_eos=True,  # an end token is a candidate like any other
        detokenize=False,
    )


def beam_search(searches: Sequence[BeamSearch], params: BeamSearchParams, run: Run) -> None:
    """Run the beam searches of several prompts together until all have ended. `run` serves the requests of a step."""
    sampling = step_params(params)
    while going := [search for search in searches if search.beams]:
        outputs = iter(run([prompt for search in going for prompt in search.prompts()], sampling))
        for search in going:
            search.extend([next(outputs) for _ in search.beams])


def check_room(prompt: Prompt, max_seq_len: int, where: str) -> None:
    """Raise RequestError if a prompt leaves no room for a token. `where` names the prompt in the message."""
    if len(prompt.token_ids) >= max_seq_len:
        raise RequestError(
            f"the prompt has {len(prompt.token_ids)} tokens",
            where=where,
            expected=f"at most {max_seq_len - 1}: max_seq_len, less one token to generate",
            hint="shorten the prompt, or compile with a larger max_seq_len",
        )
