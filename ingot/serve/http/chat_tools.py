"""The tools of chat requests: their checks, and the one place that decides which choices of tools are supported."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from ingot.ir.errors import RequestError
from ingot.runtime.grammar.params import OWNER as STRUCTURED_OUTPUTS
from ingot.serve.http.errors import HttpError, checked
from ingot.serve.parsers.choice import tool_parser_names
from ingot.serve.parsers.names import MAX_NAME, is_name
from ingot.serve.parsers.tool_use import Tools, ToolUse

_FUNCTION = '{"type": "function", "function": {"name": "…", "parameters": {"type": "object", …}}}'
_CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": "…"}}'
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


def tool_use(functions: Tools, choice: Any, *, several: bool, has_grammar: bool) -> ToolUse:
    """Return how a message may use the functions of a request.

    choice        the request's `tool_choice`, in the form of chats
    several       the client takes more than one call
    has_grammar   the request has a grammar for its whole output

    Raises HttpError 400 for a choice that is malformed, or that no output can follow.
    """
    if choice is None or choice == "auto":
        return ToolUse(functions, several=several)
    if choice == "none":
        return ToolUse()
    named = isinstance(choice, dict) and choice.get("type") == "function"
    checked(400, "tool_choice", choice, named or choice == "required", _CHOICES)
    if has_grammar:
        message = "structured_outputs is a grammar for the output, and tool_choice asks for a call; send one of them"
        raise HttpError(400, message, param="tool_choice")
    if not functions:
        message = 'tool_choice asks for a call, and there are no tools; send tools, or the tool_choice "none"'
        raise HttpError(400, message, param="tool_choice")
    if not named:
        return ToolUse(functions, forced=True, several=several)
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    found = functions.get(name) if isinstance(name, str) else None
    legal = f"the name of one of the tools: {', '.join(functions)}"[:1000]
    checked(400, "tool_choice", choice, found is not None, legal)
    return ToolUse({str(name): found or {}}, forced=True, named=True, several=False)


@contextlib.contextmanager
def refusals_of_tools(use: ToolUse) -> Iterator[None]:
    """Raise HttpError 400 with `tools` at fault if the grammar of a call that a request forces is refused."""
    try:
        yield
    except RequestError as error:
        if not (use.forced and error.where.startswith(STRUCTURED_OUTPUTS)):
            raise
        message = f"a call of these tools cannot be forced, because of their JSON schemas: {error.what}"
        raise HttpError(400, f'{message}; change them, or send the tool_choice "auto"', param="tools") from None


def check_tools_served(*, has_parser: bool, reads_tools: bool) -> None:
    """Raise HttpError 400 if calls of tools cannot be served.

    has_parser    the server has a parser for the calls
    reads_tools   the model's chat template writes tools into the prompt
    """
    if not reads_tools:
        message = "this model's chat template does not write tools into the prompt; leave tools out"
        raise HttpError(400, f"{message}, or serve the model with --chat-template", param="tools")
    if not has_parser:
        names = ", ".join(tool_parser_names())
        message = "this server cannot tell the format of the model's tool calls; leave tools out, or serve the model"
        raise HttpError(400, f"{message} with --tool-call-parser NAME, one of: {names}", param="tools")
