"""Schemas that are closed: their objects have only the properties that they name."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.runtime.grammar.closed_schema import closed_schema

A = {"properties": {"a": {"type": "integer"}}}
CLOSED = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, CLOSED),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({"type": "object"}, {"type": "object"}),
        ({"items": A, "$defs": {"properties": A}}, {"items": CLOSED, "$defs": {"properties": CLOSED}}),
        ({"anyOf": [A, {"const": A}]}, {"anyOf": [CLOSED, {"const": A}]}),
        ({**A, "anyOf": [A]}, {**A, "anyOf": [CLOSED]}),
        ({**A, "$ref": "#/$defs/B"}, {**A, "$ref": "#/$defs/B"}),
        ({"properties": {"b": {"allOf": [A, A]}}}, {"properties": {"b": {"allOf": [A, A]}}}),
        ({"properties": {"allOf": A}}, {"properties": {"allOf": CLOSED}, "additionalProperties": False}),
        (True, True),
    ],
)
def test_closed_schemas(schema: Any, closed: Any) -> None:
    assert closed_schema(schema) == closed
