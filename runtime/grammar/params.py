"""`StructuredOutputsParams`: the grammar of one request's output. Names and defaults are vLLM's."""

import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ingot.ir.errors import RequestError
from ingot.runtime.params.param_checks import boolean, refuse

OWNER = "StructuredOutputsParams"
# The longest text of a grammar. Those of requests have some kilobytes. The engine's thread reads the JSON of each. That
# takes up to 10 ms for this length, and steps wait for it.
MAX_CHARACTERS = 1 << 18
# The text of an output's end with reason "error" begins so, if its grammar is at fault.
FAILED = "the grammar failed: "
# A request sets exactly one of these fields.
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, init=False)
class StructuredOutputsParams:
    """A grammar for the output of one request. Exactly one of the first six fields is set.

    json             a JSON schema, as a dict or as JSON text. Kept as text, in which properties keep their order
    regex            a regular expression that the whole output matches, in the syntax of Rust's crate regex
    choice           the output is one of these texts
    grammar          a grammar in Lark's syntax with the rule `start`, or in GBNF with the rule `root`
    json_object      True: the output is any JSON object
    structural_tag   text in which certain parts follow grammars, as JSON text or as a dict: vLLM's (xgrammar's) form
    disable_any_whitespace           JSON has no white space between its tokens
    disable_additional_properties    objects of a JSON schema have only the properties that it names
    whitespace_pattern               a regular expression for the white space between tokens of JSON

    The constructor raises RequestError for a wrong type, for no grammar or several, and for a text of more than
    262,144 characters. The engine checks the grammar itself.
    """

    json: str | None
    regex: str | None
    choice: tuple[str, ...] | None
    grammar: str | None
    json_object: bool | None
    structural_tag: str | None
    disable_any_whitespace: bool
    disable_additional_properties: bool
    whitespace_pattern: str | None

    def __init__(
        self,
        *,
        json: str | Mapping[str, Any] | bool | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        structural_tag: str | Mapping[str, Any] | None = None,
        disable_any_whitespace: bool = False,
        disable_additional_properties: bool = False,
        whitespace_pattern: str | None = None,
    ) -> None:
        values: dict[str, Any] = {
            "json": _json("json", json),
            "regex": _text("regex", regex),
            "choice": _choice(choice),
            "grammar": _text("grammar", grammar),
            "json_object": _object(json_object),
            "structural_tag": _json("structural_tag", structural_tag),
            "disable_any_whitespace": boolean(f"{OWNER}.disable_any_whitespace", disable_any_whitespace),
            "disable_additional_properties": boolean(
                f"{OWNER}.disable_additional_properties", disable_additional_properties
            ),
            "whitespace_pattern": _text("whitespace_pattern", whitespace_pattern),
        }
        given = [name for name in KINDS if values[name] is not None]
        if len(given) != 1:
            raise RequestError(
                f"{' and '.join(given)} are set together" if given else "no grammar is set",
                where=OWNER,
                expected="exactly one of " + ", ".join(KINDS),
            )
        self.__dict__.update(values)  # a frozen object refuses to set attributes


_NAMES = tuple(one.name for one in fields(StructuredOutputsParams))


def structured_outputs(where: str, value: object) -> StructuredOutputsParams | None:
    """Return a grammar that a request has as StructuredOutputsParams, or as a dict of its fields. None stays None.

    `where` names the parameter in errors. Raises RequestError for anything else.
    """
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        refuse(where, value, f"{OWNER}, or a dict of its fields")
    for name in value:
        if name not in _NAMES:
            what = f"structured_outputs has the unknown field {name!r:.40}"
            raise RequestError(what, where=where, expected="one of " + ", ".join(_NAMES))
    return StructuredOutputsParams(**value)


def _bounded(name: str, text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise RequestError(
            f"{name} has {len(text)} characters", where=f"{OWNER}.{name}", expected=f"at most {MAX_CHARACTERS}"
        )
    return text


def _text(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise RequestError(f"{name} is of type {type(value).__name__}", where=f"{OWNER}.{name}", expected="a text")
    return _unicode(name, _bounded(name, value))


def _unicode(name: str, text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = f"{OWNER}.{name}, character {error.start}"
        raise RequestError(f"{name} is no valid Unicode text", where=where) from None
    return text


def _json(name: str, value: object) -> str | None:
    """Return a JSON object or boolean as JSON text. Text is checked; other JSON values are refused."""
    if value is None:
        return None
    where, expected = f"{OWNER}.{name}", "a JSON object, as a dict or as text"
    if isinstance(value, str):
        try:
            read = jsonlib.loads(_bounded(name, value))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name} is no JSON: {error}"[:300], where=where, expected=expected) from None
    else:
        read = value
    if not isinstance(read, Mapping | bool) or (name != "json" and isinstance(read, bool)):
        raise RequestError(f"{name} is of type {type(read).__name__}", where=where, expected=expected)
    try:
        text = jsonlib.dumps(read, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} cannot be written as JSON: {error}"[:300], where=where, expected=expected) from None
    return _unicode(name, _bounded(name, text))


def _choice(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) and one for one in value):
        raise RequestError(
            f"choice is {value!r:.80}", where=f"{OWNER}.choice", expected="a list of texts, none of them empty"
        )
    _bounded("choice", "".join(value))
    return tuple(dict.fromkeys(_unicode("choice", one) for one in value))


def _object(value: object) -> bool | None:
    if value is None:
        return None
    if not isinstance(value, bool):
        raise RequestError(f"json_object is {value!r:.80}", where=f"{OWNER}.json_object", expected="True, or None")
    return value or None
