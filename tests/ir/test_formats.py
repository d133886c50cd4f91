"""Weight formats: what is stored, how far it is from the weight, and the linear that reads it."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.ir import build, ops
from ingot.ir import recipe as r
from ingot.ir.errors import CheckpointError, InternalError, OptionError, VerifyError
from ingot.ir.formats import (
    ELEMENTS,
    FORMATS,
    SHARED_PARTS,
    Activations,
    Format,
    Scales,
    dequantize,
    find_format,
    quantize,
    register_format,
)
from ingot.ir.mesh import ranks
from ingot.ir.numerics.quantized_weights import weight_breach
from ingot.ir.numerics.tolerances import TOLERANCES, compare
from ingot.ir.program import Program, Stage
from ingot.ir.recipe import Recipe, source
from ingot.ir.types import Dim, Split, TensorType

pytestmark = pytest.mark.one_in_file(3)

INTEGERS = {
    name: format for name, format in FORMATS.items() if format.element in ("i8", "u8", "u4") and not format.activations
}
EACH = pytest.mark.parametrize("format", INTEGERS.values(), ids=INTEGERS)


def matrix(seed: int, rows: int = 6, inner: int = 256) -> torch.Tensor:
    """Rows of very different sizes, of one sign only, and of nothing at all."""
    weight = torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed))
    weight = weight * torch.tensor([1e-4, 1.0, 100.0, 1.0, 1.0, 0.0])[:rows, None]
    weight[3 % rows], weight[4 % rows] = weight[3 % rows].abs() + 1, -weight[4 % rows].abs() - 1
    return weight


def elements(weight: torch.Tensor, format: Format) -> list[list[int]]:
    """Unpacked in plain Python."""
    if format.packing == "plain":
        return [[int(value) for value in row] for row in weight]
    return [[nibble for byte in row for nibble in (int(byte) % 16, int(byte) // 16)] for row in weight]


@EACH
def test_the_parts_are_what_the_format_says(format: Format) -> None:
    weight = matrix(0)
    parts = quantize(weight, format)
    types = format.types((6, 256), torch.float32)
    assert tuple(parts) == tuple(types) == format.parts
    for name, part in parts.items():
        assert types[name].mismatch(part.contiguous()) is None
    found = elements(parts["weight"], format)
    low, high = ELEMENTS[format.element].low, ELEMENTS[format.element].high
    assert {len(row) for row in found} == {256}
    assert low <= min(map(min, found)) and max(map(max, found)) == high, "the range is used up"


@EACH
@pytest.mark.parametrize("seed", range(3))
def test_a_value_is_off_by_half_a_step(format: Format, seed: int) -> None:
    """Element by element in Python, without the code under test: x = (element - zero) * scale."""
    weight = matrix(seed)
    parts = quantize(weight, format)
    (level,) = format.levels
    group = level.columns or 256
    found = elements(parts["weight"], format)
    low, high = ELEMENTS[format.element].low, ELEMENTS[format.element].high
    for i, row in enumerate(found):
        for j, element in enumerate(row):
            place = (i if level.rows else 0, j // group)
            scale = float(parts["scales"][place])
            zero = int(parts["zeros"][place]) if level.zeros else 0
            # Rounding the zero point moves a range by up to half a step, so its ends may be cut by as much.
            steps = 1.0 if level.zeros and element in (low, high) else 0.5
            assert abs((element - zero) * scale - float(weight[i, j])) <= steps * 1.001 * scale
    assert bool((dequantize(parts, format)[5] == 0).all()), "zero is exact"


def _named(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    return {"weight": parts["weight"], "scales": parts["scales"], "zeros": parts.get("zeros")}


@EACH
def test_dequantizing_is_the_formula(format: Format) -> None:
    parts = quantize(matrix(1), format)
    found = torch.tensor(elements(parts["weight"], format), dtype=torch.float64)
    width = 256 // parts["scales"].shape[1]
    spread = [parts[name].double().repeat_interleave(width, 1) for name in format.parts[1:]]
    expected = (found - (spread[1] if format.levels[0].zeros else 0)) * spread[0]
    assert torch.equal(dequantize(parts, format, torch.float64), expected)
    assert compare(dequantize(parts, format), expected, torch.float32) is None


@given(
    name=st.sampled_from(sorted(INTEGERS)),
    rows=st.integers(1, 5),
    groups=st.integers(1, 3),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_quantizing_what_was_dequantized_changes_nothing(
    name: str, rows: int, groups: int, exponent: int, seed: int
) -> None:
    format = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, groups * (format.levels[0].columns or 7), generator=generator) * 2.0**exponent
    parts = quantize(weight, format)
    once = dequantize(parts, format)
    assert bool(once.isfinite().all())
    if not format.levels[0].zeros:
        assert torch.equal(quantize(once, format)["weight"], parts["weight"])
    # With a zero point the range may shrink by a cut end; it never grows, so a step at most is lost again.
    twice = dequantize(quantize(once, format), format)
    assert bool(((twice - once).abs() <= float(parts["scales"].max()) * 1.001).all())


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.row_by_row and one.granule(0) == 1])
def test_rows_may_be_merged_before_or_after(name: str) -> None:
    """What merge-linears relies on: the parts of a merged weight are the merged parts."""
    a, b = source("a"), source("b")
    stored = {"a": matrix(0), "b": matrix(1) * 7}
    merged = r.quantize(r.concat([a, b]), name)
    for part, first in r.quantize(a, name).items():
        after = r.concat([first, r.quantize(b, name)[part]])
        assert torch.equal(merged[part].execute(stored.__getitem__), after.execute(stored.__getitem__))


@pytest.mark.parametrize("at_once", [1, 640, 1 << 14])
@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.levels and not one.rotated])
def test_a_large_weight_is_quantized_some_rows_at_once(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts are those of all rows at once, bit for bit."""
    one = FORMATS[name]
    if set(one.parts) & SHARED_PARTS:
        pytest.skip("the weight alone does not determine the parts")
    matrix = torch.randn(300, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    if one.obstacle((300, 256)):
        matrix = matrix[:256]
    wanted = quantize(matrix, one)
    monkeypatch.setattr("ingot.ir.formats.format._ELEMENTS_AT_ONCE", at_once)
    found = quantize(matrix, one)
    assert list(found) == list(wanted)
    for part, tensor in wanted.items():
        assert (found[part].dtype, found[part].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[part].view(torch.uint8), tensor.view(torch.uint8)), part


def test_one_scale_for_all_rows_does_not_merge() -> None:
    a, b = source("a"), source("b")
    stored = {"a": matrix(0), "b": matrix(1) * 7}
    before = r.quantize(r.concat([a, b]), "int8_tensor")["weight"].execute(stored.__getitem__)
    after = r.concat([r.quantize(part, "int8_tensor")["weight"] for part in (a, b)]).execute(stored.__getitem__)
    assert not torch.equal(before, after) and not FORMATS["int8_tensor"].row_by_row


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@EACH
def test_what_has_no_scale_is_an_error(format: Format, bad: float) -> None:
    weight = matrix(0)
    weight[1, 77] = bad
    with pytest.raises(CheckpointError, match=r"recipe step 'quantize' .* NaN, infinities") as caught:
        r.quantize(source("w"), format.name)["weight"].execute(lambda _: weight)
    assert 'source(name="w")' in caught.value.where


@pytest.mark.parametrize("name", ["int4", "int8_g16", "INT8", ""])
def test_an_unknown_format_is_an_error(name: str) -> None:
    with pytest.raises(OptionError, match=f"unknown weight format '{name}'") as caught:
        find_format(name)
    assert caught.value.expected == ", ".join(FORMATS)


def test_a_format_is_frozen_and_named_once() -> None:
    assert all(name == format.name for name, format in FORMATS.items())
    assert len({replace(format, name="") for format in FORMATS.values()}) == len(FORMATS), "one name for one meaning"
    with pytest.raises(AttributeError):
        FORMATS["int8"].packing = "other"  # type: ignore[misc]


BLOCKS = Format("blocks", "i8", (Scales(rows=2, columns=64),))


def test_a_scale_may_belong_to_a_block_of_rows_and_columns() -> None:
    weight = matrix(2)
    parts = quantize(weight, BLOCKS)
    assert {name: part.shape for name, part in parts.items()} == {"weight": (6, 256), "scales": (3, 4)}
    for i in range(6):
        for j in range(0, 256, 7):
            scale = float(parts["scales"][i // 2, j // 64])
            block = weight.unflatten(0, (3, 2)).unflatten(2, (4, 64))[i // 2, :, j // 64]
            assert scale == pytest.approx(float(block.abs().max().clamp(min=1e-36)) / 127)
            assert abs(int(parts["weight"][i, j]) * scale - float(weight[i, j])) <= 0.501 * scale
    spread = parts["scales"].double().repeat_interleave(2, 0).repeat_interleave(64, 1)
    found = dequantize(parts, BLOCKS, torch.float64)
    assert torch.equal(found, parts["weight"].double() * spread)
    assert weight_breach(weight, parts, BLOCKS) is None
    assert BLOCKS.obstacle((5, 100)) is None, "the last block of an axis may be smaller"


def test_a_split_goes_through_no_block() -> None:
    """What is repeated is a run of the weight's own units: a longer one would repeat several in another order."""
    heads = Split("tp", 0, (6, 2), unit=2, repeat=True)
    assert BLOCKS.split(heads, "weight") == heads
    assert BLOCKS.split(heads, "scales") == Split("tp", 0, (3, 1), unit=1, repeat=True)
    assert BLOCKS.split(Split("tp", 0, unit=3, repeat=True), "weight") == Split("tp", 0, unit=6)
    assert BLOCKS.split(Split("tp", 1, unit=48), "scales") == Split("tp", 1, unit=3)
    assert BLOCKS.split(None, "weight") is None and FORMATS["int8_tensor"].split(heads, "scales") is None
    with pytest.raises(VerifyError, match="3 of a merged weight are no multiple of 2"):
        BLOCKS.split(Split("tp", 0, (3, 3)), "scales")


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (Format("int8", "i8", (Scales(),)), "is defined twice"),
        (Format("new", "i8", (Scales(),), packing="none"), "names the packing 'none', which is none of"),
        (Format("new", "i9", (Scales(),)), "has elements 'i9', which are none of kept, i8, u8, i4, u4"),
        (Format("new", "i8"), "has 0 levels of scales for elements 'i8'"),
        (Format("new", "i8", (Scales(), Scales(), Scales())), "has 3 levels of scales for elements 'i8'"),
        (Format("new", "kept", (Scales(),)), "has 1 levels of scales for elements 'kept'"),
        (Format("new", "i8", (Scales(),), Activations("i9")), "has activations 'i9', which are none of i8, u8"),
        (Format("new", "i8", (Scales(),), Activations("i8", dynamic=False)), "has static activations without a stored"),
        (Format("new", "i8", (Scales(), Scales(zeros=True))), "has zero points or offsets on its second level"),
        (Format("new", "i8", (Scales(dtype=torch.float64),)), "has scales of a dtype that is none of f32, f16"),
        (Format("new", ordered=True), "reorders the columns of elements without scales"),
        (Format("new/1", "i8", (Scales(),)), "has a slash in its name"),
    ],
)
def test_a_format_that_is_not_sound_is_refused(made: Format, problem: str) -> None:
    with pytest.raises(InternalError, match=f"the format '{made.name}' {problem}"):
        register_format(made)
    assert FORMATS.get(made.name) is not made


# --- shards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4_g32_asym", "int8_g64"])
def test_a_shard_of_whole_groups_is_the_shards_own(name: str) -> None:
    """Along the rows' elements: quantizing a part gives the part of what was quantized."""
    stored = {"w": matrix(0)}
    own = r.quantize(r.shard(source("w"), "tp", 1), name)
    for part, whole in r.quantize(source("w"), name).items():
        for rank in ranks({"tp": 2}):
            found = r.shard(whole, "tp", 1).for_rank(rank).execute(stored.__getitem__)
            assert torch.equal(found, own[part].for_rank(rank).execute(stored.__getitem__))


@pytest.mark.parametrize("part", ["weight", "scales", "zeros"])
def test_a_shard_that_cuts_a_group_is_refused(part: str) -> None:
    """256 elements over 8 ranks are 32 each: half a group of 64."""
    rank = ranks({"tp": 8})[0]
    recipe = r.shard(r.quantize(source("w"), "int4_g64_asym")[part], "tp", 1).for_rank(rank)
    with pytest.raises(CheckpointError, match="a shard of 256 elements over 8 ranks is no multiple of the group of 64"):
        recipe.execute(lambda _: matrix(0))
    r.shard(r.quantize(source("w"), "int4_g32_asym")[part], "tp", 1).for_rank(rank).execute(lambda _: matrix(0))


def test_the_steps_that_several_params_share() -> None:
    first, second = (r.quantize(source(name), "int4_g32_asym") for name in "ab")
    recipe = r.concat([first["scales"], r.cast(second["scales"], torch.float16), source("c")])
    assert recipe.shared_steps() == {replace(parts["weight"], output="") for parts in (first, second)}
    assert source("c").shared_steps() == frozenset()
    assert all(isinstance(step, Recipe) and step.output == "" for step in recipe.shared_steps())


def test_a_packed_weight_tells_its_sources_shape() -> None:
    parts = r.quantize(r.cast(source("w"), torch.float32), "int4_g32_asym")
    assert parts["weight"].source_shapes((6, 128)) == {"w": (6, 256)}
    assert parts["scales"].source_shapes((6, 8)) == {}


# --- the linear ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@EACH
def test_quant_linear_is_a_float64_product(format: Format, biased: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(5, 256, generator=generator).to(dtype)
    bias = torch.randn(6, generator=generator).to(dtype) if biased else None
    parts = quantize(matrix(0), format)
    width = 256 // parts["scales"].shape[1]
    spread = [parts[name].double().repeat_interleave(width, 1) for name in format.parts[1:]]
    full = (
        torch.tensor(elements(parts["weight"], format)).double() - (spread[1] if format.levels[0].zeros else 0)
    ) * spread[0]
    expected = x.double() @ full.T + (0 if bias is None else bias.double())
    found = ops.quant_linear.reference(x, *_named(parts).values(), bias, format=format.name)
    assert found.dtype == dtype
    # Sums of 256 products of a weight of size 100: the table's float32 atol is for sums of size one.
    problem = compare(found, expected, dtype, factor=1000 if dtype in (torch.float32, torch.float64) else 1)
    assert problem is None, problem


X, WEIGHT = TensorType(torch.float32, ("T", 64)), TensorType(torch.uint8, (24, 32))
PER_CHANNEL = TensorType(torch.int8, (24, 64)), TensorType(torch.float32, (24, 1))
SCALES, ZEROS = TensorType(torch.float32, (24, 2)), TensorType(torch.uint8, (24, 2))


def call(*types: TensorType | None, format: str = "int4_g32_asym") -> TensorType:
    program = Program("main", Stage.QUANTIZED, {"T": Dim("T", 1, 8)})
    args = [None if one is None else program.add_input(f"in{i}", one) for i, one in enumerate(types)]
    found = build.call(program, ops.quant_linear.overload, args, {"format": format}).meta["type"]
    assert isinstance(found, TensorType)
    return found


def test_its_type() -> None:
    assert call(X, WEIGHT, SCALES, ZEROS) == TensorType(torch.float32, ("T", 24))
    assert call(replace(X, dtype=torch.bfloat16), WEIGHT, SCALES, ZEROS) == TensorType(torch.bfloat16, ("T", 24))
    assert call(X, *PER_CHANNEL, format="int8") == TensorType(torch.float32, ("T", 24))


@pytest.mark.parametrize(
    ("types", "format", "message"),
    [
        ((X, WEIGHT, SCALES), "int4_g32_asym", "has weight, scales, zeros, and weight, scales are given"),
        ((X, *PER_CHANNEL, ZEROS), "int8", "has weight, scales, and weight, scales, zeros are given"),
        ((X, WEIGHT, SCALES, replace(ZEROS, shape=(24, 1))), "int4_g32_asym", r"has zeros u8\[24, 2\]"),
        ((X, WEIGHT, replace(SCALES, shape=(24, 1)), ZEROS), "int4_g32_asym", r"has scales f32\[24, 2\]"),
        ((X, WEIGHT, replace(SCALES, dtype=torch.float16), ZEROS), "int4_g32_asym", r"has scales f32\[24, 2\]"),
        ((X, replace(WEIGHT, shape=(24, 64)), SCALES, ZEROS), "int4_g32_asym", r"has weight u8\[24, 32\]"),
        ((X, WEIGHT, SCALES, ZEROS), "int4_g64_asym", r"has scales f32\[24, 1\]"),
        ((X, WEIGHT, SCALES, ZEROS), "int4_g128_asym", "no multiple of the group of 128"),
        ((X, WEIGHT, SCALES, ZEROS), "int4_g31_asym", "unknown weight format 'int4_g31_asym'"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(types: tuple[TensorType, ...], format: str, message: str) -> None:
    with pytest.raises((VerifyError, OptionError), match=message):
        call(*types, format=format)
