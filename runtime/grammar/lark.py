"""Grammars in Lark's syntax from their parts: fixed texts, JSON schemas, regular expressions, tags in free text.

The syntax is llguidance's (docs/syntax.md there). A marker that is a special token, such as `<|python_tag|>`, must be
written as a token: a special token never matches text. So all functions take `special`, the text -> id of such tokens.
`Tokenizer.special_tokens` has it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any] | bool
# Of text, any. `s` lets the dot match line ends.
ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True)
class Tag:
    """A part of the output between two markers, such as a tool call.

    begin    the text before it; may be empty
    content  a JSON schema that the part follows; None: any text, up to `end`
    end      the text after it; may be empty
    """

    begin: str
    content: Schema | None
    end: str


class LarkGrammar:
    """Rules of a grammar, added one by one. Methods return expressions, for use in other rules.

    special   text -> id of special tokens
    json      options of llguidance for JSON schemas ("x-guidance"), such as "whitespace_pattern"
    """

    def __init__(self, special: Mapping[str, int] | None = None, json: Mapping[str, Any] | None = None) -> None:
        self._rules: list[str] = []
        self._others: list[dict[str, str]] = []
        self._special = dict(special or {})
        self._options = dict(json or {})
        longest = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest))) if longest else None

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """Add a rule and return its name. A `lazy` rule is a terminal that matches as little text as possible."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def text(self, text: str) -> str:
        """Return an expression for a fixed text, in which special tokens are tokens; "" for an empty text."""
        return " ".join(self._pieces(text))

    def schema(self, schema: Schema) -> str:
        return f"%json {schema_text(schema, self._options)}"

    def regex(self, pattern: str) -> str:
        """Return an expression for text that matches a regular expression of Rust's crate regex."""
        from llguidance import regex_to_lark

        return f"/{regex_to_lark(whole_pattern(pattern))}/"

    def grammar(self, lark: str) -> str:
        """Return an expression for another grammar in Lark's syntax."""
        name = f"g{len(self._others)}"
        self._others.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def tag(self, begin: str, content: str | None, end: str) -> str:
        """Return an expression for `content` (None: any text) between two markers."""
        last = self.text(end) if content is not None else self.rule(*self._any_text_up_to(end))
        return self.rule(" ".join(one for one in (self.text(begin), content or "", last) if one) or '""')

    def triggered(self, triggers: Sequence[str], tags: Sequence[tuple[str, str]], *, once: bool = False) -> str:
        """Return an expression for any text in which certain markers begin tags.

        triggers   when the text has one of these, a tag that begins with it must follow
        tags       (begin, rest) of each tag: the marker, and an expression for the part after it
        once       the output ends after the first tag
        """
        found: list[str] = []
        for trigger in triggers:
            head = self.rule(*self._any_text_up_to(trigger))
            rests = [
                " ".join(one for one in (self.text(begin[len(trigger) :]), rest) if one) or '""'
                for begin, rest in tags
                if begin.startswith(trigger)
            ]
            found.append(self.rule(f"{head} ({' | '.join(rests)})"))
        ends = self.rule(ANY_TEXT)
        either = " | ".join(found)
        return self.rule(f"({either}) | {ends}" if once else f"({either})* {ends}")

    def finished(self, start: str) -> str:
        """Return the whole grammar, in the form that `llguidance.LLMatcher` takes. `start` is what the output is."""
        lark = "\n".join(["%llguidance {}", f"start: {start or EMPTY}", *self._rules]) + "\n"
        return json.dumps({"grammars": [{"name": "whole", "lark_grammar": lark}, *self._others]}, ensure_ascii=False)

    def lark(self, start: str) -> str:
        """Return the whole grammar in Lark's syntax, for `StructuredOutputsParams(grammar=…)`."""
        assert not self._others, "other grammars have no place in one text"
        return "\n".join([f"start: {start or EMPTY}", *self._rules]) + "\n"

    def _pieces(self, text: str) -> list[str]:
        pieces: list[str] = []
        place = 0
        for match in self._pattern.finditer(text) if self._pattern is not None else ():
            pieces += [quoted(text[place : match.start()]), f"<[{self._special[match[0]]}]>"]
            place = match.end()
        return [one for one in (*pieces, quoted(text[place:])) if one]

    def _any_text_up_to(self, end: str) -> tuple[str]:
        """Return the arguments of `rule` for text up to the first `end`, and the end itself."""
        pieces = self._pieces(end)
        if not pieces:
            return (ANY_TEXT,)
        if pieces[0].startswith("<["):
            return (" ".join([self.rule(ANY_TEXT), *pieces]),)
        head = f"r{len(self._rules)}"
        self._rules.append(f"{head}[lazy]: {ANY_TEXT} {pieces[0]}")
        return (" ".join([head, *pieces[1:]]),)


EMPTY = '""'


def quoted(text: str) -> str:
    """Return a fixed text as Lark writes it; "" for an empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def whole_pattern(pattern: str) -> str:
    """Return a regular expression without `^` at the start and `$` at the end: it matches whole texts anyway."""
    begin = 1 if pattern.startswith("^") else 0
    escapes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    end = len(pattern) - 1 if pattern.endswith("$") and escapes % 2 == 0 else len(pattern)
    return pattern[begin:end]


def schema_text(schema: Schema, options: Mapping[str, Any]) -> str:
    """Return a JSON schema as JSON text, with options of llguidance. Options that the schema has itself stay."""
    if isinstance(schema, bool):
        schema = {} if schema else {"type": []}  # no value has one of no types
    own = schema.get("x-guidance")
    more = {"x-guidance": {**options, **(own if isinstance(own, Mapping) else {})}}
    return json.dumps({**schema, **more}, ensure_ascii=False)


def lark_of_tags(
    tags: Sequence[Tag],
    *,
    special: Mapping[str, int] | None = None,
    separator: str = "",
    most: int | None = None,
) -> str:
    """Return a grammar in Lark's syntax for one or more tags in a row, such as tool calls that a request requires.

    tags        the tags to choose from; each may occur several times
    special     text -> id of special tokens
    separator   the text between two tags
    most        the most tags; None: any number
    """
    grammar = LarkGrammar(special)
    either = grammar.rule(" | ".join(_tag(grammar, one) for one in tags))
    if most == 1:
        return grammar.lark(either)
    between = grammar.text(separator)
    return grammar.lark(f"{either} ({between} {either}){'*' if most is None else f'{{0,{most - 1}}}'}")


def lark_of_text_with_tags(
    triggers: Sequence[str], tags: Sequence[Tag], *, special: Mapping[str, int] | None = None
) -> str:
    """Return a grammar in Lark's syntax for any text with tags in it, such as an answer that may call tools.

    triggers   when the text has one of these, a tag whose `begin` starts with it must follow
    special    text -> id of special tokens
    """
    grammar = LarkGrammar(special)
    rests = [(one.begin, grammar.tag("", *_content(grammar, one))) for one in tags]
    return grammar.lark(grammar.triggered(triggers, rests))


def _tag(grammar: LarkGrammar, tag: Tag) -> str:
    return grammar.tag(tag.begin, *_content(grammar, tag))


def _content(grammar: LarkGrammar, tag: Tag) -> tuple[str | None, str]:
    return (None if tag.content is None else grammar.schema(tag.content)), tag.end
