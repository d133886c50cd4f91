"""`SamplingParams`: how one request wants its tokens chosen and when it ends. Names and defaults are vLLM's."""

import difflib
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NoReturn

from ingot.ir.errors import RequestError
from ingot.ir.logprob_limits import MAX_LOGPROBS

GREEDY_BELOW = 1e-5  # vLLM's _SAMPLING_EPS: a temperature below it asks for the most likely token
MAX_N = 16384  # vLLM's default for VLLM_MAX_N_SEQUENCES
MAX_SEED = 2**63 - 1  # seeds travel to the device as i64
MAX_TOKEN_ID = 2**31 - 1  # token ids travel as i32
MAX_FLOAT32 = 3.4028234663852886e38  # the device computes in f32; a larger temperature would turn into infinity there

# Beyond these a logit that was divided or multiplied by a penalty could overflow float32.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-30, 1e30

# What vLLM knows and Ingot does not know yet -> the value that asks for nothing. Any other value is refused by name.
NOT_SUPPORTED_YET: Mapping[str, object] = {
    "allowed_token_ids": None,
    "bad_words": None,
    "best_of": None,
    "extra_args": None,
    "flat_logprobs": False,
    "guided_decoding": None,
    "logit_bias": None,
    "logits_processors": None,
    "logprob_token_ids": None,
    "output_kind": None,
    "repetition_detection": None,
    "structured_outputs": None,
    "thinking_token_budget": None,
    "truncate_prompt_tokens": None,
}


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How to choose the tokens of one request, and when to stop. Checked when made, frozen afterwards.

    n                     sequences per prompt, 1..16384; with greedy sampling only 1
    temperature           >= 0; below 1e-5 is greedy, and then top_k, top_p and min_p do not matter
    top_p                 in (0, 1]; keep the smallest set of tokens with at least this probability
    top_k                 0 or -1 is off; else keep the k most likely tokens
    min_p                 in [0, 1]; keep tokens at least this likely relative to the most likely one; 0 is off
    repetition_penalty    > 0; above 1, tokens of prompt and output so far become less likely; 1 is off
    frequency_penalty     -2..2; taken from a token's logit for each time that it was generated; 0 is off
    presence_penalty      -2..2; taken from the logit of every token that was generated; 0 is off
    seed                  0..2**63-1; sequence i of n uses seed + i. None (or -1): the engine draws one
    stop                  a string or strings that end the text; the text ends before the stop string, unless
                          `include_stop_str_in_output`
    stop_token_ids        token ids that end the sequence; kept in `token_ids`, left out of `text`
    ignore_eos            go on past the model's own end tokens
    max_tokens            >= 1; None: up to the artifact's max_seq_len
    min_tokens            0..max_tokens; until so many are generated no end token is sampled and no stop string counts
    logprobs              0..20: give the log-probability of each token generated and of that many most likely ones;
                          None: do not
    prompt_logprobs       0..20: the same for the prompt's tokens
    detokenize            False: `text` stays empty, and stop strings are refused
    skip_special_tokens   leave special tokens out of `text`
    spaces_between_special_tokens   False: a special token that follows another is written without the decoder's space

    Raises RequestError, naming field, value and legal range; also for an unknown keyword, and for one of vLLM's that is
    not supported yet, unless its value asks for nothing.
    """

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    max_tokens: int | None
    min_tokens: int
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
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        **others: object,
    ) -> None:
        for name, value in others.items():
            _refuse_other(name, value)

        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("n", _integer("n", n, 1, MAX_N))
        put(
            "temperature",
            _real("temperature", temperature, 0.0, MAX_FLOAT32, "a finite number >= 0 (below 1e-5: greedy)"),
        )
        put("top_p", _real("top_p", top_p, math.ulp(0.0), 1.0, "a number in (0, 1]"))
        put("top_k", max(0, _integer("top_k", top_k, -1, MAX_TOKEN_ID, "an integer >= 1, or 0 or -1 for off")))
        put("min_p", _real("min_p", min_p, 0.0, 1.0, "a number in [0, 1]"))
        put(
            "repetition_penalty",
            _real(
                "repetition_penalty",
                repetition_penalty,
                MIN_REPETITION_PENALTY,
                MAX_REPETITION_PENALTY,
                "a number > 0 (from 1e-30 to 1e30)",
            ),
        )
        put("frequency_penalty", _real("frequency_penalty", frequency_penalty, -2.0, 2.0, "a number in [-2, 2]"))
        put("presence_penalty", _real("presence_penalty", presence_penalty, -2.0, 2.0, "a number in [-2, 2]"))
        checked_seed = (
            None if seed is None else _integer("seed", seed, -1, MAX_SEED, "None or an integer in [0, 2**63 - 1]")
        )
        put("seed", None if checked_seed == -1 else checked_seed)  # -1 is "no seed" in vLLM
        put("stop", _stop_strings(stop))
        put("stop_token_ids", _stop_token_ids(stop_token_ids))
        put("ignore_eos", _boolean("ignore_eos", ignore_eos))
        put("max_tokens", None if max_tokens is None else _integer("max_tokens", max_tokens, 1, None))
        put("min_tokens", _integer("min_tokens", min_tokens, 0, self.max_tokens))
        for name, count in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
            legal = f"None or an integer in [0, {MAX_LOGPROBS}]"
            put(name, None if count is None else _integer(name, count, 0, MAX_LOGPROBS, legal))
        put("detokenize", _boolean("detokenize", detokenize))
        put("skip_special_tokens", _boolean("skip_special_tokens", skip_special_tokens))
        put("spaces_between_special_tokens", _boolean("spaces_between_special_tokens", spaces_between_special_tokens))
        put("include_stop_str_in_output", _boolean("include_stop_str_in_output", include_stop_str_in_output))

        if self.greedy and self.n > 1:
            _refuse("n", n, "1 with greedy sampling (temperature 0), which would give n equal sequences")
        if self.stop and not self.detokenize:
            _refuse("stop", stop, "no stop strings with detokenize=False: they are looked for in the text")

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken, whatever top_k, top_p and min_p say."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalizes(self) -> bool:
        """True when any of the three penalties is on."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


