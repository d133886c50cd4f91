"""Requests in Anthropic's form: their fields, and the conversation and the options that they describe.

The forms are those of Anthropic's Python client (anthropics/anthropic-sdk-python, message_create_params.py).
"""

from typing import Any

from ingot.runtime.chat.messages import Message
from ingot.runtime.chat.template import ChatOptions
from ingot.serve.http.content_text import content_text
from ingot.serve.http.errors import HttpError, checked
from ingot.serve.http.extension_fields import ExtensionFields, sampling_fields
from ingot.serve.http.messages_api.blocks import REASONS, TEXT_FIELDS, read_anthropic_tools, read_message
from ingot.serve.http.response_formats import grammar_of
from ingot.serve.http.sampling_fields import SamplingFields
from ingot.serve.parsers.tool_use import ToolUse

_THINKS = ("enabled", "adaptive")


class CountFields(ExtensionFields, kw_only=True):
    """A request to count a prompt's tokens. Fields that do not make the prompt have no effect.

    `messages` and `system` are checked by `conversation`.
    """

    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    # Refused unless neutral.
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


def check_supported(fields: CountFields, *, reasons: bool) -> None:
    """Raise HttpError for fields that this server does not support.

    reasons   the server has a parser for the model's reasoning
    """
    kind = None if fields.thinking is None else fields.thinking.get("type")
    checked(400, "thinking.type", kind, kind in (None, *_THINKS, "disabled"), '"enabled", "adaptive" or "disabled"')
    if kind in _THINKS and not reasons:
        message = "this server cannot tell the format of the model's reasoning; leave thinking out"
        raise HttpError(400, f"{message}, or serve the model with --reasoning-parser NAME", param="thinking")
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


def conversation(fields: CountFields) -> tuple[list[Message], ChatOptions, ToolUse]:
    """Return a request's messages in the form of chats, the options of the chat template, and the calls that the answer
    may have.

    Consecutive messages of one role become one message. If the last message is the assistant's, the model continues it.
    Raises HttpError 400 for malformed messages or tools.
    """
    made: list[Message] = []
    if fields.system is not None:
        made.append({"role": "system", "content": content_text(fields.system, "system", TEXT_FIELDS, REASONS)})
    for index, given in enumerate(fields.messages):
        for message in read_message(given, f"messages[{index}]"):
            if made and made[-1]["role"] == message["role"] != "tool":
                made[-1] = _joined(made[-1], message)
            else:
                made.append(message)
    if not fields.messages:
        raise HttpError(400, "the conversation is empty; expected: at least one message", param="messages")
    continues = made[-1]["role"] == "assistant"
    variables: dict[str, Any] = {}
    if fields.thinking is not None:  # the variable of most templates of models that can reason
        variables["enable_thinking"] = fields.thinking.get("type") in _THINKS
    variables |= fields.chat_template_kwargs or {}
    has_grammar = fields.structured_outputs is not None
    tools, use = read_anthropic_tools(fields.tools, fields.tool_choice, has_grammar=has_grammar)
    return made, ChatOptions(not continues, continues, tools, variables), use


def _joined(first: Message, second: Message) -> Message:
    """Return two messages of one role as one."""
    texts = [message["content"] for message in (first, second) if message["content"]]
    joined = {**first, **second, "content": "\n".join(texts)}
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined
