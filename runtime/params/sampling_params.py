"""`SamplingParams`: how to sample the tokens of one request, and when to stop. Names and defaults are vLLM's."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.runtime.grammar.params import StructuredOutputsParams
from ingot.runtime.params.sampling_checks import GREEDY_BELOW, checked, refuse_others


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How to sample the tokens of one request, and when to stop. The constructor checks all values; instances are
    frozen.

    n                     sequences per prompt, 1..16384; with greedy sampling only 1
    temperature           >= 0; below 1e-5 is greedy, and then top_k, top_p, min_p and typical_p do nothing
    top_p                 in (0, 1]; keep the most likely tokens that together have at least this probability
    top_k                 0 or -1 is off; else keep the k most likely tokens
    min_p                 in [0, 1]; keep tokens at least this likely relative to the most likely one; 0 is off
    typical_p             in (0, 1]; of the tokens left, keep those with a log-probability nearest to the mean, so many
                          that they have this probability; 1 is off. transformers has it, vLLM has not
    repetition_penalty    > 0; above 1, tokens of prompt and output so far become less likely; 1 is off
    frequency_penalty     -2..2; subtracted from a token's logit for each time that it was generated; 0 is off
    presence_penalty      -2..2; subtracted from the logit of every generated token; 0 is off
    seed                  0..2**63-1; sequence i of n uses seed + i. None (or -1): the engine draws one
    logit_bias            a dict of at most 1024: token id -> number added to its logit, -1e6..1e6. Kept as pairs
    allowed_token_ids     no other tokens are chosen; None: all are allowed
    bad_words             texts that are not generated: their last token is not chosen after the others. A text after
                          a space is banned too, if that gives as many tokens. At most 128 token sequences
    structured_outputs    a grammar for the output: StructuredOutputsParams, or a dict of its fields; None: any text
    stop                  a string or strings that end the text; the text ends before the stop string, unless
                          `include_stop_str_in_output`
    stop_token_ids        token ids that end the sequence; kept in `token_ids`, left out of `text`
    ignore_eos            continue after the model's end tokens
    max_tokens            >= 1; None: up to the artifact's max_seq_len
    min_tokens            0..max_tokens; before this many tokens, no end token is sampled and no stop string counts
    truncate_prompt_tokens
                          >= 1: keep only that many last tokens of the prompt; -1: keep those that leave room for one
                          output token. None: refuse a prompt that is too long
    logprobs              0..20: return the log-probability of each generated token and of that many most likely ones;
                          None: return none
    prompt_logprobs       0..20: return the log-probability of each prompt token and of that many most likely ones
    detokenize            False: `text` stays empty, and stop strings are refused
    skip_special_tokens   leave special tokens out of `text`
    spaces_between_special_tokens   False: a special token that follows another is written without the decoder's space

    The constructor raises RequestError, naming field, value and legal range. It also raises it for an unknown keyword,
    and for a vLLM parameter that is not supported, unless the value turns it off.
    """

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int | None
    logit_bias: tuple[tuple[int, float], ...] | None
    allowed_token_ids: tuple[int, ...] | None
    bad_words: tuple[str, ...]
    structured_outputs: StructuredOutputsParams | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    max_tokens: int | None
    min_tokens: int
    truncate_prompt_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    include_stop_str_in_output: bool

    def __init__(
        self,
        *,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        typical_p: float = 1.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        seed: int | None = None,
        logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        bad_words: Sequence[str] | None = (),
        structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None,
        stop: str | Sequence[str] | None = (),
        stop_token_ids: Sequence[int] | None = (),
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        truncate_prompt_tokens: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        **others: object,
    ) -> None:
        given = dict(locals())
        del given["self"], given["others"]
        if others:
            refuse_others(others)
        self.__dict__.update(checked(given, _DEFAULTS))  # a frozen object refuses to set attributes

    @property
    def greedy(self) -> bool:
        """Whether sampling is greedy: the most likely token is taken, and top_k, top_p, min_p and typical_p have no
        effect."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalizes(self) -> bool:
        """Whether the repetition, frequency or presence penalty is on."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def edits_logits(self) -> bool:
        """Whether logits are edited: by logit_bias, allowed_token_ids, bad_words or a grammar."""
        limits = self.allowed_token_ids is not None or bool(self.bad_words) or self.structured_outputs is not None
        return self.logit_bias is not None or limits


_DEFAULTS = {
    one.name: one.default
    for one in inspect.signature(SamplingParams).parameters.values()
    if one.kind is one.KEYWORD_ONLY
}


def changed_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that differ from their defaults, as arguments of SamplingParams for the same parameters."""
    return {name: value for name, value in vars(params).items() if value != _NEUTRAL[name]}


_NEUTRAL = vars(SamplingParams())
