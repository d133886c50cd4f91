"""The checks of `SamplingParams`: legal values, legal combinations, and vLLM parameters that are not supported."""

import difflib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ingot.ir.edit_limits import MAX_BIAS, MAX_BIASES
from ingot.ir.errors import RequestError
from ingot.ir.logprob_limits import MAX_LOGPROBS
from ingot.runtime.grammar.params import structured_outputs
from ingot.runtime.params.given_numbers import as_integer, as_real
from ingot.runtime.params.param_checks import Check, boolean, integer, optional, real, refuse, several

OWNER = "SamplingParams"
GREEDY_BELOW = 1e-5  # vLLM's _SAMPLING_EPS: a lower temperature means greedy sampling
MAX_N = 16384  # vLLM's default for VLLM_MAX_N_SEQUENCES
MAX_SEED = 2**63 - 1  # seeds are i64 on the device
MAX_TOKEN_ID = 2**31 - 1  # token ids are i32 on the device
MAX_FLOAT32 = 3.4028234663852886e38  # the device computes in f32, where a larger temperature would become infinity

# Beyond these, dividing or multiplying a logit by the penalty could overflow float32.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-30, 1e30


class Unsupported(NamedTuple):
    """A vLLM parameter that Ingot does not support. It is refused with `hint`, unless its value is `neutral`, which
    asks for nothing."""

    neutral: object
    hint: str


# The fields of vLLM's SamplingParams that are not fields here (vllm/sampling_params.py), and former ones.
UNSUPPORTED: Mapping[str, Unsupported] = {
    "best_of": Unsupported(None, "vLLM has removed it: pass n and logprobs, and keep the best cumulative_logprob"),
    "extra_args": Unsupported(None, "the sampler takes no extensions"),
    "flat_logprobs": Unsupported(False, "log-probabilities are returned as dicts only"),
    "guided_decoding": Unsupported(None, "pass structured_outputs, as newer versions of vLLM do"),
    "logits_processors": Unsupported(None, "steps run no Python code: use logit_bias, allowed_token_ids or bad_words"),
    "logprob_token_ids": Unsupported(None, "pass logprobs for the most likely tokens"),
    "output_kind": Unsupported(None, "LLM.generate returns final outputs, LLM.stream cumulative ones"),
    "prompt_logprob_start": Unsupported(None, "prompt_logprobs scores the whole prompt"),
    "prompt_logprob_token_ids": Unsupported(None, "pass prompt_logprobs for the most likely tokens"),
    "repetition_detection": Unsupported(None, "penalties make repetitions less likely"),
    "routed_experts_prompt_start": Unsupported(0, "routing of experts is not returned"),
    "skip_clone": Unsupported(False, "parameters are frozen and never copied"),
    "skip_reading_prefix_cache": Unsupported(None, "LLM(enable_prefix_caching=False) turns the cache off"),
    "stream_interval": Unsupported(None, "LLM.stream yields an output for each step"),
    "thinking_token_budget": Unsupported(None, "max_tokens limits the whole output"),
    "trace_decode_token_ids": Unsupported(None, "pass the tokens as a prompt, with prompt_logprobs for their scores"),
}

_top_k = integer(-1, MAX_TOKEN_ID, "an integer >= 1, or 0 or -1 for off")
_seed = optional(integer(-1, MAX_SEED, "None or an integer in [0, 2**63 - 1]"))
_KEPT = "None, an integer >= 1, or -1 for as many as fit"
_kept = integer(-1, MAX_TOKEN_ID, _KEPT)
_penalty = real(-2.0, 2.0, "a number in [-2, 2]")
_token_ids = several(integer(0, MAX_TOKEN_ID), "None or a list of token ids")
_num_logprobs = optional(integer(0, MAX_LOGPROBS, f"None or an integer in [0, {MAX_LOGPROBS}]"))


def _biases(where: str, value: object) -> tuple[tuple[int, float], ...] | None:
    """Return a dict of biases by token id as pairs, which are also accepted; None for an empty one."""
    legal = f"a dict of at most {MAX_BIASES} token ids and numbers in [{-MAX_BIAS:.0f}, {MAX_BIAS:.0f}]"
    if not isinstance(value, Mapping | list | tuple):
        refuse(where, value, legal)
    if len(value) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(value)} tokens", where=where, expected=legal)
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            refuse(where, value, legal)
        token, bias = as_integer(pair[0]), as_real(pair[1])
        if token is None or not 0 <= token <= MAX_TOKEN_ID or bias is None or not abs(bias) <= MAX_BIAS:
            raise RequestError(f"logit_bias has {pair[0]!r:.40}: {pair[1]!r:.40}", where=where, expected=legal)
        biases[token] = bias
    return tuple(biases.items()) or None


def _allowed(where: str, value: object) -> tuple[int, ...]:
    ids: tuple[int, ...] = _token_ids(where, value)
    if not ids:
        refuse(where, value, "at least one token id, or None to allow all")
    return tuple(sorted(set(ids)))


def _words(where: str, value: object) -> tuple[str, ...]:
    words = () if value is None else value
    if not isinstance(words, list | tuple) or not all(isinstance(one, str) and one.strip() for one in words):
        refuse(where, value, "None or a list of strings, none of them blank")
    return tuple(dict.fromkeys(words))


def _stop_strings(where: str, value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else () if value is None else value
    if not isinstance(strings, list | tuple) or not all(isinstance(one, str) and one for one in strings):
        refuse(where, value, "None, a string or a list of strings, none of them empty")
    return tuple(strings)


def _truncation(where: str, value: object) -> int:
    number: int = _kept(where, value)
    if number == 0:
        refuse(where, value, _KEPT)
    return number


# Checks by parameter name, which is also the field name.
CHECKS: Mapping[str, Check] = {
    "n": integer(1, MAX_N),
    "temperature": real(0.0, MAX_FLOAT32, "a finite number >= 0 (below 1e-5: greedy)"),
    "top_p": real(math.ulp(0.0), 1.0, "a number in (0, 1]"),
    "top_k": lambda where, value: max(0, _top_k(where, value)),
    "min_p": real(0.0, 1.0, "a number in [0, 1]"),
    "typical_p": real(math.ulp(0.0), 1.0, "a number in (0, 1]"),
    "repetition_penalty": real(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, "a number > 0 (from 1e-30 to 1e30)"),
    "frequency_penalty": _penalty,
    "presence_penalty": _penalty,
    "seed": lambda where, value: None if (seed := _seed(where, value)) == -1 else seed,  # -1 is "no seed" in vLLM
    "logit_bias": optional(_biases),
    "allowed_token_ids": optional(_allowed),
    "bad_words": _words,
    "structured_outputs": structured_outputs,
    "stop": _stop_strings,
    "stop_token_ids": _token_ids,
    "ignore_eos": boolean,
    "max_tokens": optional(integer(1)),
    "min_tokens": integer(0),
    "truncate_prompt_tokens": optional(_truncation),
    "logprobs": _num_logprobs,
    "prompt_logprobs": _num_logprobs,
    "detokenize": boolean,
    "skip_special_tokens": boolean,
    "spaces_between_special_tokens": boolean,
    "include_stop_str_in_output": boolean,
}


def checked(given: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, Any]:
    """Check the fields of SamplingParams and return their normalized values, by name.

    given      field -> value
    defaults   field -> default value. A value that is the default object itself is not checked

    Raises RequestError for an invalid value or combination of values.
    """
    values: dict[str, Any] = {}
    for name, value in given.items():
        values[name] = value if value is defaults[name] else CHECKS[name](f"{OWNER}.{name}", value)
    most = values["max_tokens"]
    if most is not None and values["min_tokens"] > most:
        refuse(f"{OWNER}.min_tokens", values["min_tokens"], f"an integer in [0, {most}], which is max_tokens")
    if values["n"] > 1 and values["temperature"] < GREEDY_BELOW:
        refuse(f"{OWNER}.n", values["n"], "1 with greedy sampling (temperature 0), which would give n equal sequences")
    if values["stop"] and not values["detokenize"]:
        legal = "no stop strings with detokenize=False: the engine finds them in the text"
        refuse(f"{OWNER}.stop", given["stop"], legal)
    return values


def refuse_others(others: Mapping[str, object]) -> None:
    """Check keywords that are not fields of SamplingParams. `others` maps each keyword to its value.

    A vLLM parameter that Ingot does not support is accepted with the value that turns it off. Raises RequestError for
    other values of it, and for unknown keywords.
    """
    for name, value in others.items():
        if name not in UNSUPPORTED:
            near = difflib.get_close_matches(name, [*CHECKS, *UNSUPPORTED], n=1)
            raise RequestError(
                f"unknown sampling parameter '{name}'",
                where=OWNER,
                expected="one of " + ", ".join(CHECKS),
                hint=f"did you mean '{near[0]}'?" if near else "",
            )
        neutral, hint = UNSUPPORTED[name]
        if value is not neutral:
            raise RequestError(
                f"{name} = {value!r:.80} is not supported",
                where=f"{OWNER}.{name}",
                expected=f"{name} = {neutral!r}, or no {name}",
                hint=hint,
            )
