"""`ingot export`: its output, as text and as JSON, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_world import Command, World


def test_weights(ingot: Command, world: World, tmp_path: Path) -> None:
    done = ingot("export", world.artifact, tmp_path / "out", "--to", "safetensors")
    assert done.code == 0, done.err
    assert "weights/00000.safetensors" in done.out and f"Wrote {tmp_path / 'out'}" in done.out.replace("\n", "")
    assert (tmp_path / "out" / "weights.json").is_file()


def test_onnx_as_json(ingot: Command, world: World, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    done = ingot("export", world.checkpoint, tmp_path / "out", "--to", "onnx", "--max-seq-len", 64, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert {"model.onnx", "model.onnx.data", "genai_config.json", "tokenizer.json"} <= found["files"].keys()
    for name, size in found["files"].items():
        assert (tmp_path / "out" / name).stat().st_size == size
    config = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert config["model"]["context_length"] == config["search"]["max_length"] == 64


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--to", "gguf"), "gguf"),
        (("--to", "onnx", "--dtype", "int8"), "int8"),
        (("--to", "onnx", "--quantize", "int3"), "int3"),
        (("--to", "torch", "--entry", "pooled"), "no entry 'pooled'"),
        (("--to", "safetensors", "--mesh", "tp"), "tp"),
        ((), "--to"),
    ],
)
def test_bad_input(ingot: Command, world: World, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = ingot("export", world.checkpoint, tmp_path / "out", *arguments)
    assert done.code == 2 and said in done.err
    assert list(tmp_path.iterdir()) == []
