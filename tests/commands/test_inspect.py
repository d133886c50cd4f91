"""`ingot inspect`: parts of an artifact, and filters by layer, op and name that work with each of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import CHECKPOINTS

import ingot.cli.main as cli
from ingot.cli.console import print_program_text
from ingot.ir.artifact.refusals import RefusalTable
from ingot.ir.parse import parse_program, parse_programs

NAME = "llama-biased"
LAYERS = CHECKPOINTS[NAME].config["num_hidden_layers"]

pytestmark = [pytest.mark.xdist_group(f"parity-{NAME}"), pytest.mark.one_in_file(3)]

Inspect = Callable[..., str]


@pytest.fixture(scope="module")
def folder(artifact: Callable[..., Path]) -> Path:
    """With regions, and two bucket classes."""
    return artifact(NAME, backend="inductor")


@pytest.fixture
def inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> Inspect:
    """What `ingot inspect` prints, or, with `fails`, what it complains."""

    def run(*arguments: object, fails: bool = False, path: Path = folder) -> str:
        capsys.readouterr()
        code = cli.run(cli.INGOT, ["inspect", str(path), *map(str, arguments)])
        captured = capsys.readouterr()
        assert code == (cli.BAD_INPUT if fails else cli.DONE), captured.err
        assert (captured.out == "") if fails else (captured.err == "")
        return captured.err if fails else captured.out

    return run


def test_the_final_program(inspect: Inspect, folder: Path) -> None:
    text = inspect("--program")
    assert text == (folder / "program.ir").read_text() == inspect("--stage", "planned")
    assert {program.bucket.name for program in parse_programs(text) if program.bucket} == {"decode", "extend"}


def test_a_run_of_a_pass(inspect: Inspect) -> None:
    both = json.loads(inspect("--pass", "choose-backends", "--json"))
    assert list(both) == ["decode", "extend"]
    assert inspect("--pass", "choose-backends@extend") == both["extend"]
    assert list(json.loads(inspect("--pass", "cse", "--json"))) == ["NORMAL", "FUSED"]
    assert parse_program(inspect("--pass", "cse@NORMAL")).name == "main"
    assert "the nearest is 'cse'" in inspect("--pass", "csee", fails=True)


# Filters of program text: what is left holds what was asked for, and what that reads.


def test_what_a_filter_leaves_is_all_that_matches(inspect: Inspect) -> None:
    text = inspect("--pass", "merge-linears")
    for arguments, matches in {
        ("--op", "linear"): lambda line: " = ingot.linear(" in line,
        ("--op", "aten.slice.Tensor"): lambda line: " = aten.slice.Tensor(" in line,
        ("--op", "slice"): lambda line: " = aten.slice.Tensor(" in line,
        ("--name", "linear*"): lambda line: line.startswith("%linear"),
        ("--name", "layers.?.mlp.*"): lambda line: re.match(r"param layers\.\d\.mlp\.", line),
        ("--op", "linear", "--layer", "1"): lambda line: " = ingot.linear(" in line and "# layer 1," in line,
    }.items():
        wanted = [line for line in text.splitlines() if matches(line)]
        shown = inspect("--pass", "merge-linears", *arguments).splitlines()
        assert wanted and [line for line in shown if matches(line)] == wanted
        defined = {re.split(r"[ :]", line.removeprefix("%").removeprefix("param "))[0] for line in shown}
        defined |= {line.split(" ")[1].rstrip(":") for line in shown if re.match("input|state", line)}
        for line in wanted:
            reads = re.findall(r"%([\w.]+)", line.partition(" = ")[2])
            assert set(reads) <= defined, f"{line} cannot be read without its values"
        assert shown[0].startswith("program main") and "…" in shown
        assert set(shown) - {"…"} <= set(text.splitlines())


def test_layers_are_those_of_origins_and_users(inspect: Inspect) -> None:
    shown = inspect("--stage", "CACHED", "--layer", "1").splitlines()
    assert any(line.startswith("state kv.1:") for line in shown), "a state belongs to the layer that reads it"
    assert any(line.startswith("param ropes.0:") for line in shown), "all layers read the table"
    assert not any(line.startswith(("param layers.0.", "state kv.0")) for line in shown)
    one, both = (len(inspect("--stage", "CACHED", "--layer", layers).splitlines()) for layers in ("1", "0-1"))
    assert one < both
    assert f"expected: 0 to {LAYERS - 1}" in inspect("--layer", LAYERS, fails=True)
    for wrong in ("x", "2-1", "-1", "1-", "1,2"):
        assert "a number, or a range like 2-5" in inspect(f"--layer={wrong}", fails=True)


def test_filters_alone_mean_the_final_program(inspect: Inspect) -> None:
    assert inspect("--op", "paged_attention") == inspect("--program", "--op", "paged_attention")
    found = json.loads(inspect("--op", "paged_attention", "--json"))
    assert list(found) == [""] and found[""].count(" = ingot.paged_attention(") == 2 * LAYERS


def test_lines_in_regions_come_with_their_regions(inspect: Inspect) -> None:
    shown = inspect("--stage", "PLANNED", "--op", "silu_mul").splitlines()
    opened = 0
    for line in shown:
        opened += line.startswith("region ")
        assert not line.startswith("  %") or opened, "outside of a region"
        opened -= line == "}"
    assert opened == 0 and any(line.startswith("  %silu_mul") for line in shown)


def test_what_does_not_match_is_an_error(inspect: Inspect) -> None:
    assert "the nearest is 'linear'" in inspect("--op", "linaer", fails=True)
    assert "--name nothing*" in inspect("--name", "nothing*", fails=True)
    assert "nothing matches" in inspect("--op", "embedding", "--layer", "1", fails=True)
    for part in ("--plan", "--weights", "--choices"):
        assert "--name nothing" in inspect(part, "--name", "nothing", fails=True)
        assert "nearest is 'linear'" in inspect(part, "--op", "linaer", fails=True)
    assert "--plan and --weights together" in inspect("--plan", "--weights", fails=True)


# The other parts.


def _stored_instructions(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    plan = json.loads((folder / "plan.json").read_text())["positions"]["all"]["plans"]["main"]
    return {
        (bucket["bucket"]["name"], index): one
        for bucket in plan["buckets"]
        for index, one in enumerate(bucket["instructions"])
    }


def test_the_plan(inspect: Inspect, folder: Path) -> None:
    stored = _stored_instructions(folder)
    found = json.loads(inspect("--plan", "--op", "paged_attention", "--json"))
    wanted = [key for key, one in stored.items() if one["target"] == "ingot.paged_attention"]
    assert [(one["bucket"], one["index"]) for one in found] == wanted and len(wanted) == 2 * LAYERS
    for one in found:
        assert stored[one.pop("bucket"), one.pop("index")] == one
    layer = json.loads(inspect("--plan", "--layer", "1", "--op", "paged_attention", "--json"))
    assert [one["args"][1] for one in layer] == [{"ref": "kv.1"}] * 2
    text = inspect("--plan", "--op", "paged_attention", "--layer", "1")
    assert text.count("ingot.paged_attention") == 2 and "%kv.1" in text and "KV cache" not in text
    # A region's call is found by what the region computes; results by their names in the plan.
    regions = json.loads(inspect("--plan", "--op", "silu_mul", "--json"))
    assert any(one["target"].startswith("exe.") for one in regions if one["bucket"] == "extend")
    named = json.loads(inspect("--plan", "--name", "tokens", "--json"))
    assert [one["results"] for one in named] == [["tokens"]] * 2
    assert "KV cache" in inspect("--plan")


def test_the_weights(inspect: Inspect, folder: Path) -> None:
    stored = json.loads((folder / "weights.json").read_text())
    layer = json.loads(inspect("--weights", "--layer", "0", "--json"))
    assert layer == {name: one for name, one in stored.items() if name.startswith("layers.0.") or name == "ropes.0"}
    linear = json.loads(inspect("--weights", "--op", "linear", "--name", "layers.0.*", "--json"))
    assert {name.removeprefix("layers.0.") for name in linear} >= {"attention.o.weight", "mlp.gate_up.bias"}
    assert not any("norm" in name for name in linear), "norms read those"
    assert json.loads(inspect("--weights", "--op", "embedding", "--json")).keys() == {"embed.weight"}
    text = inspect("--weights", "--layer", "0")
    assert f"{len(layer)} params" in text and "layers.1." not in text
    assert json.loads(inspect("--weights", "--json")) == stored


def test_the_choices(inspect: Inspect, folder: Path) -> None:
    stored = json.loads((folder / "choices.json").read_text())
    assert json.loads(inspect("--choices", "--json")) == stored
    found = json.loads(inspect("--choices", "--op", "linear", "--layer", "0", "--json"))
    by_program = {one["program"]: one for one in found if one["node"].startswith("linear")}
    assert by_program["decode"]["backend"] == "cpu" and by_program["extend"]["backend"] == "inductor"
    for one in found:
        cheapest = min(one["candidates"], key=one["candidates"].__getitem__)
        assert one["backend"] == cheapest
        assert (one["region"] is not None) == (one["backend"] == "inductor")
    refused = json.loads(inspect("--choices", "--op", "paged_attention", "--json"))[0]
    table = RefusalTable.model_validate(stored[refused["program"]]["refusals"])
    assert refused["refusals"] == [one.reason for one in table.refusals() if one.node == refused["node"]] != []
    text = inspect("--choices", "--name", "sample")
    assert "ingot.sample" in text and "inductor: " in text


def test_a_region(inspect: Inspect, folder: Path) -> None:
    found = json.loads(inspect("--region", "r1@extend", "--json"))[0]
    program = next(one for one in parse_programs((folder / "program.ir").read_text()) if one.bucket.name == "extend")  # type: ignore[union-attr]
    stored = _stored_instructions(folder)
    calls = [line for line in inspect("--program").splitlines() if " = region.r1(" in line]
    assert [call["text"] for call in found["calls"]] == calls and calls
    for call in found["calls"]:
        assert stored["extend", call["instruction"]]["target"] == f"exe.{found['executable']['id']}"
    assert found["body"].startswith("region r1 @inductor {\n  input in0") and found["body"].endswith("\n}\n")
    assert found["body"].count(" = ") == len(list(program.regions["r1"].body.calls()))
    assert all(
        (folder / "exe" / "cpu" / found["executable"]["id"] / name).is_file() for name in found["executable"]["files"]
    )
    text = inspect("--region", "r1")
    assert found["executable"]["id"] in text and "called by" in text and "silu_mul" in text
    fewer = inspect("--region", "r1", "--op", "silu_mul", "--layer", "0")
    assert "%silu_mul = " in fewer and "…" in fewer and fewer.count(", instruction ") == 1
    assert "r0@extend, r1@extend" in inspect("--region", "r9", fails=True)


def test_nothing_is_lost_without_a_trace(inspect: Inspect, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    from ingot import compile_model

    options: dict[str, Any] = {"backend": "reference", "max_batch": 2, "max_tokens": 32, "max_seq_len": 64}
    path = compile_model(checkpoint(NAME), tmp_path / "bare.ingot", **options, trace="none").output
    assert "passes not recorded: compile the model again with --trace full" in inspect(path=path)
    assert json.loads(inspect("--json", path=path))["passes"] is None
    assert inspect("--program", path=path) == inspect("--stage", "PLANNED", path=path)
    for part in (("--stage", "FUSED"), ("--pass", "cse")):
        assert "--trace full" in inspect(*part, fails=True, path=path)
    assert "ingot.linear" in inspect("--choices", "--op", "linear", path=path)
    assert "the program has no regions" in inspect("--region", "r0", fails=True, path=path)


def test_every_part_is_shown_without_torch(folder: Path) -> None:
    parts = [
        ["--program"],
        ["--region", "r0"],
        ["--choices"],
        ["--pass", "cse"],
        ["--layer", "1"],
        ["--plan", "--op", "linear"],
    ]
    code = (
        "import contextlib, io, sys, ingot.cli.main as cli\n"
        f"for part in {parts!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()):\n"
        f"        assert cli.run(cli.INGOT, ['inspect', {str(folder)!r}, *part]) == 0\n"
        "print('torch' in sys.modules, 'ingot.compile.driver' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_a_terminal_gets_colours_and_what_only_helps_is_dim(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    print_program_text("%a = ingot.linear(%b) : f32[T]\n%c = ingot.linear(%a) : f32[T]\n", dim=[True, False])
    first, second = capsys.readouterr().out.splitlines()
    assert "\x1b[2" in first and "\x1b[2" not in second and "\x1b[" in second
