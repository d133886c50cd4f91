"""A program's text taken apart by line: what the parser of the text form reads, every line tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.ir.parse import parse_program, parse_recipe
from ingot.ir.program import Program, target_name
from ingot.ir.text import print_call, value_name
from ingot.report.lines import ProgramLine, layer_of, program_lines

GOLDENS = sorted(Path(__file__).parents[1].glob("*/goldens/*.ir"))


def check(program: Program, lines: list[ProgramLine]) -> None:
    """The lines, those of regions' bodies apart, are the program's, in its order."""
    calls = [line for line in lines if line.kind == "call"]
    assert len(calls) == len(list(program.calls()))
    for node, line in zip(program.calls(), calls, strict=True):
        assert (f"%{line.name}", line.op) == (value_name(node), target_name(node.target))
        assert line.backend == node.meta.get("backend", "")
        assert line.origin == node.meta.get("origin", "")
        assert line.type == str(node.meta["type"])
        assert line.placement == " ".join(map(str, node.meta.get("placement", ())))
        assert f"({line.text}) : " in print_call(node)
    params = {line.name: line for line in lines if line.kind == "param"}
    assert params.keys() == program.params.keys()
    for name, spec in program.params.items():
        assert (params[name].type, parse_recipe(params[name].text)) == (str(spec.type), spec.recipe)
        split = [spec.split] if spec.split is not None else []
        assert params[name].placement == " ".join(map(str, [*split, *spec.placement]))
    states = {line.name: line for line in lines if line.kind == "state"}
    assert states.keys() == program.states.keys()
    for name, state in program.states.items():
        assert (states[name].op, states[name].type) == (state.kind, str(state.type))
        assert states[name].text.startswith(f"group={state.group} unit={state.unit}")
    inputs = {line.name: line.type for line in lines if line.kind == "input"}
    assert inputs == {name: str(value_type) for name, value_type in program.input_types().items()}
    assert [line.name for line in lines if line.kind == "dim"] == list(program.dims)


@pytest.mark.parametrize("file", GOLDENS, ids=lambda file: f"{file.parents[1].name}-{file.stem}")
def test_every_golden_is_taken_apart_as_it_parses(file: Path) -> None:
    text = file.read_text()
    program = parse_program(text)
    outside: list[ProgramLine] = []
    bodies: dict[str, list[ProgramLine]] = {}
    inside: list[ProgramLine] | None = None
    for line in program_lines(text):
        assert line.kind != "other", line
        if line.kind == "region":
            inside = bodies[line.name] = []
            assert line.op == program.regions[line.name].backend
        elif line.kind == "end":
            inside = None
        else:
            (outside if inside is None else inside).append(line)
    check(program, outside)
    assert bodies.keys() == program.regions.keys()
    for name, lines in bodies.items():
        calls = [line.name for line in lines if line.kind == "call"]
        assert calls == [node.name for node in program.regions[name].body.calls()]


def test_goldens_have_what_is_hard_to_read() -> None:
    text = "".join(file.read_text() for file in GOLDENS)
    for part in ("region ", "tp=shard(", "tp=partial", " @", "segments=[", "state ", "mesh "):
        assert part in text


def test_strings_and_comments_may_hold_any_sign() -> None:
    call = (
        '%a = ingot.f(%b, name=") : x @y  # z", k=[1, 2]) : (bf16[T], i32[B, 2]) tp=partial @cpu  # layer 3, <b>" # %c'
    )
    (line,) = program_lines(call + "\n")
    assert line == ProgramLine(
        kind="call",
        name="a",
        op="ingot.f",
        text='%b, name=") : x @y  # z", k=[1, 2]',
        type="(bf16[T], i32[B, 2])",
        placement="tp=partial",
        backend="cpu",
        origin='layer 3, <b>" # %c',
        layer=3,
    )
    (line,) = program_lines(
        'param layers.12.w: f32[2] tp=shard(0, segments=[1, 1]) dp=partial = source(name="a = (b")\n'
    )
    assert (line.placement, line.text, line.layer) == (
        "tp=shard(0, segments=[1, 1]) dp=partial",
        'source(name="a = (b")',
        12,
    )


@pytest.mark.parametrize(
    ("origin", "name", "layer"),
    [
        ("layer 7, blocks/attention.py:61", "", 7),
        ("layer 7, a.py:1 … layer 9, a.py:1", "", 7),
        ("blocks/decoder.py:106", "", None),
        ("", "layers.11.mlp.gate.weight", 11),
        ("", "draft.layers.2.norm", 2),
        ("", "players.2.norm", None),
        ("", "norm.weight", None),
    ],
)
def test_layers_come_from_origins_and_names(origin: str, name: str, layer: int | None) -> None:
    assert layer_of(origin, name) == layer
