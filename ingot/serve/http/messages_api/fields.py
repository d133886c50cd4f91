"""Requests in Anthropic's form: their fields, and the conversation and the options that they describe.

The forms are those of Anthropic's Python client (anthropics/anthropic-sdk-python, message_create_params.py).
"""

from typing import Any

from ingot.runtime.chat.messages import Message
from ingot.runtime.chat.template import ChatOptions
from ingot.serve.http.content_text import content_text
from ingot.serve.http.errors import HttpError, checked
from ingot.serve.http.extension_fields import ExtensionFields, sampling_fields
from ingot.serve.http.response_formats import grammar_of
from ingot.serve.http.sampling_fields import SamplingFields

_ROLES = ("user", "assistant", "system")
_TEXT_FIELDS = {"text": "text"}
_NO_TOOLS = "tools are not supported yet; leave out the blocks of tools"
_NO_THINKING = "thinking is not supported yet; leave out the blocks of thinking"
_ONLY_TEXT = "this model reads text only; leave the block out"
_REASONS = {
    "tool_use": _NO_TOOLS,
    "tool_result": _NO_TOOLS,
    "thinking": _NO_THINKING,
    "redacted_thinking": _NO_THINKING,
    "image": _ONLY_TEXT,
    "document": _ONLY_TEXT,
}


class CountFields(ExtensionFields, kw_only=True):
    """A request to count a prompt's tokens. Fields that do not make the prompt have no effect.

    `messages` and `system` are checked by `conversation`.
    """

    messages: list[Any]
    system: str | list[Any] | None = None
    # Refused unless neutral.
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    context_management: Any = None
    # No effect on the output.
    cache_control: Any = None
    speed: str | None = None


class MessageFields(CountFields, kw_only=True):
    """A request for the assistant's next message."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    # Refused unless neutral.
    container: Any = None
    # No effect on the output.
    metadata: Any = None
    service_tier: str | None = None
    inference_geo: str | None = None


def check_supported(fields: CountFields) -> None:
    """Raise HttpError for fields that this server does not support."""
    kind = None if fields.tool_choice is None else fields.tool_choice.get("type")
    if fields.tools and kind != "none":
        raise HttpError(400, "tools are not supported yet; leave them out, or send tool_choice none", param="tools")
    checked(400, "tool_choice", fields.tool_choice, kind in (None, "auto", "none"), "auto or none, without tools")
    if fields.thinking is not None and fields.thinking.get("type") != "disabled":
        raise HttpError(400, "thinking is not supported yet; leave it out, or send type disabled", param="thinking")
    others = [name for name, value in (fields.output_config or {}).items() if name != "format" and value is not None]
    if others:
        raise HttpError(400, f"output_config.{others[0][:80]} is not supported; leave it out", param="output_config")
    for name in ("mcp_servers", "context_management", "container"):
        if getattr(fields, name, None):
            raise HttpError(400, f"{name} is not supported; leave it out", param=name)


def sampling_of(fields: MessageFields) -> SamplingFields:
    """Return the sampling fields in the form of completions, with the grammar of `output_config.format`. Raises
    HttpError 400 for a malformed format."""
    sampling = sampling_fields(fields, fields.stop_sequences)
    form, name = (fields.output_config or {}).get("format"), "output_config.format"
    kind = form.get("type") if isinstance(form, dict) else None
    checked(400, name, form, form is None or kind == "json_schema", '{"type": "json_schema", "schema": …}')
    sampling.structured_outputs = grammar_of(form, fields.structured_outputs, name)
    return sampling


def conversation(fields: CountFields) -> tuple[list[Message], ChatOptions]:
    """Return a request's messages in the form of chats, and the options of the chat template.

    Consecutive messages of one role become one message. If the last message is the assistant's, the model continues it.
    Raises HttpError 400 for malformed messages.
    """
    made: list[Message] = []
    if fields.system is not None:
        made.append({"role": "system", "content": content_text(fields.system, "system", _TEXT_FIELDS, _REASONS)})
    for index, given in enumerate(fields.messages):
        message = _message(given, f"messages[{index}]")
        if made and made[-1]["role"] == message["role"]:
            made[-1]["content"] += "\n" + message["content"]
        else:
            made.append(message)
    if not fields.messages:
        raise HttpError(400, "the conversation is empty; expected: at least one message", param="messages")
    continues = made[-1]["role"] == "assistant"
    return made, ChatOptions(not continues, continues, None, fields.chat_template_kwargs)


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise HttpError(400, f"{given!r:.80} is no message; expected: an object", param=where)
    role = given.get("role")
    checked(400, f"{where}.role", role, role in _ROLES, '"user", "assistant" or "system"')
    return {"role": role, "content": content_text(given.get("content"), f"{where}.content", _TEXT_FIELDS, _REASONS)}
