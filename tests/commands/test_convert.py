"""`ingot convert`: its output, as text and as JSON, and its errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from calibrated_model import MODEL, write_text
from command_world import Command, write_tokenizer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convert") / "source"
    replace(MODEL, config={**MODEL.config, "attention_bias": False, "num_hidden_layers": 1}).write(folder)
    write_tokenizer(folder)
    write_text(folder / "words.txt", words=100)
    return folder


def test_perplexities_are_printed(ingot: Command, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    given = ("--calibrate", source / "words.txt", "--max-seq-len", 64)
    done = ingot("convert", source, output, "--to", "mla", "--rank", 20, "--rope-dim", 16, "--freqfold", 2, *given)
    assert done.code == 0, done.err
    for said in (
        "LlamaMLAForCausalLM",
        "after rotation",
        "after rope cut",
        "after rank cut",
        "cache 56 %",
        "words.txt",
    ):
        assert said in done.out
    assert {path.name for path in output.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_as_json(ingot: Command, source: Path, tmp_path: Path) -> None:
    given = ("--calibrate", source / "words.txt", "--max-seq-len", 64)
    done = ingot("convert", source, tmp_path / "out", "--to", "mla", "--keep-all", "--json", *given)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["rank"], found["rope_dim"], found["freqfold"]) == (32, 32, 1)
    assert found["output"] == str(tmp_path / "out") and found["held_out"] > 200
    assert [gate["name"] for gate in found["gates"]] == ["source", "rotation"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--to", "gqa"), "gqa"),
        (("--to", "mla"), "--rank"),
        (("--to", "mla", "--rank", 8, "--rope-dim", 5), "--rope-dim 5"),
        (("--to", "mla", "--rank", 8, "--dtype", "int8"), "int8"),
        ((), "--to"),
    ],
)
def test_bad_input(ingot: Command, source: Path, tmp_path: Path, arguments: tuple[object, ...], said: str) -> None:
    done = ingot("convert", source, tmp_path / "out", *arguments)
    assert done.code == 2 and said in done.err
    assert [*tmp_path.iterdir()] == []
