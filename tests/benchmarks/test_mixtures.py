"""Mixtures of experts: the tensors of their checkpoints, the experts that tokens choose, and the bytes of a step."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from benchmark_scripts import mixture_of
from drawn import drawn_in_one_of
from quantized_files import Written
from safetensors.torch import load_file

from ingot import compile_model

SHAPES = ("gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b", "deepseek-v2-lite")
LAYER = "model.layers.1.mlp"


@pytest.mark.parametrize(
    ("shape", "tensors", "total"),
    [
        ("gpt-oss-20b", 459, 13761264768),
        ("gpt-oss-120b", 687, 65248815744),
        ("qwen3-30b-a3b", 18867, 61064245248),
        ("deepseek-v2-lite", 5291, 31412968448),
    ],
)
def test_full_shapes_are_stored_as_published(benchmarks: None, shape: str, tensors: int, total: int) -> None:
    """The number of tensors and their bytes, as the published model.safetensors.index.json has them."""
    found = stored_types(importlib.import_module("random_checkpoint").config_of(shape))
    assert len(found) == tensors
    assert sum(math.prod(shape) * dtype.itemsize for shape, dtype in found.values()) == total


def test_experts_have_the_published_tensors(benchmarks: None) -> None:
    """Names, shapes and dtypes as the headers of the published files have them."""
    config_of = importlib.import_module("random_checkpoint").config_of
    gpt_oss = stored_types(config_of("gpt-oss-20b"))
    experts = {name: of for name, of in gpt_oss.items() if name.startswith(f"{LAYER}.experts")}
    bf16, u8 = torch.bfloat16, torch.uint8
    assert experts == {
        f"{LAYER}.experts.gate_up_proj_blocks": ((32, 5760, 90, 16), u8),
        f"{LAYER}.experts.gate_up_proj_scales": ((32, 5760, 90), u8),
        f"{LAYER}.experts.gate_up_proj_bias": ((32, 5760), bf16),
        f"{LAYER}.experts.down_proj_blocks": ((32, 2880, 90, 16), u8),
        f"{LAYER}.experts.down_proj_scales": ((32, 2880, 90), u8),
        f"{LAYER}.experts.down_proj_bias": ((32, 2880), bf16),
    }
    assert gpt_oss["model.layers.23.self_attn.sinks"] == ((64,), bf16)
    assert gpt_oss["model.layers.0.mlp.router.bias"] == ((32,), bf16)
    large = stored_types(config_of("gpt-oss-120b"))
    assert large[f"{LAYER}.experts.gate_up_proj_blocks"] == ((128, 5760, 90, 16), u8)
    assert large["model.layers.35.self_attn.sinks"] == ((64,), bf16)
    for shape, count, width in (("qwen3-30b-a3b", 128, 768), ("deepseek-v2-lite", 64, 1408)):
        found = stored_types(config_of(shape))
        assert found[f"{LAYER}.experts.{count - 1}.up_proj.weight"] == ((width, 2048), bf16)
        assert found[f"{LAYER}.experts.0.down_proj.weight"] == ((2048, width), bf16)
        assert found[f"{LAYER}.gate.weight"] == ((count, 2048), bf16)
        assert f"{LAYER}.experts.{count}.up_proj.weight" not in found


def stored_types(config: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each stored tensor. One expert of a stack is quantized, and stands for the others."""
    checkpoints, found = importlib.import_module("random_checkpoint"), {}
    for name, shape in checkpoints.tensor_shapes(config).items():
        stack = len(shape) == 3
        weight = torch.empty((1, *shape[1:]) if stack else shape, dtype=torch.bfloat16, device="meta")
        for stored, tensor in checkpoints.stored_tensors(config, name, weight).items():
            found[stored] = ((shape[0], *tensor.shape[1:]) if stack else tuple(tensor.shape), tensor.dtype)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_each_tensor_of_a_checkpoint_is_read(benchmarks: None, shape: str, tmp_path: Path) -> None:
    checkpoints = importlib.import_module("random_checkpoint")
    config = mixture_of(shape, layers=3)
    folder = checkpoints.write_checkpoint(tmp_path / "whole", config)
    Written(folder, {}).request().trace()
    tensors = load_file(folder / "model.safetensors")
    types = stored_types(config)
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == types
    drawn = [tensor.float() for name, tensor in tensors.items() if "norm" not in name]
    assert all(tensor.std() > 0 for tensor in drawn)
    same = [(a, b) for index, a in enumerate(drawn) for b in drawn[:index] if a.shape == b.shape and a.equal(b)]
    assert not same


