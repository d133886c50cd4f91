"""Native FP8 checkpoints: per tensor, per channel and by blocks, with static and dynamic activations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import (
    UP,
    Tensors,
    Write,
    Written,
    adopted,
    check_bits,
    check_logits,
    formats_of,
    not_the_head,
    with_part,
    write_quantized,
)

from ingot.ir.errors import CheckpointError, ConfigError

E4M3 = torch.float8_e4m3fn


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(E4M3).to(x.dtype) * scale


def per_tensor(static: bool) -> Write:
    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(E4M3)
        parts = {"weight": codes, "weight_scale": scale}
        if static:
            parts["input_scale"] = torch.tensor(0.03 if "o_proj" in module else 0.05)
        return parts, codes.float() * scale

    return write


def by_blocks(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Blocks of 64 x 64."""
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // 64), -(-columns // 64))
    codes, found = torch.zeros_like(weight).to(E4M3), torch.zeros_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(64 * i, 64 * i + 64), slice(64 * j, 64 * j + 64)
            scales[i, j] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[i, j]).to(E4M3)
            found[place] = codes[place].float() * scales[i, j]
    return {"weight": codes, "weight_scale_inv": scales}, found


DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
STATIC = {**DYNAMIC, "activation_scheme": "static", "ignored_layers": ["lm_head"], "modules_to_not_convert": None}
BLOCKS = {**DYNAMIC, "weight_block_size": [64, 64], "fmt": "e4m3"}


@pytest.fixture
def static(tmp_path: Path) -> Written:
    return write_quantized(tmp_path / "m", STATIC, not_the_head(per_tensor(True)))


@pytest.fixture
def blocks(tmp_path: Path) -> Written:
    return write_quantized(tmp_path / "m", BLOCKS, not_the_head(by_blocks))


def test_dynamic(tmp_path: Path) -> None:
    written = write_quantized(tmp_path / "m", DYNAMIC, not_the_head(per_tensor(False)))
    program = check_logits(written, lambda _, x: rounded(x, x.abs().amax(-1, keepdim=True) / 448))
    assert formats_of(program) == {"fp8", "fp8_per_channel_per_token"}


def test_static(static: Written) -> None:
    program = check_logits(static, lambda name, x: rounded(x, torch.tensor(0.03 if "o_proj" in name else 0.05)))
    assert formats_of(program) == {"f8e4m3/*x*:f32/x=f8e4m3:static", "f8e4m3/1x*:f32/x=f8e4m3:static"}


def test_blocks(blocks: Written) -> None:
    def rounds(_: str, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, 64))
        return rounded(groups, groups.abs().amax(-1, keepdim=True) / 448).flatten(-2)

    program = check_logits(blocks, rounds)
    assert formats_of(program) == {"f8e4m3/64x64:f32/x=f8e4m3:64"}


