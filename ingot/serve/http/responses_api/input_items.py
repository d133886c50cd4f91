"""The items of a request's input, and its tools, in the form of chats."""

from typing import Any

from ingot.runtime.chat.messages import Message
from ingot.serve.http.chat_tools import read_tools, tool_use
from ingot.serve.http.content_text import content_text
from ingot.serve.http.errors import HttpError, checked
from ingot.serve.parsers.tool_use import ToolUse

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_FIELDS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_REASONING_FIELDS = {"reasoning_text": "text", "summary_text": "text"}
_ONLY_TEXT = "this model reads text only; leave the part out"
_PART_REASONS = {"input_image": _ONLY_TEXT, "input_file": _ONLY_TEXT, "input_audio": _ONLY_TEXT}
_NO_CUSTOM = "only tools that are functions are supported; leave out the items of custom tools"
_ITEM_REASONS = {
    "custom_tool_call": _NO_CUSTOM,
    "custom_tool_call_output": _NO_CUSTOM,
    "item_reference": "references are not supported; send the item itself, or previous_response_id",
}


def input_messages(given: str | list[Any]) -> list[Message]:
    """Return the input of a request as messages. Items of one turn of the assistant become one message.

    Raises HttpError 400 for malformed items.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    made: list[Message] = []
    for index, item in enumerate(given):
        message, whole = _message(item, f"input[{index}]")
        if not made or not _add(made[-1], message, whole=whole):
            made.append(message)
    return made


def _message(item: Any, where: str) -> tuple[Message, bool]:
    """Return an item as a message, and whether it is a message of its own, not a part of the assistant's turn."""
    if not isinstance(item, dict):
        raise HttpError(400, f"{item!r:.80} is no item; expected: an object", param=where)
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            checked(400, f"{where}.role", role, role in _ROLES, ", ".join(f'"{one}"' for one in _ROLES))
            text = content_text(item.get("content"), f"{where}.content", _TEXT_FIELDS, _PART_REASONS)
            return {"role": role, "content": text}, role != "assistant"
        case "function_call":
            return {"role": "assistant", "content": "", "tool_calls": [_call(item, where)]}, False
        case "function_call_output":
            call_id = item.get("call_id")
            checked(400, f"{where}.call_id", call_id, isinstance(call_id, str), "the id of a call")
            text = content_text(item.get("output"), f"{where}.output", _TEXT_FIELDS, _PART_REASONS)
            return {"role": "tool", "tool_call_id": call_id, "content": text}, True
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            text = content_text(parts, f"{where}.content", _REASONING_FIELDS, {})
            return {"role": "assistant", "content": "", "reasoning_content": text}, False
        case kind:
            reason = _ITEM_REASONS.get(kind, "") if isinstance(kind, str) else ""
            raise HttpError(400, reason or f'type = {kind!r:.80}; expected: "message"', param=where)


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    name, call_id, arguments = item.get("name"), item.get("call_id"), item.get("arguments")
    checked(400, f"{where}.name", name, isinstance(name, str), "a text")
    checked(400, f"{where}.call_id", call_id, isinstance(call_id, str), "a text")
    checked(400, f"{where}.arguments", arguments, isinstance(arguments, str), "the text of a JSON object")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _add(turn: Message, part: Message, *, whole: bool) -> bool:
    """Add a part of the assistant's turn to the message of the turn so far. Return False if it begins a new message."""
    follows = "tool_calls" in part or ("reasoning_content" in turn and not turn["content"])
    if whole or turn["role"] != "assistant" or "reasoning_content" in part or not follows:
        return False
    turn["content"] += part["content"]
    if calls := part.get("tool_calls"):
        turn["tool_calls"] = [*turn.get("tool_calls", ()), *calls]
    return True


def read_response_tools(
    given: list[Any] | None, choice: Any, *, several: bool, has_grammar: bool
) -> tuple[list[Any] | None, ToolUse]:
    """Return a request's tools in the form of chats, None if none may be called, and how it may use them.

    The other arguments are those of `tool_use`. Raises HttpError 400 for malformed tools or choices, and for tools of
    OpenAI's servers.
    """
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given or ())]
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    use = tool_use(read_tools(tools), choice, several=several, has_grammar=has_grammar)
    return (tools if use.functions else None), use


def _tool(given: Any, where: str) -> dict[str, Any]:
    good = isinstance(given, dict) and given.get("type") == "function"
    checked(400, where, given, good, '{"type": "function", "name": "…", "parameters": {"type": "object", …}}')
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: given[name] for name in names if given.get(name) is not None}}
