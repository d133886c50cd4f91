"""A checkpoint whose config.json says that its weights are quantized is read by what knows how, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import some_tensors, write_checkpoint
from tiny import TINY

from ingot import compile_model
from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.quantized_checkpoints import READERS, find_reader
from ingot.ir import recipe
from ingot.ir.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, "is quantized by 'gptq'"),
        ("quantization_config", {"quant_method": "fp8"}, "is quantized by 'fp8'"),
        ("compression_config", {"quant_method": "compressed-tensors"}, "is quantized by 'compressed-tensors'"),
        ("quantization_config", {"bits": 4}, "has a quantization_config without a quant_method"),
        ("quantization_config", {"quant_method": 3}, "has a quantization_config without a quant_method"),
        ("quantization_config", {}, "has a quantization_config without a quant_method"),
        ("quantization_config", "awq", "has a quantization_config without a quant_method"),
    ],
)
def test_what_no_reader_knows_is_refused(tmp_path: Path, field: str, value: Any, problem: str) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    (folder / "config.json").write_text(json.dumps({field: value}))
    with pytest.raises(ConfigError) as caught:
        Checkpoint.open(folder)
    assert caught.value.what == f"the checkpoint {problem}, which cannot be read"
    assert caught.value.where == f"{folder / 'config.json'}, field '{field}'"
    assert caught.value.expected == "a checkpoint of floating point weights"
    assert "use the original checkpoint" in caught.value.hint


def test_the_weights_may_be_plain_numbers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    (folder / "config.json").write_text('{"quantization_config": null}')
    assert Checkpoint.open(folder).config == {"quantization_config": None}


def test_a_compile_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Over float tensors too: what they mean is for the configuration to say."""
    changes = {"quantization_config": {"quant_method": "awq"}}
    folder = TINY["llama-plain"].write(tmp_path / "checkpoint", **changes)
    with pytest.raises(ConfigError, match="is quantized by 'awq'"):
        compile_model(folder, tmp_path / "x.ingot", backend="reference")
    assert not (tmp_path / "x.ingot").exists()


def test_a_reader_is_found_by_its_method_and_named_to_others() -> None:
    readers = {**READERS, "toy": lambda described, name: recipe.source(f"{name}.{described['suffix']}")}
    reader = find_reader({"quantization_config": {"quant_method": "toy", "suffix": "q"}}, "config.json", readers)
    assert reader is not None and reader({"suffix": "q"}, "a") == recipe.source("a.q")
    with pytest.raises(ConfigError) as caught:
        find_reader({"quantization_config": {"quant_method": "other"}}, "config.json", readers)
    assert caught.value.expected == "quant_method 'toy' or a checkpoint of floating point weights"
