"""Placements in programs: the text form, and what a node's placement is."""

import pytest
from mesh_program import BODY, HEAD, PARTIAL, STATES, program, shard

from ingot.ir.errors import ParseError
from ingot.ir.infer_placement import placement_of
from ingot.ir.ops import OPS
from ingot.ir.parse import parse_program
from ingot.ir.text import print_program
from ingot.ir.types import StateType
from ingot.ir.verify import verify


@pytest.mark.parametrize(("stage", "body"), [("SHARDED", BODY), ("CACHED", STATES)])
def test_programs_on_a_mesh_read_back(stage: str, body: str) -> None:
    found = program(body, stage)
    verify(found)
    text = print_program(found)
    assert text == HEAD.format(stage=stage) + body
    copy = found.copy()
    assert print_program(copy) == text and copy.mesh == {"tp": 2} and copy.mesh is not found.mesh


def test_placements_are_values() -> None:
    found = program()
    wide, *_, part, total, _ = found.calls()
    assert placement_of(wide, found) == (shard(1, 4, 8),) and placement_of(part, found) == (PARTIAL,)
    assert placement_of(total, found) == placement_of(found.find("x"), found) == ()
    assert placement_of(found.find("down"), found) == (shard(1),)
    states = program(STATES, "CACHED")
    assert placement_of(states.find("kv"), states) == (shard(3),)
    assert isinstance(next(states.calls(OPS["kv_append"].overload)).meta["type"], StateType)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("mesh\n", "the line ends too early"),
        ("mesh tp\n", "the line ends too early"),
        ("mesh tp=0\n", "mesh axis tp is 0"),
        ("mesh tp=2 tp=2\n", "mesh axis 'tp' is given twice"),
        ("mesh tp=x\n", "unexpected 'x'"),
    ],
)
def test_bad_meshes_are_no_text(text: str, problem: str) -> None:
    with pytest.raises(ParseError, match=problem):
        parse_program("program p stage=SHARDED\n" + text + "return x=%x\n")
