"""`ingot inspect`: every view, as text and as JSON, tells what the artifact's files hold."""

from __future__ import annotations

import json

import pytest
from command_world import Command, World

pytestmark = pytest.mark.xdist_group("cli")


def test_inspect_summary(world: World, ingot: Command) -> None:
    done = ingot("inspect", world.artifact)
    assert (done.code, done.err) == (0, "")
    for text in ("Qwen3ForCausalLM (qwen3), f32", "max_seq_len 64, max_batch 4, max_tokens 32", "merge-linears", "any"):
        assert text in done.out
    assert all(line == line.rstrip() for line in done.out.splitlines())
    assert "seconds  process at most\n" in done.out, "resident memory is the process's, and no pass's own"
    answer = json.loads(ingot("inspect", world.artifact, "--json").out)
    assert answer["identities"]["build_id"] in done.out and answer["identities"]["build_id"] in world.compiled.out
    assert list(answer) == [
        "path",
        "name",
        "hub",
        "schema_version",
        "model",
        "target",
        "tried",
        "variants",
        "versions",
        "tokenizer",
        "identities",
        "buckets",
        "executables",
        "nodes_per_backend",
        "bytes",
        "skipped_fusions",
        "quantization",
        "caches",
        "passes",
    ]
    assert answer["tokenizer"] is True and answer["hub"] is None
    assert answer["bytes"]["total"] == sum(file.stat().st_size for file in world.artifact.rglob("*") if file.is_file())
    assert sum(answer["nodes_per_backend"].values()) == sum(one["instructions"] for one in answer["buckets"])
    assert all(one["seconds"] is not None for one in answer["passes"])


def test_inspect_stages_and_passes(world: World, ingot: Command) -> None:
    from ingot.ir.parse import parse_program
    from ingot.ir.program import Stage

    passes = json.loads(ingot("inspect", world.artifact, "--json").out)["passes"]
    for name in dict.fromkeys(["TRACED", *(one["stage"] for one in passes)]):
        assert parse_program(ingot("inspect", world.artifact, "--stage", name.lower()).out).stage is Stage[name]
    for one in passes:
        as_json = json.loads(ingot("inspect", world.artifact, "--pass", one["name"], "--json").out)
        runs = [run for run in passes if run["name"] == one["name"]]
        assert list(as_json) == [run["bucket"] or (run["stage"] if len(runs) > 1 else "") for run in runs]
        for run, text in zip(runs, as_json.values(), strict=True):
            assert parse_program(text).stage <= Stage[run["stage"]]
        assert ingot("inspect", world.artifact, "--pass", one["name"]).out == "".join(as_json.values())
    assert "ingot.add_rms_norm" in ingot("inspect", world.artifact, "--pass", "fuse-add-rms-norm").out


def test_inspect_plan_and_weights(world: World, ingot: Command) -> None:
    plan = ingot("inspect", world.artifact, "--plan").out.splitlines()
    assert plan[0].split() == ["bucket", "#", "target", "backend", "arguments", "results", "frees"]
    assert plan[1].split()[:4] == ["any", "0", "ingot.feed", "reference"]
    assert any("kv.0!" in line for line in plan)
    stored = json.loads((world.artifact / "plan.json").read_text())
    assert json.loads(ingot("inspect", world.artifact, "--plan", "--json").out) == stored
    weights = ingot("inspect", world.artifact, "--weights").out
    assert "layers.0.mlp.gate_up.weight" in weights and "weights/00000.safetensors@" in weights and "concat(" in weights
    stored = json.loads((world.artifact / "weights.json").read_text())
    assert json.loads(ingot("inspect", world.artifact, "--weights", "--json").out) == stored
