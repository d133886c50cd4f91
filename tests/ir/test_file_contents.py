"""How files of an artifact are written once and short: JSON by lines, documents with common values, refusals."""

import json
import random
from typing import Any

import pytest
from pydantic import ValidationError
from run_seed import run_seed

from ingot.ir.artifact.documents import decode_documents, encode_documents
from ingot.ir.artifact.record import Refusal, encode_refusals
from ingot.ir.artifact.refusals import RefusalTable
from ingot.ir.json_text import dump_json, dump_lines


def test_json_by_lines() -> None:
    value = {"b": [1, 2.5, None], "a": {"é": list(range(100))}, "": []}
    text = dump_lines(value)
    lines = text.splitlines()
    assert lines[0] == "{" and lines[1] == ' "": [],' and lines[-2:] == [' "b": [1, 2.5, null]', "}"]
    assert lines[2:5] == [' "a": {', '  "\\u00e9": [', "   0,"]
    assert text.endswith("}\n") and json.loads(text) == value
    assert dump_lines([]) == "[]\n" and dump_lines("x") == '"x"\n'
    for odd, error in (({"a": float("nan")}, ValueError), ({"a": {1, 2}}, TypeError)):
        with pytest.raises(error):
            dump_lines(odd)


def _value(draw: random.Random, depth: int) -> Any:
    kind = draw.choice(["list", "object", "text", "number"] if depth else ["text", "number"])
    if kind == "list":
        return [_value(draw, depth - 1) for _ in range(draw.randrange(6))]
    if kind == "object":
        return {_text(draw): _value(draw, depth - 1) for _ in range(draw.randrange(6))}
    return _text(draw) if kind == "text" else draw.choice([None, True, -3, 0.1, 1e300, 2**40])


def _text(draw: random.Random) -> str:
    return "".join(draw.choice('ab"\\\n: ,é{[') for _ in range(draw.randrange(30)))


def test_any_value_reads_back_and_is_short() -> None:
    draw = random.Random(run_seed())
    for _ in range(200):
        value = _value(draw, 5)
        text = dump_lines(value)
        assert json.loads(text) == value and len(text) <= len(dump_json(value))
        assert "".join(text.split()) == "".join(dump_json(value).split()), "they differ in white space alone"


SOURCES = {"a.py": "1", "b.py": "2"}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "k1": {"backend": "triton", "sources": SOURCES, "target": {"sm": 90}, "body": ["x"]},
    "k2": {"backend": "triton", "sources": {**SOURCES, "c.py": "3"}, "target": {"sm": 80}, "body": None},
    "k3": {"backend": "cpu", "sources": dict(SOURCES), "body": ["x"], "package": {"name": "p"}},
}


def test_what_documents_have_in_common_is_written_once() -> None:
    stored = json.loads(dump_lines(encode_documents(DOCUMENTS)))
    assert stored["shared"] == {"sources": [SOURCES, {**SOURCES, "c.py": "3"}]}, "no target repeats"
    assert [one["sources"] for one in stored["documents"].values()] == [0, 1, 0]
    assert stored["documents"]["k3"]["package"] == {"name": "p"}
    assert decode_documents(stored) == DOCUMENTS
    assert decode_documents(encode_documents({})) == {}


@pytest.mark.parametrize(
    "stored",
    [
        [],
        {},
        {"shared": {}, "documents": []},
        {"shared": {}, "documents": {"k": 1}},
        {"shared": [], "documents": {}},
        {"shared": {"sources": {}}, "documents": {}},
        {"shared": {"sources": [{}]}, "documents": {"k": {"sources": 1}}},
        {"shared": {"sources": [{}]}, "documents": {"k": {"sources": -1}}},
        {"shared": {"sources": [{}]}, "documents": {"k": {"sources": True}}},
        {"shared": {"sources": [{}]}, "documents": {"k": {"sources": {}}}},
    ],
)
def test_malformed_documents(stored: object) -> None:
    with pytest.raises(ValueError, match=r"expected the fields|has no|no value"):
        decode_documents(stored)


def test_refusals_keep_their_order() -> None:
    pairs = (("x", "one"), ("x", "two"), ("y", "one"), ("x", "two"), ("x", "two"))
    refusals = tuple(Refusal(node, reason) for node, reason in pairs)
    stored = json.loads(json.dumps(encode_refusals(refusals)))
    assert stored == {"reasons": ["one", "two"], "nodes": [["x", [0, 1]], ["y", [0]], ["x", [1, 1]]]}
    assert RefusalTable.model_validate(stored).refusals() == refusals
    assert RefusalTable.model_validate(encode_refusals([])).refusals() == ()


@pytest.mark.parametrize("nodes", [[["x", [1]]], [["x", [-1]]], [["x", ["0"], 3]], [["x", 0]]])
def test_malformed_refusals(nodes: object) -> None:
    with pytest.raises(ValidationError):
        RefusalTable.model_validate({"reasons": ["one"], "nodes": nodes})
