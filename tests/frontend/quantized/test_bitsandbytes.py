"""Checkpoints of bitsandbytes: NF4 with and without double quantization, and INT8, quantized by the library."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import Tensors, Write, check_bits, check_logits, formats_of, not_the_head, write_quantized

from ingot.ir.errors import CheckpointError, ConfigError
from ingot.ir.formats import ELEMENTS

NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "llm_int8_skip_modules": ["lm_head"],
    "llm_int8_threshold": 6.0,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_enable_fp32_cpu_offload": False,
}
INT8 = {**NF4, "load_in_4bit": False, "load_in_8bit": True, "_load_in_4bit": False, "_load_in_8bit": True}
UP = "model.layers.0.mlp.up_proj"


def by_the_library(nested: bool, storage: torch.dtype = torch.uint8) -> Write:
    functional: Any = pytest.importorskip("bitsandbytes.functional")

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        packed, state = functional.quantize_4bit(
            weight, blocksize=64, compress_statistics=nested, quant_type="nf4", quant_storage=storage
        )
        parts = {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
        return {"weight": packed, **parts}, functional.dequantize_4bit(packed, state)

    return write


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nested", [True, False])
def test_nf4_by_the_library(tmp_path: Path, nested: bool, storage: torch.dtype) -> None:
    described = {**NF4, "bnb_4bit_use_double_quant": nested}
    written = write_quantized(tmp_path / "m", described, not_the_head(by_the_library(nested, storage)))
    assert formats_of(check_logits(written)) == {"nf4"}


def nf4(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Double quantization by hand: the first element of a byte is in its high bits."""
    numbers = torch.tensor(ELEMENTS["nf4"].table)
    blocks = weight.reshape(-1, 64)
    table = torch.linspace(-1, 1, 256)
    offset = float(blocks.abs().amax(1).mean())
    outer = (blocks.abs().amax(1) - offset).abs()
    outer = torch.stack([part.max() for part in outer.split(256)])
    each = outer.repeat_interleave(256)[: len(blocks)]
    absmax = ((blocks.abs().amax(1) - offset) / each * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
    scales = (table[absmax.long()] * each + offset)[:, None]
    codes = ((blocks / scales)[..., None] - numbers).abs().argmin(-1).flatten()
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    parts = {
        "weight": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": absmax,
        "weight.quant_map": numbers,
        "weight.nested_absmax": outer,
        "weight.nested_quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts, (numbers[codes].reshape(-1, 64) * scales).reshape(weight.shape)


def test_nf4(tmp_path: Path) -> None:
    check_logits(write_quantized(tmp_path / "m", NF4, not_the_head(nf4)))


def int8(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    most = weight.abs().amax(1)
    q = (weight / most[:, None] * 127).round().to(torch.int8)
    parts = {"weight": q, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, q.float() * (most / 127)[:, None]


def test_int8(tmp_path: Path) -> None:
    """Elements of at least 1.5 are not rounded. The scale is rounded to float32 once more than in the library."""

    def rounds(_: str, x: torch.Tensor) -> torch.Tensor:
        large = x.abs() >= 1.5
        scale = x.masked_fill(large, 0).abs().amax(-1, keepdim=True) / 127
        return torch.where(large, x, (x / scale).round() * scale)

    written = write_quantized(tmp_path / "m", {**INT8, "llm_int8_threshold": 1.5}, not_the_head(int8))
    program = check_logits(written, rounds, rtol=2.0**-22)
    assert formats_of(program) == {"i8/1x*:f32/x=i8:*:outliers1.5"}


def test_int8_by_the_library(tmp_path: Path) -> None:
    functional: Any = pytest.importorskip("bitsandbytes.functional")

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        q, most, _ = functional.int8_vectorwise_quant(weight.half())
        return {"weight": q, "SCB": most}, functional.int8_vectorwise_dequant(q, most)

    check_bits(write_quantized(tmp_path / "m", INT8, not_the_head(write)), rtol=2.0**-22)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, "the field 'bnb_4bit_quant_type' of the quantization is 'fp4'"),
        ({"load_in_8bit": True}, "the field 'load_in_4bit' of the quantization is True with load_in_8bit True"),
        ({"bnb_1bit": True}, "not understood: bnb_1bit"),
    ],
)
def test_what_is_not_understood(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    written = write_quantized(tmp_path / "m", {**NF4, **fields}, not_the_head(nf4))
    with pytest.raises(ConfigError) as caught:
        written.request()
    assert problem in caught.value.what


def _state(**fields: Any) -> Any:
    def edit(tensors: Tensors) -> None:
        name = f"{UP}.weight.quant_state.bitsandbytes__nf4"
        state = json.loads(bytes(tensors[name].tolist()))
        tensors[name] = torch.tensor(list(json.dumps({**state, **fields}).encode()), dtype=torch.uint8)

    return edit


def _with(name: str, value: torch.Tensor) -> Any:
    return lambda tensors: tensors.update({f"{UP}.{name}": value})


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (_state(shape=[256, 64]), "two codes in a byte of 256 x 64"),
        (_state(blocksize=48), "rows of 128 elements of model.layers.0.mlp.up_proj are no multiple of the block of 48"),
        (_state(rank=3), "has the unknown field 'rank'"),
        (_state(nested_offset=None), "nested_blocksize and nested_offset"),
        (_with("weight.quant_map", torch.linspace(-1, 1, 16)), "has other numbers than NF4"),
        (_with("weight.absmax", torch.zeros(3, dtype=torch.uint8)), f"the tensor {UP}.weight.absmax is uint8 [3]"),
        (_with("weight.other", torch.zeros(3)), f"{UP}.weight.other [3]"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, edit: Any, problem: str) -> None:
    written = write_quantized(tmp_path / "m", NF4, not_the_head(nf4))
    with pytest.raises(CheckpointError) as caught:
        written.rewrite(edit).request().trace()
    assert problem in str(caught.value)
