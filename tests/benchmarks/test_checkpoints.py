"""The checkpoints with random weights that benchmarks compile."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import config_of
from quantized_files import Written
from safetensors import safe_open
from staged import traced


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ("1b", 1235814400),
        ("8b", 8030261248),
        ("qwen3-0.6b", 596049920),
        ("qwen3-1.7b", 2031739904 - 151936 * 2048),  # its file repeats the embedding as the output layer
        ("gemma-3-4b", 3880263168),  # the file's 4300079472 less the 419816304 of what sees pictures
        ("gpt2-2.7b", 2651553280),
        ("phi-2", 2779683840),
        ("falcon-7b", 6921720704),
        ("qwen3-30b-a3b", 30532122624),
        ("gpt-oss-20b", 20914757184),  # as floats
        ("gpt-oss-120b", 116829156672),
        ("deepseek-v2-lite", 15706484224),
    ],
)
def test_shapes_have_the_published_number_of_parameters(benchmarks: None, shape: str, parameters: int) -> None:
    """As the metadata of the published safetensors say; of GPT-2's shape as its sizes do."""
    checkpoints = importlib.import_module("random_checkpoint")
    assert sum(map(math.prod, checkpoints.tensor_shapes(checkpoints.config_of(shape)).values())) == parameters


@pytest.mark.parametrize("shape", ["1b", "8b", "qwen3-0.6b", "qwen3-1.7b", "gemma-3-4b"])
def test_a_checkpoint_is_sane_and_the_same_again(
    benchmarks: None, shape: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoints = importlib.import_module("random_checkpoint")
    config = config_of(shape, vocab_size=2048)
    whole = tensors_of(checkpoints.write_checkpoint(tmp_path / "whole", config))
    monkeypatch.setattr(checkpoints, "_SHARD_BYTES", 50_000)
    shards = tensors_of(checkpoints.write_checkpoint(tmp_path / "shards", config))
    other = tensors_of(checkpoints.write_checkpoint(tmp_path / "other", config, seed=1))
    assert whole.keys() == shards.keys() and len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    for name, tensor in whole.items():
        assert tensor.equal(shards[name])
        if tensor.dim() == 2:
            assert tensor.float().std().item() == pytest.approx(tensor.shape[1] ** -0.5, rel=0.05)
            assert not tensor.equal(other[name])
    matrices = [tensor for tensor in whole.values() if tensor.dim() == 2]
    assert not any(a.shape == b.shape and a.equal(b) for a in matrices for b in matrices if a is not b)
    traced(json.loads((tmp_path / "whole" / "config.json").read_text()))


@pytest.mark.parametrize(("format", "relative"), [("int4_g128", 0.0), ("fp8", 2**-4), ("fp8_block128", 2**-4)])
def test_a_quantized_checkpoint_stands_for_the_rounded_weights(
    benchmarks: None, format: str, relative: float, tmp_path: Path
) -> None:
    """Errors are half a unit: of the greatest number of 128 in int4, and of three bits of mantissa in float8."""
    checkpoints = importlib.import_module("random_checkpoint")
    config = config_of(
        "1b", hidden_size=128, head_dim=32, intermediate_size=256, num_key_value_heads=4, num_hidden_layers=1
    )
    plain = tensors_of(checkpoints.write_checkpoint(tmp_path / "plain", config))
    request = Written(checkpoints.write_checkpoint(tmp_path / "stored", config, format=format), plain).request()
    request.trace()  # each stored tensor is read
    recipes = request.checkpoint.logical.recipes
    assert recipes.keys() == {name for name, tensor in plain.items() if ".layers." in name and tensor.dim() == 2}
    for name, recipe in recipes.items():
        wanted = plain[name].float()
        found = recipe.execute(request.checkpoint.read).float()
        groups = wanted.view(wanted.shape[0], -1, 128).abs().amax(2, keepdim=True).expand(-1, -1, 128)
        unit = groups.reshape(wanted.shape) / 7 * 1.01  # the scale in bf16 may be 2**-9 smaller
        allowed = unit * 0.51 if format == "int4_g128" else relative * wanted.abs() + 2**-9 * wanted.abs().max() / 448
        assert bool(((found - wanted).abs() <= allowed).all()) and not found.equal(wanted), name


def tensors_of(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    index = checkpoint / "model.safetensors.index.json"
    if index.exists():
        assert json.loads(index.read_text())["weight_map"].keys() == found.keys()
    return found
