"""The fields of a request that say how to sample: OpenAI's, and vLLM's extensions."""

from typing import Any

import msgspec

from ingot.runtime.params.sampling_params import SamplingParams, changed_fields
from ingot.serve.http.errors import HttpError, checked
from ingot.serve.http.response_formats import grammar_of

MAX_N = 128  # OpenAI's limit on n
MAX_TOP_LOGPROBS = 20  # OpenAI's limit on top_logprobs of a chat
MAX_LOGIT_BIAS = 100  # OpenAI's limit on a bias of logit_bias

# Fields that go to SamplingParams under the same name, if they are set.
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "best_of",
    "bad_words",
    "allowed_token_ids",
    "logit_bias",
    "thinking_token_budget",
)
# Values that mean "off" for a field of `_SAME` that SamplingParams refuses.
_OFF: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
}


class StreamOptions(msgspec.Struct):
    """OpenAI's `stream_options`, with vLLM's `continuous_usage_stats`: usage in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields of all routes that generate tokens. None means that the client left the field out.

    Fields without effect on the output, which OpenAI's clients send, are accepted: `user`, `metadata`, `store` and so
    on. `cache_salt`, `priority` and `truncate_prompt_tokens` are vLLM's.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    # Refused unless neutral: SamplingParams does not support them.
    best_of: int | None = None
    thinking_token_budget: int | None = None
    # No effect on the output.
    user: str | None = None
    metadata: Any = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


def sampling_params(
    fields: SamplingFields, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Return a request's sampling parameters: its own fields over the model's `defaults`.

    `max_tokens` None: as many as the model's length allows. Raises RequestError, or HttpError, for a bad value.
    """
    if fields.use_beam_search:
        where = "beam search is served at /v1/completions and /v1/chat/completions only"
        raise HttpError(400, where, param="use_beam_search")
    return SamplingParams(
        **{**changed_fields(defaults), **given_params(fields), "max_tokens": max_tokens, "logprobs": logprobs}
    )


def given_params(fields: SamplingFields) -> dict[str, Any]:
    """Return the sampling parameters that a request has itself, as arguments of SamplingParams. They are not checked
    but for what only OpenAI limits. Raises HttpError for that."""
    checked(400, "n", fields.n, fields.n is None or 1 <= fields.n <= MAX_N, f"an integer in [1, {MAX_N}]")
    given = {name: value for name in _SAME if (value := getattr(fields, name)) is not None}
    if (grammar := grammar_of(fields.response_format, fields.structured_outputs, "response_format")) is not None:
        given["structured_outputs"] = grammar
    for name, values in _OFF.items():
        if name in given and given[name] in values:
            del given[name]
    if fields.logit_bias is not None:  # JSON has no other keys than text
        given["logit_bias"] = {_token_id(key): _bias(key, bias) for key, bias in fields.logit_bias.items()}
    return given


def _token_id(key: str) -> int:
    # Python converts no longer text to an integer, by default. No vocabulary needs more than these digits.
    checked(400, "logit_bias", key, key.isascii() and key.isdigit() and len(key) <= 10, "token ids as keys")
    return int(key)


def _bias(key: str, bias: float) -> float:
    legal = f"numbers in [-{MAX_LOGIT_BIAS}, {MAX_LOGIT_BIAS}]"
    checked(400, "logit_bias", {key: bias}, abs(bias) <= MAX_LOGIT_BIAS, legal)
    return bias


def output_room(requested: int | None, default: int | None, prompt_len: int, max_seq_len: int, field: str) -> int:
    """Return the most tokens to generate: those of the request's `field`, or else the default, or else (both None) all
    that fit. Prompt and output have at most `max_seq_len` tokens together.

    Raises HttpError 400 if prompt and requested tokens are more than that, as OpenAI does.
    """
    room = max_seq_len - prompt_len
    if requested is None:
        if room < 1:
            raise _too_long(f"the prompt has {prompt_len} tokens", max_seq_len, "prompt")
        return room if default is None else min(default, room)
    checked(400, field, requested, requested >= 0, "an integer >= 0")
    if requested > room or room < 1:
        what = f"the prompt has {prompt_len} tokens, and {field} is {str(requested)[:20]}"
        raise _too_long(what, max_seq_len, field)
    return requested


def room_up_to(most: int | None, prompt_len: int, max_seq_len: int, field: str) -> int:
    """Return the most tokens to generate where the request's `field`, with the value `most`, is only an upper bound:
    at most as many as fit after the prompt. None: as many as fit.

    Raises HttpError 400 if the prompt leaves no room, or if `most` is below one or above the model's length.
    """
    checked(400, field, most, most is None or 1 <= most <= max_seq_len, f"an integer in [1, {max_seq_len}]")
    return output_room(None, most, prompt_len, max_seq_len, field)


def _too_long(what: str, max_seq_len: int, param: str) -> HttpError:
    message = f"This model's maximum context length is {max_seq_len} tokens; {what}. Shorten one of them."
    return HttpError(400, message, param=param, code="context_length_exceeded")
