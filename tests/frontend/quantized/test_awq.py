"""AWQ checkpoints in the order of the GEMM kernel, written to their specification."""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import Tensors, Write, check_logits, formats_of, not_the_head, write_quantized

from ingot.ir.errors import CheckpointError, ConfigError

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
# Which output each nibble of a word holds, the lowest first.
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
UP = "model.layers.0.mlp.up_proj"


def words(codes: torch.Tensor, order: tuple[int, ...] = NIBBLES) -> torch.Tensor:
    eight = codes.long().unflatten(-1, (-1, 8))
    whole = torch.stack([eight[..., output] << (4 * nibble) for nibble, output in enumerate(order)]).sum(0)
    return whole.to(torch.uint32).view(torch.int32)


def awq(size: int, order: tuple[int, ...] = NIBBLES) -> Write:
    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        count, size_ = columns // (size or columns), size or columns
        draw = torch.Generator().manual_seed(len(module))
        scales = (weight.abs().max() / 7 * (0.5 + torch.rand(count, rows, generator=draw))).half()
        zeros = torch.randint(0, 16, (count, rows), generator=draw)
        wide, zero = (one.repeat_interleave(size_, 0) for one in (scales.float(), zeros))
        q = ((weight.T / wide).round().long() + zero).clamp(0, 15)
        parts = {"qweight": words(q, order), "qzeros": words(zeros, order), "scales": scales}
        return parts, ((q - zero).float() * wide).T

    return write


@pytest.mark.parametrize(("size", "level"), [(32, "1x32"), (128, "1x128"), (0, "1x*")])
def test_awq(tmp_path: Path, size: int, level: str) -> None:
    described = {**AWQ, "group_size": size or -1}
    written = write_quantized(tmp_path / "m", described, not_the_head(awq(size)))
    wide = {f"u4/{level}:f16:zeros/low_first"}
    assert formats_of(check_logits(written)) == (wide if size != 128 else {*wide, "u4/1x*:f16:zeros/low_first"})


def test_the_order_of_nibbles_matters(tmp_path: Path) -> None:
    """Words in the plain order are read as other outputs: the test above would notice."""
    written = write_quantized(tmp_path / "m", AWQ, not_the_head(awq(32, tuple(range(8)))))
    request = written.request()
    found = request.checkpoint.logical.recipes[f"{UP}.weight"].execute(request.checkpoint.read)
    assert not torch.equal(found, written.floats[f"{UP}.weight"])


def test_auto_round_in_this_form(tmp_path: Path) -> None:
    described = {
        "quant_method": "intel/auto-round",
        "bits": 4,
        "group_size": 32,
        "packing_format": "auto_round:auto_awq",
    }
    check_logits(write_quantized(tmp_path / "m", described, not_the_head(awq(32))))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"version": "gemv"}, "the field 'version' of the quantization is 'gemv'"),
        ({"bits": 8}, "the field 'bits' of the quantization is 8"),
        ({"q_group_size": 64}, "the field 'q_group_size' of the quantization is another one"),
        ({"smooth": 1}, "not understood: smooth"),
    ],
)
def test_what_is_not_understood(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    written = write_quantized(tmp_path / "m", {**AWQ, **fields}, not_the_head(awq(32)))
    with pytest.raises(ConfigError) as caught:
        written.request()
    assert problem in caught.value.what


def test_packed_tensors_of_the_wrong_width(tmp_path: Path) -> None:
    written = write_quantized(tmp_path / "m", AWQ, not_the_head(awq(32)))

    def narrow(tensors: Tensors) -> None:
        tensors[f"{UP}.qweight"] = tensors[f"{UP}.qweight"][:, :16].contiguous()

    with pytest.raises(CheckpointError, match=rf"the tensor {UP}\.scales is float16 \[4, 256\]"):
        written.rewrite(narrow).request()
