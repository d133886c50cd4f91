"""FP-Quant checkpoints, written to the specification: MXFP4 and NVFP4 after a rotation, with rounded activations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import (
    UP,
    Round,
    Tensors,
    Write,
    check_logits,
    formats_of,
    not_the_head,
    with_part,
    write_quantized,
)

from ingot.ir.errors import CheckpointError, ConfigError
from ingot.ir.formats import dequantize_rotated, find_format

NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CONFIG = {
    "quant_method": "fp_quant",
    "forward_dtype": "mxfp4",
    "forward_method": "abs_max",
    "backward_dtype": "bf16",
    "store_master_weights": False,
    "hadamard_group_size": 32,
    "pseudoquantization": False,
    "transform_init": "hadamard",
    "modules_to_not_convert": ["lm_head"],
}


def hadamard(size: int) -> torch.Tensor:
    """The matrix as the library stores it: rounded to bf16."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return (torch.tensor(signs) * size**-0.5).to(torch.bfloat16)


def nearest(values: torch.Tensor) -> torch.Tensor:
    """The codes of the nearest numbers; of two at the same distance, that of the even code."""
    far = (values.double()[..., None] - NUMBERS.double()).abs()
    odd = torch.arange(16) % 2 * 1e-12
    return (far + odd).argmin(-1)


def scales_of(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """The scales as they are stored, times the global scale (3 for mxfp4, 10 for nvfp4)."""
    most = blocks.abs().amax(-1)
    if kind == "mxfp4":
        return torch.exp2(most.log2().floor())
    return (most.float() * 10 / 6).to(torch.float8_e4m3fn).to(most.dtype)


# The weight of the rotated input, by module, of the checkpoint that was written last.
TURNED: dict[str, torch.Tensor] = {}


def stored(kind: str, size: int) -> Write:
    group, outer = (32, 3.0) if kind == "mxfp4" else (16, 10.0)
    matrix = hadamard(size)
    dtype = torch.float8_e8m0fnu if kind == "mxfp4" else torch.float8_e4m3fn

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        blocks = (weight.double().unflatten(1, (-1, size)) @ matrix.double()).flatten(1).unflatten(1, (-1, group))
        scales = scales_of(blocks, kind)
        codes = nearest(blocks / (scales / outer)[..., None]).flatten(1)
        # The library divides by the global scale; the reciprocal of 3 or 10 is rounded to float32 here.
        step = scales.float() * (1 / torch.tensor(outer))
        turned = (NUMBERS[codes].unflatten(1, (-1, group)) * step[..., None]).flatten(1)
        meant = (turned.unflatten(1, (-1, size)) @ matrix.float().T).flatten(1)
        parts = {
            "qweight": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
            "scales": scales.float().to(dtype).view(torch.uint8),
            "weight_global_scale": torch.tensor([outer], dtype=torch.bfloat16),
            "act_global_scale": torch.tensor([outer], dtype=torch.bfloat16),
            "forward_hadamard_matrix": matrix.clone(),
            "backward_hadamard_matrix": matrix.clone(),
        }
        TURNED[module] = turned
        return parts, meant

    return not_the_head(write)


def rounded(kind: str, size: int) -> Round:
    group, outer = (32, 3.0) if kind == "mxfp4" else (16, 10.0)
    matrix = hadamard(size).double()

    def rounds(_: str, x: torch.Tensor) -> torch.Tensor:
        blocks = (x.unflatten(-1, (-1, size)) @ matrix).flatten(-2).unflatten(-1, (-1, group))
        step = (scales_of(blocks, kind) / outer)[..., None]
        found = (NUMBERS.double()[nearest(blocks / step)] * step).flatten(-2)
        # The linear multiplies by the weight that includes the matrix, so undo it.
        return (found.unflatten(-1, (-1, size)) @ torch.linalg.inv(matrix)).flatten(-2)

    return rounds


@pytest.mark.parametrize(("kind", "size"), [("mxfp4", 32), ("mxfp4", 128), ("nvfp4", 16), ("nvfp4", 64)])
def test_weights_and_activations(tmp_path: Path, kind: str, size: int) -> None:
    config = {**CONFIG, "forward_dtype": kind, "hadamard_group_size": size}
    written = write_quantized(tmp_path / "m", config, stored(kind, size))
    expected = {
        "mxfp4": f"f4e2m1/1x32:f8e8m0/*x*:f32/low_first/rotated_in={size}/x=f4e2m1:32:f8e8m0:factor1.3333333333333333",
        "nvfp4": f"f4e2m1/1x16:f8e4m3/*x*:f32/low_first/rotated_in={size}/x=f4e2m1:16:f8e4m3:stored",
    }
    # Only the products with the matrix are rounded.
    found = formats_of(check_logits(written, rounded(kind, size), atol=1e-6))
    assert found == {expected[kind], expected[kind].replace("*x*", "1x*")}, "merged linears have a scale for each row"
    checkpoint = written.request().checkpoint
    for name, recipe in checkpoint.logical.recipes.items():
        format = find_format(expected[kind])
        parts = {part: one.execute(checkpoint.read) for part, one in zip(format.parts, recipe.inputs, strict=True)}
        assert torch.equal(dequantize_rotated(parts, format), TURNED[name.removesuffix(".weight")]), name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("forward_dtype", "mxfp8"),
        ("forward_method", "quest"),
        ("store_master_weights", True),
        ("pseudoquantization", True),
        ("hadamard_group_size", 48),
        ("transform_init", "random"),
    ],
)
def test_fields(tmp_path: Path, field: str, value: Any) -> None:
    written = write_quantized(tmp_path / "m", {**CONFIG, field: value}, stored("mxfp4", 32))
    with pytest.raises(ConfigError, match=f"the field '{field}' of the quantization is"):
        written.request()


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("scales", None, "lacks .*scales"),
        ("scales", torch.zeros(256, 2, dtype=torch.uint8), "scales is uint8 \\[256, 2\\]"),
        ("forward_hadamard_matrix", torch.eye(16), "forward_hadamard_matrix is float32 \\[16, 16\\]"),
        ("act_global_scale", torch.tensor([1.0]), "act_global_scale is 1.0"),
        ("weight_global_scale", torch.tensor([0.0]), "weight_global_scale is 0.0"),
        ("dqweight", torch.ones(256, 128), "up_proj.dqweight"),
    ],
)
def test_tensors(tmp_path: Path, part: str, value: torch.Tensor | None, message: str) -> None:
    written = write_quantized(tmp_path / "m", CONFIG, stored("mxfp4", 32)).rewrite(with_part(part, value))
    with pytest.raises(CheckpointError, match=message):
        written.request().trace()


def test_an_empty_weight_is_none(tmp_path: Path) -> None:
    """A checkpoint that was loaded and saved again has an empty `weight` and `dqweight` next to `qweight`."""

    def edit(tensors: Tensors) -> None:
        tensors |= {f"{UP}.{name}": torch.zeros(0, dtype=torch.bfloat16) for name in ("weight", "dqweight")}

    check_logits(
        write_quantized(tmp_path / "m", CONFIG, stored("mxfp4", 32)).rewrite(edit), rounded("mxfp4", 32), rtol=1e-5
    )
