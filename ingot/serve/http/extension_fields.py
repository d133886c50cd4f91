"""The sampling fields that `/v1/responses` and `/v1/messages` share with completions: temperature, and vLLM's."""

from typing import Any

import msgspec

from ingot.serve.http.sampling_fields import SamplingFields


class ExtensionFields(msgspec.Struct, kw_only=True):
    """Fields that mean the same as in `SamplingFields`. None means that the client left the field out.

    Other fields of completions, such as `n` and `max_tokens`, have other names on these routes, or do not exist there.
    """

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    structured_outputs: dict[str, Any] | None = None
    use_beam_search: bool | None = None  # refused if true
    chat_template_kwargs: dict[str, Any] | None = None


_SHARED = [name for name in ExtensionFields.__struct_fields__ if name in SamplingFields.__struct_fields__]


def sampling_fields(fields: ExtensionFields, stop: str | list[str] | None) -> SamplingFields:
    """Return the fields in the form of completions, with the request's stop strings."""
    return SamplingFields(**{name: getattr(fields, name) for name in _SHARED}, stop=stop)
