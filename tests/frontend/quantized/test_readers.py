"""A checkpoint whose config.json says that its weights are quantized is read by what knows how, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import some_tensors, write_checkpoint
from tiny import TINY

from ingot import compile_model
from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.quantized.fields import Fields
from ingot.frontend.quantized.readers import READERS, find_reader
from ingot.frontend.quantized.stored import Logical, Stored
from ingot.ir import recipe
from ingot.ir.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("quantization_config", {"quant_method": "aqlm", "bits": 4}, "is quantized by 'aqlm'"),
        ("compression_config", {"quant_method": "hqq"}, "is quantized by 'hqq'"),
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
    assert caught.value.expected.startswith("quant_method 'fp8' or ")
    assert caught.value.expected.endswith(" or a checkpoint of floating point weights")
    assert "use the original checkpoint" in caught.value.hint


def test_the_weights_may_be_plain_numbers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    (folder / "config.json").write_text('{"quantization_config": null}')
    assert Checkpoint.open(folder).config == {"quantization_config": None}


def test_a_compile_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Over float tensors too: what they mean is for the configuration to say."""
    changes = {"quantization_config": {"quant_method": "vptq"}}
    folder = TINY["llama-plain"].write(tmp_path / "checkpoint", **changes)
    with pytest.raises(ConfigError, match="is quantized by 'vptq'"):
        compile_model(folder, tmp_path / "x.ingot", backend="reference")
    assert not (tmp_path / "x.ingot").exists()


def test_a_reader_is_found_by_its_method_and_named_to_others() -> None:
    def toy(fields: Fields) -> Callable[[Stored], Logical]:
        fields.skip("quant_method")
        fields.end()
        return lambda stored: Logical(stored.tensors, {"a": recipe.source("a.q")})

    readers = {**READERS, "toy": toy}
    reader = find_reader({"quantization_config": {"quant_method": "toy"}}, "config.json", readers)
    assert reader is not None
    assert reader(Stored({}, lambda name: torch.ones(1), "")).recipes == {"a": recipe.source("a.q")}
    with pytest.raises(ConfigError) as caught:
        find_reader({"quantization_config": {"quant_method": "other"}}, "config.json", readers)
    assert "quant_method 'toy'" in caught.value.expected
    with pytest.raises(ConfigError, match="fields that are not understood: suffix"):
        find_reader({"quantization_config": {"quant_method": "toy", "suffix": "q"}}, "config.json", readers)
