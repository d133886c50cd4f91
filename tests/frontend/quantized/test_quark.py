"""Quark checkpoints, written to their specification."""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import Tensors, check_logits, formats_of, not_the_head, write_quantized

from ingot.ir.errors import CheckpointError, ConfigError

E4M3 = torch.float8_e4m3fn


def spec(dtype: str, qscheme: str, **fields: Any) -> dict[str, Any]:
    usual = {"ch_axis": 0, "group_size": None, "symmetric": True, "round_method": "half_even", "scale_type": "float"}
    return {"dtype": dtype, "qscheme": qscheme, "is_dynamic": False, "observer_cls": "Observer", **usual, **fields}


def config(weight: Any, inputs: Any = None, **fields: Any) -> dict[str, Any]:
    scheme = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None, "target_device": None}
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "global_quant_config": scheme,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        "algo_config": None,
        **fields,
    }


def fp8(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(E4M3)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.04)}, codes.float() * scale


FP8 = spec("fp8_e4m3", "per_tensor")


def test_fp8(tmp_path: Path) -> None:
    def rounds(_: str, x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor(0.04)
        return (x / scale).clamp(-448, 448).to(E4M3).to(x.dtype) * scale

    written = write_quantized(tmp_path / "m", config(FP8, FP8), not_the_head(fp8))
    assert "f8e4m3/*x*:f32/x=f8e4m3:static" in formats_of(check_logits(written, rounds))


def int8(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1) / 127
    q = (weight / scales[:, None]).round().to(torch.int8)
    return {"weight": q, "weight_scale": scales}, q.float() * scales[:, None]


def test_int8_and_a_module_of_its_own(tmp_path: Path) -> None:
    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return (fp8 if "down_proj" in module else int8)(module, weight)

    def rounds(name: str, x: torch.Tensor) -> torch.Tensor:
        if "down_proj" in name:
            return (x / torch.tensor(0.04)).clamp(-448, 448).to(E4M3).to(x.dtype) * torch.tensor(0.04)
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale

    inputs = spec("int8", "per_channel", is_dynamic=True, ch_axis=1)
    own = {"*.down_proj": {"weight": FP8, "input_tensors": FP8}}
    described = config(spec("int8", "per_channel"), inputs, layer_quant_config=own)
    written = write_quantized(tmp_path / "m", described, not_the_head(write))
    assert formats_of(check_logits(written, rounds)) == {"int8_w8a8", "f8e4m3/*x*:f32/x=f8e4m3:static"}


def test_mxfp4(tmp_path: Path) -> None:
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        blocks = weight.unflatten(1, (-1, 32))
        power = torch.floor(torch.log2(blocks.abs().amax(2, keepdim=True))) - 2
        codes = ((blocks / 2**power)[..., None] - numbers).abs().argmin(-1)
        flat = codes.flatten(1)
        parts = {"weight": (flat[:, 0::2] | flat[:, 1::2] << 4).to(torch.uint8)}
        parts["weight_scale"] = (power + 127).to(torch.uint8).squeeze(2)
        return parts, (numbers[codes] * 2**power).flatten(1)

    four = spec("fp4", "per_group", group_size=32, scale_format="e8m0", ch_axis=-1)
    written = write_quantized(tmp_path / "m", config(four), not_the_head(write))
    assert formats_of(check_logits(written)) == {"mxfp4"}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"global_quant_config": {"weight": spec("uint4", "per_group")}}, "the field 'dtype' of the quantization"),
        ({"global_quant_config": {"weight": spec("int8", "per_tensor", symmetric=False)}}, "the field 'symmetric'"),
        ({"global_quant_config": {"weight": {**FP8, "rank": 1}}}, "not understood: rank"),
        ({"kv_cache_quant_config": {"*k_proj": {}}}, "the field 'kv_cache_quant_config' of the quantization"),
        ({"layer_type_quant_config": {"Linear": {}}}, "the field 'layer_type_quant_config' of the quantization"),
    ],
)
def test_what_is_not_understood(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    written = write_quantized(tmp_path / "m", config(FP8, FP8, **fields), not_the_head(fp8))
    with pytest.raises(ConfigError) as caught:
        written.request()
    assert problem in caught.value.what


def test_an_excluded_module(tmp_path: Path) -> None:
    described = config(FP8, FP8, exclude=["*.up_proj", "lm_head"])
    written = write_quantized(tmp_path / "m", described, not_the_head(fp8))
    with pytest.raises(CheckpointError, match=r"up_proj is quantized, but the quantization_config excludes it"):
        written.request()
