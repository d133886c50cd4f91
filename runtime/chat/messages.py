"""Checks of callers' conversations, and their conversion to the messages that chat templates read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ingot.ir.errors import RequestError

Message = dict[str, Any]
MessageLike = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
# Names of an assistant's reasoning among callers and older models' templates; transformers 5 sets them equally.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Tool schemas nest, and JSON parsers have a limited depth.
_MAX_DEPTH = 64
# The exponent range of a float; Python does not print integers of more than 4300 digits.
_MAX_BITS = 1024


def read_conversations(messages: object) -> list[list[Message]]:
    """Check one conversation or a list of them, and return a list of conversations. A conversation is a list of
    messages. Raises RequestError for a malformed one."""
    if isinstance(messages, Sequence) and messages and not isinstance(messages, str | bytes):
        if all(isinstance(message, Mapping) for message in messages):
            return [_conversation(messages, "messages")]
        if all(isinstance(one, Sequence) and one and not isinstance(one, str | bytes) for one in messages):
            return [_conversation(one, f"messages[{index}]") for index, one in enumerate(messages)]
    raise RequestError(
        "an empty conversation" if messages == [] else f"{messages!r:.80} is no conversation",
        where="messages",
        expected='[{"role": "user", "content": "…"}, …], or a list of such lists',
    )


def read_tools(tools: object) -> list[Message] | None:
    """Check the JSON schemas in `tools` and return copies of them; None if `tools` is None. Raises RequestError if one
    is no JSON object."""
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("the tools are no list of objects", where="tools", expected="JSON schemas of functions")
    return cast(list[Message], plain(tools, "tools"))


def plain(value: object, where: str, depth: int = 0) -> Any:
    """Return a deep copy of JSON data that has only the plain JSON types, not subclasses of them.

    where   names the data in errors
    depth   how deep `value` is nested; for recursive calls

    Raises RequestError for other types, for integers of more than 1024 bits, and for data nested more than 64 deep.
    """
    if depth > _MAX_DEPTH:
        raise RequestError(f"nested more than {_MAX_DEPTH} deep", where=where)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise RequestError("a number too large", where=where, expected=f"at most {_MAX_BITS} bits")
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)  # the base type, not a subclass
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RequestError(f"the key {key!r:.40} is no text", where=where, expected="JSON data")
        return {str(key): plain(item, f"{where}.{key}"[:200], depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]"[:200], depth + 1) for index, item in enumerate(value)]
    raise RequestError(f"a value of type {type(value).__name__}", where=where, expected="JSON data")


def _conversation(messages: Sequence[object], where: str) -> list[Message]:
    return [_message(message, f"{where}[{index}]") for index, message in enumerate(messages)]


def _message(given: object, where: str) -> Message:
    if not isinstance(given, Mapping):
        raise RequestError(f"a message of type {type(given).__name__}", where=where, expected="an object")
    message: Message = {name: value for name, value in plain(given, where).items() if value is not None}
    if message.get("role") not in ROLES:
        raise RequestError(
            f"role = {message.get('role')!r:.80}",
            where=f"{where}.role",
            expected=", ".join(f'"{role}"' for role in ROLES),
        )
    if "content" in message:
        message["content"] = _text(message["content"], f"{where}.content")
    elif not (message["role"] == "assistant" and message.get("tool_calls")):
        raise RequestError("a message without content", where=where, expected='"content": "…"')
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    if "tool_calls" in message:
        _read_arguments(message["tool_calls"], f"{where}.tool_calls")
    return message


def _text(content: object, where: str) -> str:
    """Return a message's content as one text. `content` is a text or a list of text parts. Parts are joined with
    newlines, as in vLLM. `where` names the content in errors."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"content of type {type(content).__name__}", where=where, expected="a text")
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{part!r:.80} is no text", where=f"{where}[{index}]", expected='{"type": "text", "text": "…"}'
            )
    return "\n".join(part["text"] for part in content)


def _read_arguments(calls: object, where: str) -> None:
    """Parse the arguments of each tool call in `calls`, in place. OpenAI clients send arguments as JSON text, and
    templates expect an object.

    `where` names the calls in errors. Raises RequestError if a call or its JSON is malformed.
    """
    if not isinstance(calls, list):
        raise RequestError("the tool calls are no list", where=where, expected="a list of calls")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{call!r:.80} is no call",
                where=f"{where}[{index}]",
                expected='{"type": "function", "function": {"name": "…", "arguments": {…}}}',
            )
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = plain(json.loads(function["arguments"] or "{}"), f"{where}[{index}].arguments")
            except (ValueError, RecursionError) as error:
                raise RequestError(
                    f"the arguments are no JSON: {error}", where=f"{where}[{index}].function.arguments"
                ) from None
