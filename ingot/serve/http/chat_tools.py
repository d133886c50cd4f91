"""The tools of chat requests: their checks, and the one place that decides which choices of tools are supported."""

from collections.abc import Sequence
from typing import Any

from ingot.serve.http.errors import HttpError, checked
from ingot.serve.parsers.choice import tool_parser_names
from ingot.serve.parsers.machine import Tools
from ingot.serve.parsers.names import MAX_NAME, is_name

_FUNCTION = '{"type": "function", "function": {"name": "…", "parameters": {"type": "object", …}}}'
_NAME = f"1 to {MAX_NAME} letters, digits, or characters of -_.:/@$"


def read_tools(given: Sequence[Any]) -> Tools:
    """Return the functions of a request's tools by name. Raises HttpError 400 for a malformed tool."""
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        good = isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("function"), dict)
        checked(400, where, tool, good, _FUNCTION)
        function = tool["function"]
        name = function.get("name")
        checked(400, f"{where}.function.name", name, isinstance(name, str) and is_name(name), _NAME)
        checked(400, f"{where}.function.name", name, name not in functions, "a name of its own for each tool")
        about = function.get("description")
        checked(400, f"{where}.function.description", about, about is None or isinstance(about, str), "a text")
        _check_parameters(function.get("parameters"), f"{where}.function.parameters")
        functions[name] = function
    return functions


def _check_parameters(schema: Any, where: str) -> None:
    """Raise HttpError unless the schema of a function's arguments describes an object. None: there are none."""
    checked(400, where, schema, schema is None or isinstance(schema, dict), "a JSON schema")
    if schema is not None:
        checked(400, f"{where}.type", schema.get("type"), schema.get("type", "object") == "object", '"object"')
        properties = schema.get("properties", {})
        checked(400, f"{where}.properties", properties, isinstance(properties, dict), "an object of JSON schemas")


def calls_allowed(choice: Any) -> bool:
    """Return whether a request's `tool_choice` lets the model call its tools. Raises HttpError 400 for a choice that
    forces a call: only a grammar could do that."""
    if choice is None or choice == "auto":
        return True
    if choice == "none":
        return False
    named = isinstance(choice, dict) and choice.get("type") == "function"
    if choice == "required" or named:
        what = "a named tool" if named else '"required"'
        message = f'tool_choice {what} needs structured output, which is not supported yet; send "auto" or "none"'
        raise HttpError(400, message, param="tool_choice")
    checked(400, "tool_choice", choice, False, '"none" or "auto"')
    return False


def check_tools_served(*, has_parser: bool, reads_tools: bool) -> None:
    """Raise HttpError 400 if calls of tools cannot be served.

    has_parser    the server has a parser for the model's calls
    reads_tools   the model's chat template writes tools into the prompt
    """
    if not reads_tools:
        message = "this model's chat template does not write tools into the prompt; leave tools out"
        raise HttpError(400, f"{message}, or serve the model with --chat-template", param="tools")
    if not has_parser:
        names = ", ".join(tool_parser_names())
        message = "this server cannot tell the format of the model's tool calls; leave tools out, or serve the model"
        raise HttpError(400, f"{message} with --tool-call-parser NAME, one of: {names}", param="tools")