def _refuse(name: str, value: object, expected: str) -> NoReturn:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    raise RequestError(f"{name} = {shown} is out of range", where=f"SamplingParams.{name}", expected=expected)


def _refuse_other(name: str, value: object) -> None:
    if name in NOT_SUPPORTED_YET:
        neutral = NOT_SUPPORTED_YET[name]
        asks_for_nothing = value is neutral or (isinstance(neutral, float) and _is_real(value) and value == neutral)
        if not asks_for_nothing:
            raise RequestError(
                f"{name} = {value!r:.80} is not supported yet",
                where=f"SamplingParams.{name}",
                expected=f"{name} = {neutral!r}, or no {name}",
            )
        return
    known = [field.name for field in fields(SamplingParams)]
    near = difflib.get_close_matches(name, [*known, *NOT_SUPPORTED_YET], n=1)
    raise RequestError(
        f"unknown sampling parameter '{name}'",
        where="SamplingParams",
        expected="one of " + ", ".join(known),
        hint=f"did you mean '{near[0]}'?" if near else "",
    )


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _integer(name: str, value: object, low: int, high: int | None, expected: str = "") -> int:
    legal = expected or (f"an integer in [{low}, {high}]" if high is not None else f"an integer >= {low}")
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        _refuse(name, value, legal)
    if value < low or (high is not None and value > high):
        _refuse(name, value, legal)
    return int(value)


def _real(name: str, value: object, low: float, high: float, expected: str) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        _refuse(name, value, expected)
    try:
        number = float(value)
    except OverflowError:  # an int beyond every float
        _refuse(name, value, expected)
    if not low <= number <= high:  # also false for NaN
        _refuse(name, value, expected)
    return number


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        _refuse(name, value, "True or False")
    return value


def _stop_strings(value: object) -> tuple[str, ...]:
    legal = "None, a string or a list of strings, none of them empty"
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple):
        _refuse("stop", value, legal)
    for string in strings:
        if not isinstance(string, str) or not string:
            _refuse("stop", value, legal)
    return tuple(strings)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        _refuse("stop_token_ids", value, "None or a list of token ids")
    return tuple(_integer("stop_token_ids", token, 0, MAX_TOKEN_ID) for token in value)
