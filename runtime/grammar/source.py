"""The grammar of a request in the form that llguidance takes."""

import json
from collections.abc import Mapping
from typing import Any

from ingot.ir.errors import RequestError
from ingot.runtime.grammar.closed_schema import closed_schema
from ingot.runtime.grammar.lark import LarkGrammar, quoted, schema_text
from ingot.runtime.grammar.params import OWNER, StructuredOutputsParams
from ingot.runtime.grammar.structural_tag import of_structural_tag

# White space between tokens of JSON, at most so many characters in a row: an indented line of depth 15 with four
# spaces each. Without a limit, models whose prompts do not mention JSON write white space until `max_tokens`.
_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"


def source_of(params: StructuredOutputsParams, special: Mapping[str, int]) -> str:
    """Return the grammar of `params` as text for `llguidance.LLMatcher`. `special` is the text -> id of special tokens.

    Raises RequestError for a grammar that cannot be written so; the matcher finds all other faults.
    """
    options = _json_options(params)
    if params.json is not None or params.json_object is not None:
        schema = {"type": "object"} if params.json is None else _schema(params)
        return f'{{"grammars":[{{"json_schema":{schema_text(schema, options)}}}]}}'
    grammar = LarkGrammar(special, options)
    if params.regex is not None:
        return grammar.finished(grammar.regex(params.regex))
    if params.choice is not None:
        # A terminal: a rule may have 2000 alternatives at most.
        either = " | ".join(quoted(one) for one in params.choice)
        return json.dumps({"grammars": [{"lark_grammar": f"start: CHOICE\nCHOICE: {either}\n"}]}, ensure_ascii=False)
    if params.grammar is not None:
        return json.dumps({"grammars": [{"lark_grammar": lark_of(params.grammar)}]}, ensure_ascii=False)
    assert params.structural_tag is not None
    return grammar.finished(of_structural_tag(json.loads(params.structural_tag), grammar, lark_of))


def lark_of(grammar: str) -> str:
    """Return a grammar in Lark's syntax. GBNF, which vLLM calls EBNF, is converted. Raises RequestError."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter raises plain exceptions, and RecursionError
        raise RequestError(
            f"the grammar cannot be read: {error}"[:300], where=f"{OWNER}.grammar", expected="Lark's syntax, or GBNF"
        ) from None


def _json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.whitespace_pattern is not None:
        return {"whitespace_pattern": params.whitespace_pattern}
    return {"whitespace_flexible": False} if params.disable_any_whitespace else {"whitespace_pattern": _SPACE}


def _schema(params: StructuredOutputsParams) -> Any:
    assert params.json is not None
    schema = json.loads(params.json)
    return closed_schema(schema) if params.disable_additional_properties else schema
