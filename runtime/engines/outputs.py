"""The outputs that callers get: `RequestOutput` and `CompletionOutput` as in vLLM, and vectors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token at a position. It comes from the model's raw logits, before temperature, penalties
    and bans are applied.

    logprob         natural logarithm of the token's probability
    rank            1 for the most likely token of the vocabulary
    decoded_token   the text of this token alone; None without a tokenizer, or with detokenize=False
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, init=False)
class CompletionOutput:
    """One of the n sequences that a request generates (SamplingParams.n), as far as it is generated now.

    index                the number of the sequence in the request, from 0 on
    text                 the text so far. Incomplete characters, and text that may become a stop string, are held back
    token_ids            the tokens so far, including a stop or end token. The last output has a list; earlier outputs
                         have a read-only view that does not grow (`ingot.runtime.engines.growing.SoFar`)
    cumulative_logprob   sum of the log-probabilities of `token_ids`; None unless SamplingParams.logprobs is set
    logprobs             for each of `token_ids` a dict token id -> log-probability. It has that token, then as many of
                         the most likely tokens as SamplingParams.logprobs says. A list or a view, like `token_ids`;
                         None unless SamplingParams.logprobs is set
    finish_reason        None while the sequence runs; then "stop", "length", "abort" or "error". "error" means that
                         logits were not finite, or that the device has no memory for this sequence alone
    stop_reason          the stop string or stop token id that ended the sequence, or the text of an error; None for
                         the model's end tokens
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: Sequence[dict[int, Logprob]] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None

    def __init__(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        cumulative_logprob: float | None = None,
        logprobs: Sequence[dict[int, Logprob]] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> None:
        fields = self.__dict__  # for each streamed token; a third of the time of a frozen dataclass's __init__
        fields["index"] = index
        fields["text"] = text
        fields["token_ids"] = token_ids
        fields["cumulative_logprob"] = cumulative_logprob
        fields["logprobs"] = logprobs
        fields["finish_reason"] = finish_reason
        fields["stop_reason"] = stop_reason

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, init=False)
class RequestOutput:
    """The output of one request, as far as it is generated now: its prompt and its n sequences (SamplingParams.n).

    request_id          the request's id
    prompt              the prompt's text; None if the caller passed token ids
    prompt_token_ids    the model's input, including tokens that the tokenizer added
    outputs             the n sequences
    finished            True when every sequence has a finish_reason
    prompt_logprobs     for each of `prompt_token_ids` a dict token id -> log-probability; None for the first token. A
                        list or a read-only view, like `CompletionOutput.token_ids`; None unless
                        SamplingParams.prompt_logprobs is set
    num_cached_tokens   prompt tokens that the first sequence found in the prefix cache; None while it waits
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None
    num_cached_tokens: int | None

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        outputs: list[CompletionOutput],
        finished: bool,
        prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None,
        num_cached_tokens: int | None = None,
    ) -> None:
        fields = self.__dict__  # for each streamed token, as in CompletionOutput
        fields["request_id"] = request_id
        fields["prompt"] = prompt
        fields["prompt_token_ids"] = prompt_token_ids
        fields["outputs"] = outputs
        fields["finished"] = finished
        fields["prompt_logprobs"] = prompt_logprobs
        fields["num_cached_tokens"] = num_cached_tokens


@dataclass(frozen=True)
class EmbeddingOutput:
    """The output of a request for the embedding vector of one prompt.

    request_id          the request's id
    prompt              the prompt's text; None if the caller passed token ids
    prompt_token_ids    the model's input, including tokens that the tokenizer added
    embedding           the vector; empty until it is computed, and if the request ended without one
    finished            whether the request has ended
    finish_reason       None while the request waits or runs; then "stop", "abort" or "error". "error" means that the
                        vector was not finite, or that the device has no memory for this prompt alone
    stop_reason         the text of an error, or None
    num_cached_tokens   prompt tokens that were found in the prefix cache; None while the request waits
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
    finished: bool
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)
