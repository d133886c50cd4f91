"""FP8 checkpoints whose experts are one tensor with blocks of scales, as Step3's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from even_sizes import EVEN
from quantized_files import LIMIT_OPTIONS, PROMPTS, Tensors, logical_of
from safetensors.torch import load_file, save_file
from staged import LIMITS, logits_of, staged

from ingot.compile.request import Request
from ingot.ir import ops
from ingot.ir.errors import CheckpointError
from ingot.ir.weights import formats_of_call

E4M3 = torch.float8_e4m3fn
BLOCK = 32
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
STACK = "model.layers.1.moe.up_proj"
FORMAT = f"f8e4m3/{BLOCK}x{BLOCK}:f32/x=f8e4m3:{BLOCK}"


def quantized(stack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and scales [E, blocks, blocks] of a stack [E, N, K], and the numbers that they stand for."""
    experts, rows, columns = stack.shape
    scales = torch.zeros(experts, -(-rows // BLOCK), -(-columns // BLOCK))
    codes, meant = torch.zeros_like(stack).to(E4M3), torch.zeros_like(stack)
    for i in range(scales.shape[1]):
        for j in range(scales.shape[2]):
            place = (slice(None), slice(BLOCK * i, BLOCK * (i + 1)), slice(BLOCK * j, BLOCK * (j + 1)))
            scales[:, i, j] = stack[place].abs().amax((1, 2)) / 448
            codes[place] = (stack[place] / scales[:, i, j, None, None]).to(E4M3)
            meant[place] = codes[place].float() * scales[:, i, j, None, None]
    return codes, scales, meant


def drawn(rows: int = 70, columns: int = 40) -> tuple[Tensors, torch.Tensor]:
    """The tensors of three experts, the last blocks of which are cut, and the numbers that they stand for."""
    codes, scales, meant = quantized(torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(0)))
    return {f"{STACK}.weight": codes, f"{STACK}.weight_scale_inv": scales, "model.norm.weight": torch.ones(8)}, meant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_bit_by_bit(dtype: torch.dtype) -> None:
    tensors, meant = drawn()
    if dtype != torch.float32:
        scales = tensors[f"{STACK}.weight_scale_inv"].to(dtype)
        each = scales.float().repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :70, :40]
        tensors[f"{STACK}.weight_scale_inv"], meant = scales, tensors[f"{STACK}.weight"].float() * each
    logical = logical_of(FP8, tensors)
    assert set(logical.recipes) == {f"{STACK}.weight"}
    assert set(logical.tensors) == {f"{STACK}.weight", "model.norm.weight"}
    assert tuple(logical.tensors[f"{STACK}.weight"].shape) == (3, 70, 40)
    recipe = logical.recipes[f"{STACK}.weight"]
    assert {one.attr("format") for one in recipe.inputs} == {FORMAT}
    assert torch.equal(recipe.execute(tensors.__getitem__), meant)


def _without_scales(tensors: Tensors) -> None:
    del tensors[f"{STACK}.weight_scale_inv"]


def _scales_of_one_matrix(tensors: Tensors) -> None:
    tensors[f"{STACK}.weight_scale_inv"] = tensors[f"{STACK}.weight_scale_inv"][0]


@pytest.mark.parametrize(
    ("edit", "config", "message"),
    [
        (_without_scales, {}, r"lacks .*up_proj\.weight_scale_inv"),
        (_scales_of_one_matrix, {}, r"up_proj\.weight_scale_inv is float32 \[3, 2\]"),
        (lambda tensors: None, {"weight_block_size": None}, r"up_proj\.weight is \[3, 70, 40\](.|\n)*blocks of scales"),
        (lambda tensors: None, {"modules_to_not_convert": ["moe"]}, "the quantization_config excludes it"),
    ],
)
def test_a_stack_that_does_not_fit(edit: Callable[[Tensors], None], config: dict[str, Any], message: str) -> None:
    tensors, _ = drawn()
    edit(tensors)
    with pytest.raises(CheckpointError, match=message):
        logical_of({name: value for name, value in {**FP8, **config}.items() if value is not None}, tensors)


def test_a_scale_that_is_none() -> None:
    tensors, _ = drawn()
    tensors[f"{STACK}.weight_scale_inv"][1, 2, 0] = torch.nan
    recipe = logical_of(FP8, tensors).recipes[f"{STACK}.weight"]
    with pytest.raises(CheckpointError, match=r"1 of 6 scales are NaN"):
        recipe.execute(tensors.__getitem__)


def test_step3_with_fp8_experts_computes_what_they_stand_for(tmp_path: Path) -> None:
    """Dequantized weights give the same bits as floats. Weights that stay stored add the rounding of activations."""
    tiny = EVEN["Step3TextForCausalLM"]
    folder, floats = tiny.write(tmp_path / "fp8", quantization_config=FP8), tiny.write(tmp_path / "floats")
    tensors = load_file(folder / "model.safetensors")
    meant, stacks = dict(tensors), [name for name, one in tensors.items() if one.dim() == 3]
    for name in stacks:
        codes, scales, meant[name] = quantized(tensors.pop(name))
        tensors |= {name: codes, f"{name.removesuffix('.weight')}.weight_scale_inv": scales}
    save_file(tensors, folder / "model.safetensors")
    save_file(meant, floats / "model.safetensors")
    request, plain = (Request.read(one, **LIMIT_OPTIONS) for one in (folder, floats))
    assert set(request.checkpoint.logical.recipes) == set(stacks) and len(stacks) == 6

    found, wanted = (
        logits_of(one.trace().entries["main"], one.checkpoint.read, PROMPTS).exact for one in (request, plain)
    )
    assert torch.equal(found, wanted)
    steps, lowered = staged(request.trace(), request.pipeline(), LIMITS)
    record = next(step.record for step in steps if step.name == "adopt-quantized")
    assert record is not None and record.matches == 2 and not record.refusals
    formats = [formats_of_call(node) for node in lowered.fused.calls(ops.experts.overload)]
    assert [[one.name for one in both] for both in formats] == [[FORMAT, FORMAT]] * 2
    near = logits_of(lowered.fused, request.checkpoint.read, PROMPTS).exact
    assert 0 < (near - wanted).norm() / wanted.norm() < 0.2
