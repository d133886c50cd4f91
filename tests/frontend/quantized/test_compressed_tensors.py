"""Checkpoints of compressed-tensors: compressed by the library where it is installed, else by its specification."""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import (
    Tensors,
    Write,
    adopted,
    check_logits,
    formats_of,
    not_the_head,
    write_quantized,
)

from ingot.ir.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.one_in_file(3)


def args(**fields: Any) -> dict[str, Any]:
    """The arguments of a scheme as the library serializes them."""
    usual = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "strategy": None, "dynamic": False}
    return {**usual, "observer": "minmax", "observer_kwargs": {}, "actorder": None, "block_structure": None, **fields}


def config(format: str, weights: Any, inputs: Any = None, **fields: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "version": "0.20.1",
        **fields,
    }


def pack_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [N, K] in int32 words, bit by bit."""
    rows = []
    for row in codes.tolist():
        whole = sum(int(code) << (bits * place) for place, code in enumerate(row))
        words = -(-len(row) * bits // 32)
        rows.append([(whole >> (32 * place)) & 0xFFFFFFFF for place in range(words)])
    return torch.tensor(rows, dtype=torch.int64).to(torch.uint32).view(torch.int32)


def packed(bits: int, size: int, symmetric: bool, order: torch.Tensor | None = None) -> Write:
    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        group = torch.arange(columns) // (size or columns)
        if order is not None:
            group = group[order[order < columns]]
        count, half = int(group.max()) + 1, 1 << (bits - 1)
        scales, zeros = torch.zeros(rows, count), torch.zeros(rows, count, dtype=torch.int64)
        for index in range(count):
            part = weight[:, group == index]
            scales[:, index] = part.abs().amax(1) / (half - 0.5)
            if not symmetric:
                zeros[:, index] = torch.randint(-half, half, (rows,), generator=torch.Generator().manual_seed(index))
        scales = scales.to(torch.bfloat16)
        q = (weight / scales.float()[:, group]).round().clamp(-half, half - 1).long()
        parts = {
            "weight_packed": pack_rows(q + half, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack_rows((zeros + half).T, bits).T
        if order is not None:
            parts["weight_g_idx"] = group.to(torch.int32)
        return parts, (q - zeros[:, group]).float() * scales.float()[:, group]

    return write


@pytest.mark.parametrize(
    ("bits", "size", "symmetric", "format"),
    [
        (4, 32, True, "i4/1x32:bf16/low_first"),
        (4, 128, False, "u4/1x128:bf16:zeros/low_first"),
        (4, 0, True, "i4/1x*:f32/low_first"),
        (8, 64, True, "i8/1x64:bf16"),
        (8, 64, False, "u8/1x64:bf16:zeros"),
        (3, 32, True, "i4/1x32:bf16/low_first"),
        (2, 32, False, "u4/1x32:bf16:zeros/low_first"),
    ],
)
def test_pack_quantized(tmp_path: Path, bits: int, size: int, symmetric: bool, format: str) -> None:
    strategy = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    scheme = args(num_bits=bits, symmetric=symmetric, **strategy)
    write = not_the_head(packed(bits, size, symmetric))
    written = write_quantized(tmp_path / "m", config("pack-quantized", scheme), write)
    assert formats_of(check_logits(written)) == {format}


def test_columns_in_another_order(tmp_path: Path) -> None:
    """With `weight_g_idx`. Linears with equal orders share one; others stay apart, and the pass says so."""
    orders = [torch.randperm(256, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        return packed(4, 32, True, orders[module.endswith("v_proj")])(module, weight)

    scheme = args(num_bits=4, strategy="group", group_size=32, actorder="group")
    written = write_quantized(tmp_path / "m", config("pack-quantized", scheme), not_the_head(write))
    assert formats_of(check_logits(written)) == {"i4/1x32:bf16/low_first/ordered"}
    _, records = adopted(written)
    assert [one.reason for one in records["merge-linears"].refusals] == [
        "each weight has its own order: layers.0.attention.q.order, layers.0.attention.q.order, "
        "layers.0.attention.v.order"
    ]
    assert records["merge-linears"].matches == 1, "gate and up"


def ints(bits: int, static: bool) -> Write:
    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scales = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        q = (weight / scales).round().to(torch.int8)
        parts = {"weight": q, "weight_scale": scales}
        return {**parts, **({"input_scale": torch.tensor([0.02])} if static else {})}, q.float() * scales

    return write


def test_int_quantized(tmp_path: Path) -> None:
    described = config("int-quantized", args(strategy="channel"), args(strategy="token", dynamic=True))
    written = write_quantized(tmp_path / "m", described, not_the_head(ints(8, False)))

    def rounds(_: str, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale

    assert formats_of(check_logits(written, rounds)) == {"int8_w8a8"}


def test_int_quantized_with_static_activations(tmp_path: Path) -> None:
    described = config("int-quantized", args(strategy="channel"), args(strategy="tensor"))
    written = write_quantized(tmp_path / "m", described, not_the_head(ints(8, True)))
    program = check_logits(written, lambda _, x: (x / 0.02).round().clamp(-127, 127) * torch.tensor(0.02).double())
    assert formats_of(program) == {"i8/1x*:f32/x=i8:static"}


def test_naive_quantized(tmp_path: Path) -> None:
    """Four bits in int8, without packing."""
    described = config("naive-quantized", args(num_bits=4, strategy="channel"))
    written = write_quantized(tmp_path / "m", described, not_the_head(ints(4, False)))
    assert formats_of(check_logits(written)) == {"i4/1x*:f32/low_first"}


def test_float_quantized(tmp_path: Path) -> None:
    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
        codes = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()

    float8 = {"type": "float", "num_bits": 8}
    inputs = args(strategy="token", dynamic=True, **float8)
    described = config("float-quantized", args(strategy="channel", **float8), inputs)
    written = write_quantized(tmp_path / "m", described, not_the_head(write))

    def rounds(_: str, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale

    assert formats_of(check_logits(written, rounds)) == {"fp8_per_channel_per_token"}


def library(format: str, dtype: torch.dtype, **group: Any) -> Write:
    """Compressed and decompressed by the library."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], **group)
    compressor = BaseCompressor.get_value_from_registry(format)

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size, state = scheme.weights.group_size, {"weight": weight.to(dtype)}
        most = weight.unflatten(1, (-1, size)).abs().amax(2)
        high = {4: 6.0, 6: 7.5, 8: 448.0}[scheme.weights.num_bits]
        if "nv" in format:
            state["weight_global_scale"] = (448 * 6 / weight.abs().max()).reshape(1)
            state["input_global_scale"] = torch.tensor([30.0])
            scales = (most / high * state["weight_global_scale"]).clamp(2**-9, 448)
            state["weight_scale"] = scales.to(torch.float8_e4m3fn).float()
        else:
            state["weight_scale"] = torch.exp2(torch.floor(torch.log2(most / high)))
        parts = compressor.compress(state, scheme)
        whole = compressor.decompress(dict(parts), scheme)["weight"]
        return {name: part.data for name, part in parts.items()}, whole

    return write


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_mx_by_the_library(tmp_path: Path, bits: int) -> None:
    name = {4: "mxfp4-pack-quantized", 6: "mxfp6-pack-quantized", 8: "mxfp8-quantized"}[bits]
    weights = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    write = library(name, torch.float32, weights={**weights, "scale_dtype": "torch.uint8"})
    described = config(name, {**weights, "scale_dtype": "torch.uint8"})
    written = write_quantized(tmp_path / "m", described, not_the_head(write))
    expected = {4: "mxfp4", 6: "f6e2m3/1x32:f8e8m0", 8: "f8e4m3/1x32:f8e8m0"}[bits]
    assert formats_of(check_logits(written)) == {expected}


