"""`ingot check`: planted risks are found by pass, layer and tensor; healthy checkpoints have none."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from command_world import Command
from drawn import drawn
from rich.console import Console
from risky_weights import GATE, LARGE, RISKY, Risky, filled
from tiny import TINY

from ingot.cli.views.rounding import print_checks
from ingot.rounding.check import RoundingCheck, Score

pytestmark = [pytest.mark.xdist_group("cli"), pytest.mark.one_in_file(3)]

GAIN = "model.layers.1.self_attn.k_norm.weight"
PICO = Path(__file__).parents[2] / "models/pico"


@pytest.mark.parametrize("planted", RISKY)
def test_a_planted_risk_is_found_and_nothing_else(planted: str, tmp_path: Path, ingot: Command) -> None:
    risky = RISKY[planted]
    folder = risky.write(tmp_path / "risky")
    done = ingot("check", folder, "--target", "cpu", "--json", "--exit-code")
    assert done.code == 3, done.err
    found = [one for one in json.loads(done.out)[str(folder)]["scores"] if one["verdict"] == "risk"]
    assert {one["part"] for one in found} == {risky.part} and {one["pass"] for one in found} == risky.passes
    assert {one["tensor"] for one in found} == risky.tensors
    for one in found:
        assert one["largest"] >= one["score"] > 20  # far above 2, where a compile skips the fusion
        assert one["layer"] is None or f".{one['layer']}." in one["tensor"]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
@pytest.mark.parametrize("name", drawn(4, TINY))
def test_healthy_checkpoints_have_no_risk(name: str, dtype: str, tmp_path: Path, ingot: Command) -> None:
    folder = TINY[name].write(tmp_path / name)
    done = ingot("check", folder, "--target", "cpu", "--dtype", dtype, "--json", "--exit-code")
    assert done.code == 0, done.err
    scores = json.loads(done.out)[str(folder)]["scores"]
    assert scores and all(0 <= one["score"] < 1 and one["verdict"] != "risk" for one in scores)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("large", LARGE)
def test_large_weights_alone_are_no_risk(large: str, dtype: str, tmp_path: Path, ingot: Command) -> None:
    folder = LARGE[large].write(tmp_path / "large")
    assert ingot("check", folder, "--target", "cpu", "--dtype", dtype, "--exit-code").code == 0


def test_the_bundled_model_has_no_risk_and_says_what_has_no_score(ingot: Command) -> None:
    done = ingot("check", PICO, "--target", "cpu", "--exit-code")
    assert done.code == 0 and "\nNo risks\n" in done.out and "near a risk" not in done.out
    said = [line for line in done.out.splitlines() if "not scored: " in line]
    assert "16 matmuls" in said[0] and "layers.*.attention.o.weight, layers.*.mlp.down.weight" in said[0]
    assert "choose-layouts" in said[1] and "select-rows-early" in said[1] and "merge-linears" not in said[1]


def test_quantizing_has_no_score(ingot: Command) -> None:
    done = ingot("check", PICO, "--target", "cpu", "--passes", "default,quantize{format=int8}", "--json")
    assert any("quantize" in one for one in json.loads(done.out)[str(PICO)]["unscored"]), done.err


def test_several_checkpoints_share_a_table(tmp_path: Path, ingot: Command) -> None:
    healthy, risky = (
        TINY["llama-plain"].write(tmp_path / "healthy"),
        RISKY["columns of the head"].write(tmp_path / "risky"),
    )
    done = ingot("check", healthy, risky, "--target", "cpu")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].split() == ["pass", "part", str(healthy), str(risky)]
    (logits,) = (line.split() for line in lines if line.split()[:2] == ["form-regions", "logits"])
    assert float(logits[2]) < 1 and float(logits[3]) > 2
    assert "1 risk" in lines and "Above 2, a compile skips the fusion." in done.out
    assert lines[-1].split()[:5] == [str(risky), "form-regions", "–", "logits", "lm_head.weight"]


def test_fusions_that_break_the_contract_on_a_sample_are_listed_as_near() -> None:
    scores = (
        Score("merge-linears", "main", "feed-forward", 2, 0.9, 1.5, GATE),
        Score("merge-linears", "main", "feed-forward", 1, 2.5, 2.6, GATE),
        Score("form-regions", "main", "feed-forward", 2, 0.8, 1.0),
    )
    check = RoundingCheck(scores, ("main: this and that",))
    assert [one["verdict"] for one in check.to_json()["scores"]] == ["near", "risk", "ok"]
    assert [one.layer for one in check.risks] == [1]
    out = io.StringIO()
    other = RoundingCheck(scores[2:], ("main: this and that", "main: other"))
    print_checks(Console(file=out, width=200), {"a": check, "b": other})
    text = out.getvalue()
    assert "\nnot scored: main: this and that\nb: not scored: main: other\n" in text
    assert "\n1 risk\n" in text and "\n1 near a risk: " in text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "22 of 22 elements of the tensor 'model.layers.1.self_attn.k_norm.weight' are not finite"),
        (float("inf"), "22 of 22 elements of the tensor 'model.layers.1.self_attn.k_norm.weight' are not finite"),
        (0.0, "all 22 elements of the tensor 'model.layers.1.self_attn.k_norm.weight', the gain of a norm, are zero"),
    ],
)
def test_tensors_that_no_score_can_be_computed_with(value: float, said: str, tmp_path: Path, ingot: Command) -> None:
    healthy = TINY["llama-plain"].write(tmp_path / "healthy")
    bad = Risky("qwen3-plain", filled({GAIN: value}), "", frozenset(), frozenset()).write(tmp_path / "bad")
    done = ingot("check", healthy, bad, "--target", "cpu")
    assert (done.code, done.out) == (2, "")
    assert f"error: {said}" in done.err and f"where:    {bad}, param 'layers.1.attention.k_norm.weight'" in done.err
    assert "expected: " in done.err and "to do:    download or convert the checkpoint again" in done.err


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (None, "there is no folder"),
        ("README.md", "found there: README.md"),
        ("model-Q4_K_M.gguf", "model-Q4_K_M.gguf is not a valid GGUF file"),
        ("adapter_config.json", "this is an adapter: compile its base model with --adapter"),
    ],
)
def test_folders_that_are_no_checkpoint(file: str | None, said: str, tmp_path: Path, ingot: Command) -> None:
    healthy, bad = TINY["llama-plain"].write(tmp_path / "healthy"), tmp_path / "bad"
    if file is not None:
        bad.mkdir()
        (bad / file).write_text("{}")
    done = ingot("check", healthy, bad, "--target", "cpu")
    assert (done.code, done.out) == (2, "") and said in done.err and str(bad) in done.err


def test_no_checkpoint_and_one_given_twice(tmp_path: Path, ingot: Command) -> None:
    healthy = TINY["llama-plain"].write(tmp_path / "healthy")
    assert "error: no checkpoint to check" in ingot("check").err
    twice = ingot("check", healthy, healthy)
    assert twice.code == 2 and f"'{healthy}' is given twice" in twice.err


def test_a_tensor_that_is_missing(tmp_path: Path, ingot: Command) -> None:
    from safetensors.torch import load_file, save_file

    folder = TINY["qwen3-plain"].write(tmp_path / "short")
    tensors = load_file(folder / "model.safetensors")
    del tensors[GAIN]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    done = ingot("check", folder, "--target", "cpu")
    assert done.code == 2 and GAIN in done.err and str(folder) in done.err


def test_passes_that_do_not_run_are_not_scored(tmp_path: Path, ingot: Command) -> None:
    folder = TINY["llama-plain"].write(tmp_path / "healthy")
    done = ingot("check", folder, "--target", "cpu", "--passes", "default,-merge-linears", "--json")
    names = {one["pass"] for one in json.loads(done.out)[str(folder)]["scores"]}
    assert "merge-linears" not in names and "form-regions" in names