def test_blocks_of_the_usual_size_are_a_preset(tmp_path: Path) -> None:
    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes = weight.to(E4M3)
        rows, columns = weight.shape
        scales = torch.full((-(-rows // 128), -(-columns // 128)), 2.0)
        return {"weight": codes, "weight_scale_inv": scales.to(torch.bfloat16)}, codes.float() * 2

    written = write_quantized(tmp_path / "m", {**BLOCKS, "weight_block_size": [128, 128]}, not_the_head(write))
    check_bits(written)
    program, records = adopted(written)
    assert formats_of(program) == {"fp8_block128"}
    assert [one.reason for one in records["merge-linears"].refusals] == [
        "64 rows of a weight are no multiple of the 128 that share a scale"
    ]


def test_e8m0_scales(tmp_path: Path) -> None:
    """A NaN among powers of two is an error; the smallest of them is none."""

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales = weight.to(E4M3), torch.tensor([[2.0**-3, 2.0**-127]] * 2)[: weight.shape[0] // 64]
        scales = torch.full((-(-weight.shape[0] // 64), -(-weight.shape[1] // 64)), 2.0**-3)
        scales[0, 1] = 2.0**-127
        full = scales.repeat_interleave(64, 0).repeat_interleave(64, 1)[: weight.shape[0], : weight.shape[1]]
        return {"weight": codes, "weight_scale_inv": scales.to(torch.float8_e8m0fnu)}, codes.float() * full

    written = write_quantized(tmp_path / "m", {**BLOCKS, "scale_fmt": "ue8m0"}, not_the_head(write))
    request = check_bits(written)
    name = "model.layers.0.mlp.up_proj"

    def spoil(tensors: Tensors) -> None:
        bits = tensors[f"{name}.weight_scale_inv"].view(torch.uint8).clone()
        bits[1, 0] = 255
        tensors[f"{name}.weight_scale_inv"] = bits.view(torch.float8_e8m0fnu)

    request = written.rewrite(spoil).request()
    with pytest.raises(CheckpointError, match=r"1 of 8 scales are NaN or infinite, the first at \[1, 0\]") as caught:
        request.checkpoint.logical.recipes[f"{name}.weight"].execute(request.checkpoint.read)
    assert f"{name}.weight_scale_inv" in caught.value.where


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (with_part("weight_scale", None), f"the checkpoint lacks {UP}.weight_scale"),
        (with_part("input_scale", None), f"the checkpoint lacks {UP}.input_scale"),
        (with_part("weight_scale", torch.ones(3)), f"the tensor {UP}.weight_scale is float32 [3]"),
        (with_part("weight_scale", torch.ones((), dtype=torch.int32)), f"the tensor {UP}.weight_scale is int32 []"),
        (with_part("input_scale", torch.tensor(0.0)), f"the tensor {UP}.input_scale is 0.0"),
        (with_part("input_scale", torch.tensor(1e-40)), f"the tensor {UP}.input_scale is"),
        (with_part("input_scale", torch.tensor(torch.nan)), f"the tensor {UP}.input_scale is nan"),
        (with_part("weight", torch.zeros(4, 128)), "weight_scale []"),
        (with_part("other_scale", torch.ones(1)), f"{UP}.other_scale [1]"),
    ],
)
def test_tensors_that_do_not_fit(static: Written, edit: Any, problem: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        static.rewrite(edit).request().trace()
    assert problem in str(caught.value)


@pytest.mark.parametrize(("value", "kind"), [(0.0, "zero"), (torch.nan, "NaN"), (1e-40, "subnormal")])
def test_scales_that_are_no_scales(static: Written, value: float, kind: str) -> None:
    request = static.rewrite(with_part("weight_scale", torch.tensor(value))).request()
    with pytest.raises(CheckpointError, match=f"1 of 1 scales are {kind}"):
        request.checkpoint.logical.recipes[f"{UP}.weight"].execute(request.checkpoint.read)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"activation_scheme": "sometimes"}, "the field 'activation_scheme' of the quantization is 'sometimes'"),
        ({"fmt": "e5m2"}, "the field 'fmt' of the quantization is 'e5m2'"),
        ({"weight_block_size": [128]}, "the field 'weight_block_size' of the quantization is [128]"),
        ({"weight_block_size": [128, 128]}, "is 'static' with blocks of weights"),
        ({"rotation": "hadamard"}, "the quantization has fields that are not understood: rotation"),
        ({"ignored_layers": "lm_head"}, "the field 'ignored_layers' of the quantization is 'lm_head'"),
    ],
)
def test_fields_that_are_not_understood(static: Written, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        static.rewrite(lambda tensors: None, **fields).request()
    assert problem in caught.value.what and "field 'quantization_config'" in caught.value.where


def test_an_excluded_module_that_is_quantized(static: Written) -> None:
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is quantized, but the quantization_config excludes it"):
        static.rewrite(lambda tensors: None, ignored_layers=["up_proj"]).request()
