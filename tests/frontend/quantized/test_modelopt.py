"""ModelOpt and FBGEMM checkpoints, written to their specification: nested and flat JSON, FP8, NVFP4 and MXFP8."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import Tensors, Written, check_logits, formats_of, not_the_head, write_quantized

from ingot.ir.errors import CheckpointError, ConfigError

E4M3 = torch.float8_e4m3fn
UP = "model.layers.0.mlp.up_proj"
FLAT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "ignore": ["lm_head"],
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}


def nested(algorithm: str, **fields: Any) -> dict[str, Any]:
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head*"], **fields}
    return {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "quantization": quantization}


def fp8(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(E4M3)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.04)}, codes.float() * scale


def fp8_input(_: str, x: torch.Tensor) -> torch.Tensor:
    scale = torch.tensor(0.04)
    return (x / scale).clamp(-448, 448).to(E4M3).to(x.dtype) * scale


@pytest.mark.parametrize("described", [FLAT, nested("FP8")], ids=["flat", "nested"])
def test_fp8(tmp_path: Path, described: dict[str, Any]) -> None:
    written = write_quantized(tmp_path / "m", described, not_the_head(fp8))
    assert "f8e4m3/*x*:f32/x=f8e4m3:static" in formats_of(check_logits(written, fp8_input))


def test_the_description_in_a_file_of_its_own(tmp_path: Path) -> None:
    written = write_quantized(tmp_path / "m", FLAT, not_the_head(fp8))
    config = json.loads((written.folder / "config.json").read_text())
    del config["quantization_config"]
    (written.folder / "config.json").write_text(json.dumps(config))
    own = {name: value for name, value in nested("FP8").items() if name != "quant_method"}
    (written.folder / "hf_quant_config.json").write_text(json.dumps(own))
    request = written.request()
    request.trace()
    assert len(request.checkpoint.logical.recipes) == 7
    (written.folder / "hf_quant_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json is not JSON"):
        written.request()


NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nvfp4(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    outer = weight.abs().max() / (448 * 6)
    blocks = weight.unflatten(1, (-1, 16))
    scales = (blocks.abs().amax(2) / 6 / outer).to(E4M3)
    each = (scales.float() * outer)[..., None]
    codes = ((blocks / each)[..., None] - NUMBERS).abs().argmin(-1).flatten(1)
    parts = {
        "weight": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": outer,
        "input_scale": torch.tensor(1 / 32),
    }
    return parts, (NUMBERS[codes].unflatten(1, (-1, 16)) * each).flatten(1)


def test_nvfp4(tmp_path: Path) -> None:
    """The global scale multiplies here, and divides in compressed-tensors."""

    def rounds(_: str, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.cat([NUMBERS[9:].flip(0), NUMBERS[:8]]).double()
        blocks = x.unflatten(-1, (-1, 16))
        scale = (blocks.abs().amax(-1, keepdim=True) / 6 * 32).to(E4M3).double() / 32
        return (numbers[((blocks / scale)[..., None] - numbers).abs().argmin(-1)] * scale).flatten(-2)

    written = write_quantized(tmp_path / "m", nested("NVFP4", group_size=16), not_the_head(nvfp4))
    check_logits(written, rounds)


def test_nvfp4_of_weights_alone(tmp_path: Path) -> None:
    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts, floats = nvfp4(module, weight)
        return {name: part for name, part in parts.items() if name != "input_scale"}, floats

    written = write_quantized(tmp_path / "m", nested("NVFP4"), not_the_head(write))
    assert "nvfp4" in formats_of(check_logits(written))


def test_mxfp8(tmp_path: Path) -> None:
    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        blocks = weight.unflatten(1, (-1, 32))
        power = torch.floor(torch.log2(blocks.abs().amax(2, keepdim=True))) - 8
        codes = (blocks / 2**power).clamp(-448, 448).to(E4M3)
        parts = {"weight": codes.flatten(1), "weight_scale": (power + 127).to(torch.uint8).squeeze(2)}
        return parts, (codes.float() * 2**power).flatten(1)

    def rounds(_: str, x: torch.Tensor) -> torch.Tensor:
        blocks = x.unflatten(-1, (-1, 32))
        power = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - 8
        return ((blocks / 2**power).clamp(-448, 448).to(E4M3).to(x.dtype) * 2**power).flatten(-2)

    written = write_quantized(tmp_path / "m", nested("MXFP8"), not_the_head(write))
    assert formats_of(check_logits(written, rounds)) == {"mxfp8"}


def test_fbgemm_with_a_bound(tmp_path: Path) -> None:
    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scales = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / scales).to(E4M3)
        parts = {"weight": codes, "weight_scale": scales, "input_scale_ub": torch.tensor([1.25])}
        return parts, codes.float() * scales

    def rounds(_: str, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(max=1.25) / 448
        return (x / scale).clamp(-448, 448).to(E4M3).to(x.dtype) * scale

    described = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1.25, "modules_to_not_convert": ["lm_head"]}
    written = write_quantized(tmp_path / "m", described, not_the_head(write))
    assert formats_of(check_logits(written, rounds)) == {"f8e4m3/1x*:f32/x=f8e4m3:*:bound1.25"}

    def other(tensors: Tensors) -> None:
        tensors[f"{UP}.input_scale_ub"] = torch.tensor([1200.0])

    with pytest.raises(CheckpointError, match=r"input_scale_ub is 1200\.0"):
        written.rewrite(other).request()


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return write_quantized(tmp_path / "m", FLAT, not_the_head(fp8))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"quant_algo": "W4A8_AWQ"}, "the field 'quant_algo' of the quantization is 'W4A8_AWQ'"),
        ({"quant_algo": None}, "the field 'quant_algo' of the quantization is ''"),
        ({"group_size": 16}, "the field 'group_size' of the quantization is 16 for FP8"),
        ({"kv_cache_scheme": {"num_bits": 4}}, "the field 'num_bits' of the quantization is 4"),
        ({"quantized_layers": {"a": 1}}, "not understood: quantized_layers"),
        ({"pre_quant_scale": True}, "the field 'pre_quant_scale' of the quantization is true"),
    ],
)
def test_what_is_not_understood(written: Written, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        written.rewrite(lambda tensors: None, **fields).request()
    assert problem in caught.value.what


def test_excluded_modules(written: Written) -> None:
    with pytest.raises(CheckpointError, match=r"\.mlp\.\w+_proj is quantized, but the quantization_config excludes it"):
        written.rewrite(lambda tensors: None, ignore=["model.layers.*.mlp*"]).request()
