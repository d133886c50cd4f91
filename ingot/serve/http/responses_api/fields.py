"""Requests of `/v1/responses`: their fields.

The forms are those of OpenAI's Python client (openai/types/responses/response_create_params.py, version 3.54).
"""

from typing import Any, Literal

import msgspec

from ingot.serve.http.errors import HttpError, checked
from ingot.serve.http.extension_fields import ExtensionFields, sampling_fields
from ingot.serve.http.response_formats import grammar_of
from ingot.serve.http.sampling_fields import MAX_TOP_LOGPROBS, SamplingFields

# OpenAI's limits on metadata.
_MAX_ENTRIES, _MAX_NAME, _MAX_VALUE = 16, 64, 512
LOGPROBS = "message.output_text.logprobs"
# OpenAI's other values of `include` add parts of tools and of reasoning, which no response of this server has.
_INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
)


class ResponseStreamOptions(msgspec.Struct):
    """OpenAI's `stream_options` of responses."""

    include_obfuscation: bool | None = None


class ResponseFields(ExtensionFields, kw_only=True):
    """A request. `input` is a text of the user, or a list of items that `input_messages` checks."""

    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    stream_options: ResponseStreamOptions | None = None
    stop: str | list[str] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    # Refused unless neutral.
    background: bool | None = None
    conversation: Any = None
    context_management: list[Any] | None = None
    moderation: Any = None
    prompt: Any = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    # No effect on the output.
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None


def check_supported(fields: ResponseFields) -> None:
    """Raise HttpError for fields that are out of range, or that this server does not support."""
    top = fields.top_logprobs
    checked(400, "top_logprobs", top, top is None or 0 <= top <= MAX_TOP_LOGPROBS, "an integer in [0, 20]")
    for name in fields.include or ():
        checked(400, "include", name, name in _INCLUDABLE, ", ".join(_INCLUDABLE))
    _check_metadata(fields.metadata or {})
    reasons = [name for name, value in (fields.reasoning or {}).items() if value not in (None, "none")]
    if reasons:
        raise HttpError(400, f"reasoning.{reasons[0][:80]} is not supported yet; leave it out", param="reasoning")
    options = fields.stream_options
    if options is not None and options.include_obfuscation:
        raise HttpError(400, "events are not padded; leave include_obfuscation out", param="stream_options")
    for name in ("background", "conversation", "context_management", "moderation", "prompt"):
        if getattr(fields, name):
            raise HttpError(400, f"{name} is not supported; leave it out", param=name)


def sampling_of(fields: ResponseFields) -> SamplingFields:
    """Return the sampling fields in the form of completions, with the grammar of `text.format`. Raises HttpError 400
    for a malformed format."""
    sampling = sampling_fields(fields, fields.stop)
    form = (fields.text or {}).get("format")
    sampling.structured_outputs = grammar_of(form, fields.structured_outputs, "text.format")
    return sampling


def _check_metadata(metadata: dict[str, str]) -> None:
    checked(400, "metadata", len(metadata), len(metadata) <= _MAX_ENTRIES, f"at most {_MAX_ENTRIES} entries")
    for name, value in metadata.items():
        good = len(name) <= _MAX_NAME and len(value) <= _MAX_VALUE
        expected = f"names of at most {_MAX_NAME} characters, and values of at most {_MAX_VALUE}"
        checked(400, "metadata", {name: value}, good, expected)