def test_mxfp4_stands_for_the_drawn_weights(benchmarks: None, tmp_path: Path) -> None:
    """A number of a block is less than half a step of e2m1 from the drawn one, or a quarter of it for the greatest."""
    checkpoints = importlib.import_module("random_checkpoint")
    config = mixture_of("gpt-oss-20b", layers=1)
    floats = {name: value for name, value in config.items() if name != "quantization_config"}
    plain = load_file(checkpoints.write_checkpoint(tmp_path / "plain", floats) / "model.safetensors")
    request = Written(checkpoints.write_checkpoint(tmp_path / "stored", config), plain).request()
    recipes = request.checkpoint.logical.recipes
    assert len(recipes) == 2 * 8
    for name, recipe in recipes.items():
        layer, _, rest = name.partition(".experts.")
        expert, projection, _ = rest.split(".")
        wanted = plain[f"{layer}.experts.{projection}"][int(expert)].t().float()
        found = recipe.execute(request.checkpoint.read).float()
        groups = wanted.reshape(wanted.shape[0], -1, 32)
        unit = 2 ** (groups.abs().amax(2, keepdim=True).log2().floor() - 2)  # the greatest number has 4 to 8 units
        error = (found.reshape(groups.shape) - groups).abs()
        assert bool((error <= torch.maximum(unit / 4, groups.abs() / 4)).all()) and not found.equal(wanted), name
    shared = plain.keys() - {name for name in plain if ".experts." in name and not name.endswith("bias")}
    stored = load_file(tmp_path / "stored" / "model.safetensors")
    assert all(stored[name].equal(plain[name]) for name in shared)


@pytest.mark.parametrize("shape", drawn_in_one_of(2, SHAPES))
def test_a_mixture_is_measured_by_the_experts_that_it_reads(
    shape: str,
    results: ModuleType,
    call: Callable[..., None],
    committed: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """By a clock of our own, on which each output takes longer than the last one: a machine may be busy."""
    checkpoints, mixtures = (importlib.import_module(name) for name in ("random_checkpoint", "mixtures"))
    config = mixture_of(shape, vocab_size=2048)
    checkpoint = checkpoints.write_checkpoint(tmp_path / "checkpoint", config)
    artifact = tmp_path / "tiny.ingot"
    compile_model(checkpoint, artifact, backend="reference", target="cpu", max_seq_len=160, max_batch=8)
    clock = (number**2 for number in itertools.count())
    monkeypatch.setattr(importlib.import_module("decode_method"), "time", SimpleNamespace(perf_counter=clock.__next__))
    less = ("--long", 20, "--short", 4, "--tries", 1)
    call("decode", artifact, "--batch", "1,8", *less, "--json", tmp_path / "found.json")
    figures = results.read_result(tmp_path / "found.json").figures
    even = mixtures.expected_different(8, 2, 8)
    assert figures["batch_1_experts"].value == figures["batch_1_experts_even"].value == 2
    assert figures["batch_8_experts_even"].value == even
    different = figures["batch_8_experts"].value
    assert 0.8 * even < different <= 8 and "the mean of 2 recorded steps" in figures["batch_8_experts"].what
    # The weights of a step, by the sizes of the stored tensors. GPT-OSS computes with norms in float32.
    sizes = {name: math.prod(of) * dtype.itemsize for name, (of, dtype) in stored_types(config).items()}
    chosen = sum(size for name, size in sizes.items() if ".experts." in name)
    others = sum(sizes.values()) - chosen - sizes["model.embed_tokens.weight"]
    for batch, count in ((1, 2), (8, different)):
        assert figures[f"batch_{batch}_weights"].value == pytest.approx(others + chosen * count / 8, rel=5e-3)


def test_experts_of_even_choices(benchmarks: None) -> None:
    """Against choices drawn at random."""
    expected = importlib.import_module("mixtures").expected_different
    assert expected(128, 8, 1) == 8 and expected(4, 4, 3) == 4
    draws = torch.rand(400, 32, 128, generator=torch.Generator().manual_seed(0)).topk(8).indices
    mean = sum(len(step.unique()) for step in draws) / 400
    assert expected(128, 8, 32) == pytest.approx(mean, rel=0.01)
