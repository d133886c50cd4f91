"""GPTQ and AutoRound checkpoints, written to their specification: versions, bits, orders, zero points, changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import (
    UP,
    Tensors,
    Write,
    adopted,
    check_logits,
    formats_of,
    not_the_head,
    with_part,
    write_quantized,
)

from ingot.ir.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.one_in_file(3)

GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "desc_act": False,
    "damp_percent": 0.01,
    "true_sequential": True,
    "static_groups": False,
    "lm_head": False,
    "model_name_or_path": None,
    "checkpoint_format": "gptq",
    "meta": {"quantizer": ["gptqmodel:1.0"]},
}


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [K, N] in words [K * bits / 32, N], bit by bit, the first code in the lowest bits."""
    columns = []
    for column in codes.T.tolist():
        whole = sum(int(code) << (bits * place) for place, code in enumerate(column))
        columns.append([(whole >> (32 * place)) & 0xFFFFFFFF for place in range(len(column) * bits // 32)])
    return torch.tensor(columns, dtype=torch.int64).T.to(torch.uint32).view(torch.int32)


def gptq(bits: int, size: int, version: int = 1, symmetric: bool = True, order: torch.Tensor | None = None) -> Write:
    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        groups = torch.arange(columns) // (size or columns)
        if order is not None:
            groups = groups[order[order < columns]]
        count = int(groups.max()) + 1
        draw = torch.Generator().manual_seed(len(module))
        scales = (weight.abs().max() / 2 ** (bits - 1) * (0.5 + torch.rand(count, rows, generator=draw))).half()
        half = 1 << (bits - 1)
        zeros = torch.full((count, rows), half)
        if not symmetric:
            zeros = torch.randint(0, 2**bits, (count, rows), generator=draw)  # 0 is stored as the largest code
        wide, zero = scales.float()[groups], zeros[groups]
        q = ((weight.T / wide).round().long() + zero).clamp(0, 2**bits - 1)
        stored = (zeros - (1 if version == 1 else 0)) % 2**bits
        parts = {
            "qweight": words(q, bits),
            "qzeros": words(stored.T, bits).T,
            "scales": scales,
            "g_idx": groups.to(torch.int32),
        }
        return parts, ((q - zero).float() * wide).T

    return write


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("bits", "size", "format"),
    [
        (4, 32, "u4/1x32:f16:zeros/low_first"),
        (8, 64, "u8/1x64:f16:zeros"),
        (2, 0, "u4/1x*:f16:zeros/low_first"),
        (3, 32, "u4/1x32:f16:zeros/low_first"),
    ],
)
def test_gptq(tmp_path: Path, bits: int, size: int, format: str, version: int, symmetric: bool) -> None:
    form = {1: "gptq", 2: "gptq_v2"}[version]
    described = {**GPTQ, "bits": bits, "group_size": size or -1, "sym": symmetric, "checkpoint_format": form}
    write = not_the_head(gptq(bits, size, version, symmetric))
    assert formats_of(check_logits(write_quantized(tmp_path / "m", described, write))) == {format}


def test_act_order(tmp_path: Path) -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    write = not_the_head(gptq(4, 32, symmetric=False, order=order))
    written = write_quantized(tmp_path / "m", {**GPTQ, "desc_act": True, "sym": False}, write)
    assert formats_of(check_logits(written)) == {"u4/1x32:f16:zeros/low_first/ordered"}
    _, records = adopted(written)
    assert records["merge-linears"].matches == 2, "q, k and v share the order of their input"


def test_the_zero_point_is_off_by_one_in_version_1(tmp_path: Path) -> None:
    """Read by the other version, every weight moves by one scale."""
    written = write_quantized(tmp_path / "m", GPTQ, not_the_head(gptq(4, 32, version=2)))
    request = written.request()
    recipe = request.checkpoint.logical.recipes[f"{UP}.weight"]
    moved = written.floats[f"{UP}.weight"] - recipe.execute(request.checkpoint.read)
    scales = written.tensors()[f"{UP}.scales"].float().T.repeat_interleave(32, 1)
    assert torch.allclose(moved, scales, rtol=1e-3)


def test_changes_for_modules(tmp_path: Path) -> None:
    """`dynamic`: eight bits for one module, and one that is not quantized."""
    four, eight = gptq(4, 32), gptq(8, 64)

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        if "down_proj" in module:
            return None
        return (eight if "o_proj" in module else four)(module, weight)

    dynamic = {r"+:.*\.o_proj": {"bits": 8, "group_size": 64}, r"-:.*\.down_proj": {}}
    written = write_quantized(tmp_path / "m", {**GPTQ, "dynamic": dynamic}, not_the_head(write))
    assert formats_of(check_logits(written)) == {"u4/1x32:f16:zeros/low_first", "u8/1x64:f16:zeros"}
    with pytest.raises(CheckpointError, match=r"up_proj is quantized, but the quantization_config excludes it"):
        written.rewrite(lambda tensors: None, dynamic={r"-:.*\.up_proj": {}, **dynamic}).request()


@pytest.mark.parametrize("form", ["auto_round:auto_gptq", "auto_round:gptqmodel"])
def test_auto_round(tmp_path: Path, form: str) -> None:
    four, eight = (gptq(bits, 32, version=1 if "auto_gptq" in form else 2) for bits in (4, 8))

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return (eight if "o_proj" in module else four)(module, weight)

    described = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "data_type": "int",
        "iters": 200,
        "autoround_version": "0.16.1",
        "packing_format": form,
        "extra_config": {"model.layers.0.self_attn.o_proj": {"bits": 8}, "lm_head": {"bits": 16, "data_type": "float"}},
    }
    written = write_quantized(tmp_path / "m", described, not_the_head(write))
    assert formats_of(check_logits(written)) == {"u4/1x32:f16:zeros/low_first", "u8/1x32:f16:zeros"}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"bits": 5}, "the field 'bits' of the quantization is 5"),
        ({"group_size": 48}, "the field 'group_size' of the quantization is 48"),
        ({"checkpoint_format": "marlin"}, "the field 'checkpoint_format' of the quantization is 'marlin'"),
        ({"rotation": True}, "not understood: rotation"),
        ({"dynamic": {"+:.*": {"method": "qqq"}}}, "not understood: method"),
    ],
)
def test_what_is_not_understood(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    written = write_quantized(tmp_path / "m", {**GPTQ, **fields}, not_the_head(gptq(4, 32)))
    with pytest.raises(ConfigError) as caught:
        written.request()
    assert problem in caught.value.what


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (with_part("qzeros", None), f"the checkpoint lacks {UP}.qzeros"),
        (with_part("qweight", None), f"{UP}.qzeros [4, 32]"),
        (with_part("scales", torch.ones(2, 256)), f"the tensor {UP}.scales is float32 [2, 256]"),
        (with_part("qzeros", torch.zeros(4, 64, dtype=torch.int32)), f"the tensor {UP}.qzeros is int32 [4, 64]"),
        (with_part("qweight", torch.zeros(32, 256, dtype=torch.int32)), f"the tensor {UP}.qzeros is int32 [4, 32]"),
        (with_part("g_idx", torch.arange(128, dtype=torch.int32) % 3), "is no order of 128 columns in groups of 32"),
        (with_part("bias2", torch.ones(1)), f"{UP}.bias2 [1]"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, edit: Any, problem: str) -> None:
    written = write_quantized(tmp_path / "m", GPTQ, not_the_head(gptq(4, 32)))
    with pytest.raises(CheckpointError) as caught:
        written.rewrite(edit).request().trace()
    assert problem in str(caught.value)
