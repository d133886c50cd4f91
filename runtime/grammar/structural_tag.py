"""Structural tags: text in which certain parts follow grammars, in the forms that vLLM takes.

The older form has `structures` and `triggers`: free text, in which a trigger begins one of the structures. The newer
one has a tree of formats in `format` (xgrammar's documentation, "Structural Tag"). Both become a grammar.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ingot.ir.errors import RequestError
from ingot.runtime.grammar.lark import ANY_TEXT, EMPTY, LarkGrammar

WHERE = "StructuredOutputsParams.structural_tag"


def of_structural_tag(given: Mapping[str, Any], grammar: LarkGrammar, lark_of: Callable[[str], str]) -> str:
    """Return an expression for a structural tag, and add its rules to `grammar`. `lark_of` returns a grammar of any
    syntax in Lark's. Raises RequestError for a malformed one, and for formats that are not supported."""
    if "format" in given:
        return _Formats(grammar, lark_of).expression(given["format"], "format")
    structures = _field(given, "structures", list, "structural_tag")
    triggers = _texts(given, "triggers", "structural_tag")
    tags: list[tuple[str, str]] = []
    for place, one in enumerate(structures):
        where = f"structures[{place}]"
        begin, end = _field(one, "begin", str, where), _field(one, "end", str, where)
        tags.append((begin, grammar.tag("", grammar.schema(_schema(one, "schema", where)), end)))
    return _triggered(grammar, triggers, tags, "structural_tag")


class _Formats:
    """Turns the formats of a structural tag into expressions of a grammar."""

    def __init__(self, grammar: LarkGrammar, lark_of: Callable[[str], str]) -> None:
        self._grammar, self._lark_of = grammar, lark_of
        self._kinds: dict[str, Callable[[Mapping[str, Any], str], str]] = {
            "const_string": lambda one, where: self._grammar.text(_field(one, "value", str, where)) or EMPTY,
            "json_schema": lambda one, where: self._grammar.schema(_schema(one, "json_schema", where)),
            "regex": lambda one, where: self._grammar.regex(_field(one, "pattern", str, where)),
            "grammar": lambda one, where: self._grammar.grammar(self._lark_of(_field(one, "grammar", str, where))),
            "any_text": lambda one, where: self._grammar.rule(ANY_TEXT),
            "sequence": lambda one, where: self._joined(one, where, " "),
            "or": lambda one, where: self._joined(one, where, " | "),
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def expression(self, one: object, where: str) -> str:
        """Return the expression of a format. Raises RequestError."""
        kind = one.get("type") if isinstance(one, Mapping) else None
        if not isinstance(kind, str) or kind not in self._kinds:
            raise RequestError(
                f"the structural tag has a format of type {kind!r:.40}",
                where=f"{WHERE}, {where}",
                expected="one of " + ", ".join(self._kinds),
            )
        assert isinstance(one, Mapping)
        return self._kinds[kind](one, where)

    def _joined(self, one: Mapping[str, Any], where: str, joint: str) -> str:
        parts = _field(one, "elements", list, where)
        if not parts:
            raise RequestError("elements is empty", where=f"{WHERE}, {where}", expected="at least one format")
        return self._grammar.rule(
            joint.join(self.expression(part, f"{where}.elements[{place}]") for place, part in enumerate(parts))
        )

    def _tag(self, one: Mapping[str, Any], where: str) -> str:
        return self._grammar.tag(_field(one, "begin", str, where), *self._content(one, where))

    def _content(self, one: Mapping[str, Any], where: str) -> tuple[str | None, str]:
        """Return the content of a tag as an expression, None for any text, and the text at its end."""
        content = _field(one, "content", Mapping, where)
        free = content.get("type") == "any_text"
        expression = None if free else self.expression(content, f"{where}.content")
        return expression, _field(one, "end", str, where)

    def _tags(self, one: Mapping[str, Any], where: str) -> list[tuple[str, str, str]]:
        """Return (begin, expression after it, whole expression) of each tag of a format."""
        tags: list[tuple[str, str, str]] = []
        for place, tag in enumerate(_field(one, "tags", list, where)):
            inside = f"{where}.tags[{place}]"
            begin = _field(tag, "begin", str, inside)
            rest = self._grammar.tag("", *self._content(tag, inside))
            tags.append((begin, rest, self._grammar.rule(f"{self._grammar.text(begin)} {rest}")))
        if not tags:
            raise RequestError("tags is empty", where=f"{WHERE}, {where}", expected="at least one tag")
        return tags

    def _triggered_tags(self, one: Mapping[str, Any], where: str) -> str:
        tags, once = self._tags(one, where), _flag(one, "stop_after_first", where)
        text = _triggered(
            self._grammar,
            _texts(one, "triggers", where),
            [(begin, rest) for begin, rest, _ in tags],
            where,
            once=once,
        )
        if not _flag(one, "at_least_one", where):
            return text
        first = " | ".join(whole for *_, whole in tags)  # as in xgrammar: the text begins with it
        return self._grammar.rule(first if once else f"({first}) {text}")

    def _tags_with_separator(self, one: Mapping[str, Any], where: str) -> str:
        either = self._grammar.rule(" | ".join(whole for *_, whole in self._tags(one, where)))
        least = 1 if _flag(one, "at_least_one", where) else 0
        if _flag(one, "stop_after_first", where):
            return either if least else self._grammar.rule(f"({either})?")
        several = f"{either} ({self._grammar.text(_field(one, 'separator', str, where))} {either})*"
        return self._grammar.rule(several if least else f"({several})?")


def _triggered(
    grammar: LarkGrammar, triggers: Sequence[str], tags: Sequence[tuple[str, str]], where: str, *, once: bool = False
) -> str:
    for begin, _ in tags:
        if not any(begin.startswith(trigger) for trigger in triggers):
            raise RequestError(
                f"no trigger begins the tag {begin!r:.40}", where=f"{WHERE}, {where}", expected="a trigger for each tag"
            )
    used = [one for one in dict.fromkeys(triggers) if any(begin.startswith(one) for begin, _ in tags)]
    return grammar.triggered(used, tags, once=once) if tags else grammar.rule(ANY_TEXT)


def _field(one: object, name: str, kind: type | tuple[type, ...], where: str) -> Any:
    value = one.get(name) if isinstance(one, Mapping) else None
    if not isinstance(value, kind):
        expected = {str: "a text", list: "a list", Mapping: "an object"}.get(kind, "a JSON schema")  # type: ignore[call-overload]
        raise RequestError(f"{name} is {value!r:.80}", where=f"{WHERE}, {where}", expected=expected)
    return value


def _schema(one: object, name: str, where: str) -> Any:
    return _field(one, name, (Mapping, bool), where)


def _flag(one: Mapping[str, Any], name: str, where: str) -> bool:
    value = one.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r:.80}", where=f"{WHERE}, {where}", expected="true or false")
    return value


def _texts(one: Mapping[str, Any], name: str, where: str) -> list[str]:
    values = _field(one, name, list, where)
    if not values or not all(isinstance(value, str) and value for value in values):
        raise RequestError(
            f"{name} is {values!r:.80}", where=f"{WHERE}, {where}", expected="a list of texts, none of them empty"
        )
    return list(values)
