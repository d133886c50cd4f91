"""Blocks of Anthropic's messages, and tools, in the form of chats."""

from typing import Any

from ingot.runtime.chat.messages import Message
from ingot.serve.http.chat_tools import read_tools, tool_use
from ingot.serve.http.content_text import content_text
from ingot.serve.http.errors import HttpError, checked
from ingot.serve.parsers.tool_use import ToolUse

_CHOICES = ("auto", "none", "any", "tool")
ROLES = ("user", "assistant", "system")
TEXT_FIELDS = {"text": "text"}
_ONLY_TEXT = "this model reads text only; leave the block out"
REASONS = {
    "tool_use": "a tool_use block belongs into a message of the assistant",
    "tool_result": "a tool_result block belongs into a message of the user",
    "thinking": "a thinking block belongs into a message of the assistant",
    "redacted_thinking": "redacted thinking cannot be read; leave the block out",
    "image": _ONLY_TEXT,
    "document": _ONLY_TEXT,
}


def read_message(given: Any, where: str) -> list[Message]:
    """Return a message as messages of chats: results of tools become messages of their own. Raises HttpError 400."""
    if not isinstance(given, dict):
        raise HttpError(400, f"{given!r:.80} is no message; expected: an object", param=where)
    role = given.get("role")
    checked(400, f"{where}.role", role, role in ROLES, '"user", "assistant" or "system"')
    content = given.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content_text(content, f"{where}.content", TEXT_FIELDS, REASONS)}]
    results: list[Message] = []
    calls: list[dict[str, Any]] = []
    texts: list[str] = []
    thinking: list[str] = []
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            results.append(_result(block, place))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block, place))
        elif kind == "thinking" and role == "assistant":
            checked(400, f"{place}.thinking", block, isinstance(block.get("thinking"), str), "a text")
            thinking.append(block["thinking"])
        else:
            texts.append(content_text([block], f"{where}.content", TEXT_FIELDS, REASONS))
    message: Message = {"role": role, "content": "\n".join(texts)}
    if thinking:
        message["reasoning_content"] = "\n".join(thinking)
    if calls:
        message["tool_calls"] = calls
    # Anthropic's results come before the text of their message.
    return [*results, message] if texts or not results else results


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name, call_id, arguments = block.get("name"), block.get("id"), block.get("input", {})
    checked(400, f"{where}.name", name, isinstance(name, str), "a text")
    checked(400, f"{where}.id", call_id, isinstance(call_id, str), "a text")
    checked(400, f"{where}.input", arguments, isinstance(arguments, dict), "an object")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(block: dict[str, Any], where: str) -> Message:
    call_id = block.get("tool_use_id")
    checked(400, f"{where}.tool_use_id", call_id, isinstance(call_id, str), "the id of a tool_use block")
    content = content_text(block.get("content") or "", f"{where}.content", TEXT_FIELDS, REASONS)
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def read_anthropic_tools(
    given: list[Any] | None, choice: dict[str, Any] | None, *, has_grammar: bool
) -> tuple[list[Any] | None, ToolUse]:
    """Return a request's tools in the form of chats, None if none may be called, and how it may use them.

    `has_grammar` is that of `tool_use`. Raises HttpError 400 for malformed tools or choices, and for tools of
    Anthropic's servers.
    """
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given or ())]
    choice = choice or {}
    kind = choice.get("type", "auto")
    checked(400, "tool_choice.type", kind, kind in _CHOICES, ", ".join(f'"{one}"' for one in _CHOICES))
    named = {"type": "function", "function": {"name": choice.get("name")}}
    several = not choice.get("disable_parallel_tool_use")
    forced = {"any": "required", "tool": named}.get(kind, kind)
    use = tool_use(read_tools(tools), forced, several=several, has_grammar=has_grammar)
    return (tools if use.functions else None), use


def _tool(given: Any, where: str) -> dict[str, Any]:
    good = isinstance(given, dict) and given.get("type") in (None, "custom")
    checked(400, where, given, good, '{"name": "…", "input_schema": {"type": "object", …}}')
    function = {"name": given.get("name"), "parameters": given.get("input_schema")}
    if given.get("description") is not None:
        function["description"] = given["description"]
    return {"type": "function", "function": function}
