"""The checks of `SamplingParams`: legal values, legal combinations, and vLLM parameters that are not supported."""

import difflib
import math
from collections.abc import Mapping
from typing import Any

from ingot.ir.errors import RequestError
from ingot.ir.logprob_limits import MAX_LOGPROBS
from ingot.runtime.param_checks import Check, boolean, integer, optional, real, refuse, several

OWNER = "SamplingParams"
GREEDY_BELOW = 1e-5  # vLLM's _SAMPLING_EPS: a lower temperature means greedy sampling
MAX_N = 16384  # vLLM's default for VLLM_MAX_N_SEQUENCES
MAX_SEED = 2**63 - 1  # seeds are i64 on the device
MAX_TOKEN_ID = 2**31 - 1  # token ids are i32 on the device
MAX_FLOAT32 = 3.4028234663852886e38  # the device computes in f32, where a larger temperature would become infinity

# Beyond these, dividing or multiplying a logit by the penalty could overflow float32.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-30, 1e30

# vLLM parameters that Ingot does not support yet, each with the value that turns it off. Any other value is refused.
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

_top_k = integer(-1, MAX_TOKEN_ID, "an integer >= 1, or 0 or -1 for off")
_seed = optional(integer(-1, MAX_SEED, "None or an integer in [0, 2**63 - 1]"))
_penalty = real(-2.0, 2.0, "a number in [-2, 2]")
_num_logprobs = optional(integer(0, MAX_LOGPROBS, f"None or an integer in [0, {MAX_LOGPROBS}]"))


def _stop_strings(where: str, value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else () if value is None else value
    if not isinstance(strings, list | tuple) or not all(isinstance(one, str) and one for one in strings):
        refuse(where, value, "None, a string or a list of strings, none of them empty")
    return tuple(strings)


# Checks by parameter name, which is also the field name.
CHECKS: Mapping[str, Check] = {
    "n": integer(1, MAX_N),
    "temperature": real(0.0, MAX_FLOAT32, "a finite number >= 0 (below 1e-5: greedy)"),
    "top_p": real(math.ulp(0.0), 1.0, "a number in (0, 1]"),
    "top_k": lambda where, value: max(0, _top_k(where, value)),
    "min_p": real(0.0, 1.0, "a number in [0, 1]"),
    "repetition_penalty": real(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, "a number > 0 (from 1e-30 to 1e30)"),
    "frequency_penalty": _penalty,
    "presence_penalty": _penalty,
    "seed": lambda where, value: None if (seed := _seed(where, value)) == -1 else seed,  # -1 is "no seed" in vLLM
    "stop": _stop_strings,
    "stop_token_ids": several(integer(0, MAX_TOKEN_ID), "None or a list of token ids"),
    "ignore_eos": boolean,
    "max_tokens": optional(integer(1)),
    "min_tokens": integer(0),
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
        if name not in NOT_SUPPORTED_YET:
            near = difflib.get_close_matches(name, [*CHECKS, *NOT_SUPPORTED_YET], n=1)
            raise RequestError(
                f"unknown sampling parameter '{name}'",
                where=OWNER,
                expected="one of " + ", ".join(CHECKS),
                hint=f"did you mean '{near[0]}'?" if near else "",
            )
        neutral = NOT_SUPPORTED_YET[name]
        if value is not neutral:
            raise RequestError(
                f"{name} = {value!r:.80} is not supported yet",
                where=f"{OWNER}.{name}",
                expected=f"{name} = {neutral!r}, or no {name}",
            )