NV = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
NVFP4 = "nvfp4-pack-quantized"


def test_nvfp4_by_the_library(tmp_path: Path) -> None:
    """The global scale is stored as its reciprocal. The library decompresses in bfloat16, which holds 8 bits."""
    local = {**NV, "dynamic": "local"}
    write = library(NVFP4, torch.float32, weights=NV, input_activations=local)
    written = write_quantized(tmp_path / "m", config(NVFP4, NV, local), not_the_head(write))
    request = written.request()
    request.trace()
    for name, recipe in request.checkpoint.logical.recipes.items():
        found, wanted = recipe.execute(request.checkpoint.read), written.floats[name].float()
        assert bool(((found - wanted).abs() <= 2.0**-7 * wanted.abs()).all()), name
    assert formats_of(adopted(written)[0]) == {
        "f4e2m1/1x16:f8e4m3/*x*:f32/low_first/x=f4e2m1:16:f8e4m3:stored",
        "f4e2m1/1x16:f8e4m3/1x*:f32/low_first/x=f4e2m1:16:f8e4m3:stored",
    }


def nv_by_hand(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    factor = 448 * 6 / weight.abs().max()
    blocks = weight.unflatten(1, (-1, 16))
    scales = (blocks.abs().amax(2) / 6 * factor).to(torch.float8_e4m3fn)
    each = (scales.double() / factor.double())[..., None]
    codes = ((blocks / each)[..., None] - numbers).abs().argmin(-1).flatten(1)
    parts = {
        "weight_packed": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_global_scale": factor.reshape(1),
        "input_global_scale": torch.tensor([30.0]),
    }
    return parts, (numbers[codes].unflatten(1, (-1, 16)) * each).flatten(1)


def test_nvfp4(tmp_path: Path) -> None:
    """To the last bits of float32, in which the reciprocal of the global scale is rounded."""

    def rounds(_: str, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
        numbers = torch.cat([-numbers.flip(0), numbers])
        outer = 1 / torch.tensor(30.0).double()
        blocks = x.unflatten(-1, (-1, 16))
        scale = (blocks.abs().amax(-1, keepdim=True) / 6 / outer).to(torch.float8_e4m3fn).double() * outer
        return (numbers[((blocks / scale)[..., None] - numbers).abs().argmin(-1)] * scale).flatten(-2)

    described = config(NVFP4, NV, {**NV, "dynamic": "local"})
    written = write_quantized(tmp_path / "m", described, not_the_head(nv_by_hand))
    check_logits(written, rounds, rtol=2.0**-21)


def test_groups_of_modules(tmp_path: Path) -> None:
    """Mixed precision: a format for each group. q, k and v with several formats stay apart."""
    first, second = packed(4, 32, True), ints(8, False)

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return (second if "v_proj" in module or "mlp" in module else first)(module, weight)

    groups = {
        "attention": {
            "targets": ["Linear"],
            "weights": args(num_bits=4, strategy="group", group_size=32),
            "format": "pack-quantized",
        },
        "values": {
            "targets": ["re:.*v_proj$", "model.layers.0.mlp"],
            "weights": args(strategy="channel"),
            "format": "int-quantized",
        },
    }
    described = {**config("mixed-precision", None), "config_groups": groups}
    written = write_quantized(tmp_path / "m", described, not_the_head(write))
    assert formats_of(check_logits(written)) == {"i4/1x32:bf16/low_first", "int8"}
    _, records = adopted(written)
    assert [one.reason for one in records["merge-linears"].refusals] == [
        "the weight formats differ: i4/1x32:bf16/low_first, int8"
    ]


INT8 = args(strategy="channel")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"format": "marlin-24"}, "weights in the format 'marlin-24' cannot be read"),
        ({"format": "sparse-24-bitmask"}, "weights in the format 'sparse-24-bitmask' cannot be read"),
        ({"sparsity_config": {"format": "sparse-bitmask"}}, "the field 'sparsity_config' of the quantization is"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "the field 'type' of the quantization is ''"),
        ({"kv_cache_scheme": args(num_bits=4, strategy="tensor")}, "the field 'num_bits' of the quantization is 4"),
        ({"kv_cache_scheme": args(strategy="channel")}, "the field 'strategy' of the quantization is 'channel'"),
        ({"kv_cache_scheme": args(strategy="tensor", dynamic=True)}, "the field 'dynamic' of the quantization is True"),
        ({"new_field": 1}, "fields that are not understood: new_field"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {**INT8, "rank": 4}}}}, "not understood: rank"),
        ({"config_groups": {"a": {"targets": ["Conv2d"], "weights": INT8}}}, "names the class 'Conv2d'"),
        ({"config_groups": {}}, "the field 'config_groups' of the quantization is missing"),
        ({"config_groups": {"a": {"targets": ["Linear"]}}}, "the field 'weights' of the quantization is null"),
    ],
)
def test_what_is_not_understood(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    described = {**config("int-quantized", INT8), **fields}
    written = write_quantized(tmp_path / "m", described, not_the_head(ints(8, False)))
    with pytest.raises(ConfigError) as caught:
        written.request()
    assert problem in caught.value.what


UP = "model.layers.0.mlp.up_proj"


def _without(*names: str) -> Any:
    def edit(tensors: Tensors) -> None:
        for name in names:
            del tensors[f"{UP}.{name}"]

    return edit


def _with(**changed: torch.Tensor) -> Any:
    return lambda tensors: tensors.update({f"{UP}.{name}": value for name, value in changed.items()})


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (_without("weight_packed"), f"the checkpoint lacks {UP}.weight_packed"),
        (_without("weight_packed", "weight_scale"), f"{UP}.weight_shape [2]"),
        (_without("weight_scale"), f"the checkpoint lacks {UP}.weight_scale"),
        (_without("weight_shape"), f"the checkpoint lacks {UP}.weight_shape"),
        (
            _with(weight_packed=torch.zeros(256, 8, dtype=torch.int32)),
            f"the tensor {UP}.weight_packed is int32 [256, 8]",
        ),
        (_with(weight_shape=torch.tensor([256, 120])), f"the tensor {UP}.weight_packed is int32 [256, 16]"),
        (_with(weight_scale=torch.ones(256, 2)), f"the tensor {UP}.weight_scale is float32 [256, 2]"),
        (_with(weight_zero_point=torch.ones(256, 4, dtype=torch.int8)), "has zero points, but the scheme is symmetric"),
        (_with(weight_g_idx=torch.zeros(128, dtype=torch.int32)), "is no order of 128 columns in groups of 32"),
        (_with(bias_scale=torch.ones(1)), f"{UP}.bias_scale [1]"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, edit: Any, problem: str) -> None:
    described = config("pack-quantized", args(num_bits=4, strategy="group", group_size=32))
    written = write_quantized(tmp_path / "m", described, not_the_head(packed(4, 32, True)))
    with pytest.raises(CheckpointError) as caught:
        written.rewrite(edit).request().trace()
    assert problem in str(caught.value)


def test_a_group_that_does_not_divide(tmp_path: Path) -> None:
    described = config("pack-quantized", args(num_bits=4, strategy="group", group_size=32))
    written = write_quantized(tmp_path / "m", described, not_the_head(packed(4, 32, True)))
    fields = config("pack-quantized", args(num_bits=4, strategy="group", group_size=48))
    with pytest.raises(CheckpointError, match=r"rows of 256 elements of .* are no multiple of the group of 48"):
        written.rewrite(lambda tensors: None, **fields).request()


def test_a_config_of_the_cache_alone(tmp_path: Path) -> None:
    cache = args(type="float", strategy="tensor")
    described = {**config("dense", None), "config_groups": {}, "kv_cache_scheme": cache}
    written = write_quantized(tmp_path / "m", described, lambda module, weight: None)

    def scales(tensors: Tensors) -> None:
        for part in "kv":
            tensors[f"model.layers.0.self_attn.{part}_scale"] = torch.tensor([0.5])

    request = written.rewrite(scales).request()
    attention = next(node for node in request.trace().entries["main"].calls() if "attention" in str(node.target))
    assert attention.kwargs["k_scale"] == 0.5 and not request.checkpoint.logical.recipes
