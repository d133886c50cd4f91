"""Quantize the matrices of a random checkpoint as checkpoints on the Hugging Face hub store them.

Linears of the layers are quantized, by rounding to the nearest number. Embeddings and the head keep their dtype. The
field quantization_config of config.json says what is stored:

int4_g128     compressed-tensors, pack-quantized: four bits a number, and a bf16 scale for each 128 columns of a row
fp8           quant_method fp8: float8 e4m3, a scale for each matrix, and one that is computed for each step of x
fp8_block128  the same with a scale for each 128 x 128 numbers, and for each 128 columns of a row of x

The experts of GPT-OSS are stored in a further format, which the config.json of its shape has:

mxfp4         float4 e2m1, and a power of two for each 32 inputs of an output (OCP Microscaling Formats 1.0)
"""

from collections.abc import Mapping
from typing import Any

import torch

FORMATS = ("int4_g128", "fp8", "fp8_block128")
_GROUP = 128
_HIGH_INT4 = 7  # symmetric: -7 to 7 times the scale
_OFFSET_INT4 = 8  # a stored code is the number plus 8
_FP8 = torch.float8_e4m3fn
_MXFP4 = "mxfp4"
_BLOCK = 32  # numbers with one scale
_EXPONENT_BIAS = 127  # a stored scale is the exponent plus 127
_HIGHEST_EXPONENT = 2  # of a number in e2m1: the greatest is 1.5 * 2**2
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between 0, 0.5, 1, 1.5, 2, 3, 4 and 6
_SIGN = 8

QUANTIZATION_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "int4_g128": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": _GROUP,
                    "dynamic": False,
                },
            }
        },
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8_block128": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_GROUP, _GROUP]},
    _MXFP4: {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
}


def format_of(config: Mapping[str, Any]) -> str | None:
    """Return the format in which a checkpoint with this config.json stores weights; None: it quantizes none."""
    stored = config.get("quantization_config")
    return next((name for name, fields in QUANTIZATION_CONFIGS.items() if fields == stored), None)


def is_quantized(format: str, name: str, shape: tuple[int, ...]) -> bool:
    """Return whether the tensor `name` of a checkpoint is quantized: the matrix of a linear of a layer.

    In MXFP4 it is a projection of all experts of a layer.
    """
    if format == _MXFP4:
        return len(shape) == 3
    return len(shape) == 2 and ".layers." in name and name.endswith(".weight")


def quantized(format: str, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that store the matrix `name`, a `weight` [rows, columns] in bf16, by their names.

    In MXFP4, `weight` is [experts, inputs, outputs].
    """
    if format == _MXFP4:
        blocks, scales = zip(*map(_mxfp4, weight), strict=True)
        return {f"{name}_blocks": torch.stack(blocks), f"{name}_scales": torch.stack(scales)}
    module = name.removesuffix(".weight")
    rows, columns = weight.shape
    full = weight.float()
    if format == "int4_g128":
        groups = full.view(rows, columns // _GROUP, _GROUP)
        scales = (groups.abs().amax(2) / _HIGH_INT4).to(torch.bfloat16)
        codes = (groups / scales.float()[:, :, None]).round().clamp(-_HIGH_INT4, _HIGH_INT4).to(torch.int32)
        return {
            f"{module}.weight_packed": packed(codes.view(rows, columns) + _OFFSET_INT4),
            f"{module}.weight_scale": scales,
            f"{module}.weight_shape": torch.tensor([rows, columns]),
        }
    high = torch.finfo(_FP8).max
    if format == "fp8":
        scale = full.abs().amax() / high
        return {name: (full / scale).to(_FP8), f"{module}.weight_scale": scale}
    blocks = full.view(rows // _GROUP, _GROUP, columns // _GROUP, _GROUP)
    scales = blocks.abs().amax((1, 3)) / high
    stored = (blocks / scales[:, None, :, None]).to(_FP8).view(rows, columns)
    return {name: stored, f"{module}.weight_scale_inv": scales}


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Return codes of four bits, i32 [rows, columns], as i32 [rows, columns / 8]. The first column has the low bits."""
    eights = codes.view(codes.shape[0], -1, 8)
    words = torch.zeros_like(eights[:, :, 0])
    for nth in range(8):
        words |= eights[:, :, nth] << (4 * nth)
    return words


def _mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an expert's weight [inputs, outputs] as u8 [outputs, inputs / 32, 16] and exponents u8 [outputs, inputs /
    32].

    The low four bits of a byte are the first of two numbers. The exponent of a block is that of its greatest number
    less the highest exponent of e2m1, so a number may be as great as 8, and is then rounded to 6.
    """
    groups = weight.t().contiguous().float().view(weight.shape[1], -1, _BLOCK)
    exponents = groups.abs().amax(2).clamp(min=torch.finfo(torch.float32).tiny).log2().floor() - _HIGHEST_EXPONENT
    exact = groups * torch.exp2(-exponents)[:, :, None]
    codes = torch.bucketize(exact.abs(), exact.new_tensor(_BETWEEN), out_int32=True).to(torch.uint8)
    codes += (exact < 0).to(torch.uint8) * _SIGN
    return codes[:, :, ::2] + (codes[:, :, 1::2] << 4), (exponents + _EXPONENT_BIAS).to(torch.uint8)
