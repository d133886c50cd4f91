"""Weight recipes: each step against plain torch, and what holds of all of them."""

import contextlib
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from drawn import in_one_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.ir import recipe as r
from ingot.ir.errors import CheckpointError, ConfigError, IngotError, InternalError, VerifyError
from ingot.ir.mesh import Rank
from ingot.ir.parse import parse_recipe
from ingot.ir.recipe import STEPS, Recipe, source
from ingot.ir.stored import recipes as q
from ingot.ir.tables import make_table

FILES = {
    "a": torch.arange(24, dtype=torch.float32).view(4, 6),
    "b": -torch.arange(24, dtype=torch.float32).view(4, 6),
    "half": torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "rows": torch.randn(3, 128, generator=torch.Generator().manual_seed(2)) * torch.tensor([[1.0], [1e-4], [50.0]]),
    "square": torch.randn(5, 5, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "words": torch.tensor([[0x76543210], [0x0FEDCBA9]], dtype=torch.int32),
    "groups": torch.tensor([1, 0, 1, 0], dtype=torch.int32),
    "blocks": torch.tensor([[0x00, 0x40, *range(32)]], dtype=torch.uint8),  # 2.0 as a half, then bytes
}
A, B, HALF, ROWS, SQUARE, WORDS, GROUPS, BLOCKS = (FILES[name] for name in FILES)
a, b, half, rows, square, words, groups, blocks = (source(name) for name in FILES)
# The codes of four bits in WORDS.
NIBBLES = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 0], dtype=torch.uint8)


def quantized(tensor: torch.Tensor, top: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group by group in Python: 0 is among the values that a group can hold exactly."""
    rows = [row.split(group) for row in tensor.float()]
    weight, scales, zeros = [], [], []
    for part in (part for row in rows for part in row):
        low, high = part.min().clamp(max=0), part.max().clamp(min=0)
        scales.append((high - low) / top)
        zeros.append(torch.round(-low / scales[-1]))
        weight.append(torch.round(part / scales[-1] + zeros[-1]).clamp(0, top))
    shape = len(rows), -1
    return (
        torch.cat(weight).reshape(shape).to(torch.uint8),
        torch.stack(scales).reshape(shape),
        torch.stack(zeros).reshape(shape).to(torch.uint8),
    )


def symmetric(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row in Python."""
    scales = torch.stack([row.abs().max() / 127 for row in tensor.float()])[:, None]
    return torch.round(tensor.float() / scales).to(torch.int8), scales


def part(recipe: Recipe, dim: int, rank: int, world: int, segments: tuple[int, ...] = ()) -> Recipe:
    """The shard of one rank."""
    return r.shard(recipe, "tp", dim, segments).for_rank(Rank(rank, (("tp", rank, world),)))


ROPE: dict[str, r.Attr] = {"kind": "rope", "rope_type": "default", "positions": 7, "rotary_dim": 4, "theta": 1e4}
CASES: list[tuple[Recipe, Callable[[], torch.Tensor]]] = [
    (a, lambda: A),
    (r.take_slice(a, 1, 2, 5), lambda: A[:, 2:5]),
    (r.take_slice(a, 0, 0, 0), lambda: A[:0]),
    (r.take_slice(a, 1, 1, 2, every=3), lambda: A[:, [1, 4]]),
    (r.take_slice(half, 0, 1, 4, every=4), lambda: HALF[[1, 2, 3, 5, 6, 7]]),
    (r.take_slice(a, -1, 0, 2, every=6), lambda: A[:, :2]),
    (r.concat([a, b, a], 1), lambda: torch.cat([A, B, A], 1)),
    (r.concat([a]), lambda: A),
    (r.stack([a, b], 1), lambda: torch.stack([A, B], 1)),
    (r.reshape(a, (2, -1, 3)), lambda: A.view(2, 4, 3)),
    (r.permute(a, (1, 0)), lambda: A.T),
    (r.pad(a, 0, 7), lambda: torch.cat([A, torch.zeros(3, 6)])),
    (r.pad(half, -1, 5), lambda: HALF),
    (r.repeat(a, 0, 3), lambda: torch.cat([A[i : i + 1] for i in range(4) for _ in range(3)])),
    (r.affine(half, 1.0, 1.0), lambda: (HALF.float() + 1).bfloat16()),
    (r.affine(a, -0.5, 1e-3), lambda: A * -0.5 + 1e-3),
    (r.add(a, r.affine(a, 2.0, 1.0)), lambda: A + (A * 2 + 1)),
    (r.normalize(half), lambda: (HALF.double() / HALF.double().square().sum(1, keepdim=True).sqrt()).bfloat16()),
    (r.normalize(r.affine(a, 0.0, 0.0)), lambda: torch.zeros(4, 6)),
    (r.add(a, r.affine(a, 2.0, 0.0)), lambda: A * 3),
    (r.matmul(half, square), lambda: (HALF.double() @ SQUARE.double()).bfloat16()),
    (r.table(**ROPE), lambda: make_table(ROPE)),
    (part(a, 0, 1, 2), lambda: A[2:]),
    (part(a, 1, 2, 3), lambda: A[:, 4:]),
    (part(a, 1, 0, 2, (4, 2)), lambda: A[:, [0, 1, 4]]),
    (r.cast(a, torch.float16), lambda: A.half()),
    (r.cast(half, torch.float64), lambda: HALF.double()),
    (r.split(a, 1, (1, 3, 2))[0], lambda: A[:, :1]),
    (r.split(a, 1, (1, 3, 2))[1], lambda: A[:, 1:4]),
    (r.split(a, 0, (3, 1))[1], lambda: A[3:]),
    (r.quantize(a, "int8")["weight"], lambda: symmetric(A)[0]),
    (r.quantize(half, "int8")["scales"], lambda: symmetric(HALF)[1]),
    (r.quantize(rows, "int8_g32")["weight"], lambda: quantized(ROWS, 255, 32)[0]),
    (r.quantize(rows, "int4_g64_asym")["scales"], lambda: quantized(ROWS, 15, 64)[1]),
    (r.quantize(rows, "int4_g64_asym")["zeros"], lambda: quantized(ROWS, 15, 64)[2]),
    (r.dequantize(r.quantize(b, "int8"), "int8"), lambda: (lambda w, s: w * s)(*symmetric(B))),
    (
        r.dequantize(r.quantize(rows, "int4_g32_asym"), "int4_g32_asym"),
        lambda: (lambda w, s, z: ((w.view(3, 4, 32) - z.float()[..., None]) * s[..., None]).view(3, 128))(
            *quantized(ROWS, 15, 32)
        ),
    ),
    (q.unpack(words, 4, 1), lambda: NIBBLES.view(2, 8)),
    (q.unpack(words, 4, 0, 15), lambda: NIBBLES[:15].view(15, 1)),
    (q.unpack(words, 2, 1, 3), lambda: torch.tensor([[0, 0, 1], [1, 2, 2]], dtype=torch.uint8)),
    (q.unpack(words, 3, 1, 2), lambda: torch.tensor([[0, 2], [1, 5]], dtype=torch.uint8)),
    (q.unpack(words, 4, 1, order=(1, 0)), lambda: NIBBLES.view(2, 4, 2).flip(-1).reshape(2, 8)),
    (q.pack(q.unpack(words, 4, 1), "low_first"), lambda: WORDS.view(torch.uint8)),
    (q.bitcast(q.unpack(words, 8, 1), torch.int8), lambda: WORDS.view(torch.int8)),
    (q.shift(q.unpack(words, 4, 1), 9, 4), lambda: (NIBBLES.view(2, 8) + 9) % 16),
    (q.group_order(groups, 2), lambda: torch.tensor([1, 3, 0, 2], dtype=torch.int32)),
    (q.gather(a, q.group_order(groups, 2), 0), lambda: A[[1, 3, 0, 2]]),
    (q.check_scales(a, zero=True), lambda: A),
    (q.check_scales(half), lambda: HALF),
    (q.multiply(half, r.take_slice(half, 1, 0, 1)), lambda: HALF.float() * HALF[:, :1].float()),
    (q.reciprocal(half), lambda: 1 / HALF.float()),
    (q.gguf_blocks(blocks, "Q8_0")["weight"], lambda: torch.arange(32, dtype=torch.int8).view(1, 32)),
    (q.gguf_blocks(blocks, "Q8_0")["scales"], lambda: torch.tensor([[2.0]], dtype=torch.float16)),
    (q.lookup(a, q.unpack(words, 4, 1)), lambda: A.flatten()[NIBBLES.view(2, 8).long()]),
]


@pytest.mark.parametrize(("recipe", "expected"), CASES, ids=lambda case: str(case) if isinstance(case, Recipe) else "")
def test_step_is_torchs(recipe: Recipe, expected: Callable[[], torch.Tensor]) -> None:
    before = {name: tensor.clone() for name, tensor in FILES.items()}
    found, wanted = recipe.execute(FILES.__getitem__), expected()
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    assert all(torch.equal(FILES[name], before[name]) for name in FILES)
    assert parse_recipe(str(recipe)) == recipe


def test_a_slice_of_runs_is_row_major() -> None:
    """Also one element of each run, whose view would have strides."""
    for begin, end in ((0, 1), (1, 2), (0, 2)):
        assert r.take_slice(a, 0, begin, end, every=2).execute(FILES.__getitem__).is_contiguous()


def test_every_step_is_tested_here() -> None:
    assert {recipe.step for recipe, _ in CASES} == set(STEPS)


def test_a_step_with_several_results_runs_once() -> None:
    reads: list[str] = []

    def read(name: str) -> torch.Tensor:
        reads.append(name)
        return FILES[name]

    memo: dict[Recipe, r.Results] = {}
    parts = [part.execute(read, memo) for part in r.split(a, 0, (1, 2, 1))]
    assert reads == ["a"] and torch.equal(torch.cat(parts), A)
    assert r.dequantize(r.quantize(a, "int8"), "int8").execute(read, memo).shape == A.shape
    assert str(r.split(a, 0, (3, 1))[1]) == 'split(source(name="a"), dim=0, sizes=[3, 1]).part1'
    assert len({part.digest() for part in r.split(a, 0, (1, 2, 1))}) == 3


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe("split", (a,), (("dim", 0), ("sizes", (3, 1)))), "has the results part0, part1"),
        (Recipe("split", (a,), (("dim", 0), ("sizes", (3, 1))), "part2"), "has the results part0, part1"),
        (Recipe("quantize", (rows,), (("format", "int4_g64_asym"),), "codes"), "has the results weight, scales, zeros"),
        (Recipe("quantize", (a,), (("format", "int8"),), "zeros"), "has the results weight, scales"),
        (replace(r.concat([a, b]), output="left"), "has one result"),
    ],
)
def test_a_result_that_a_step_has_not_is_an_error(recipe: Recipe, message: str) -> None:
    with pytest.raises(VerifyError, match=f"recipe step '{recipe.step}' {message}"):
        recipe.execute(FILES.__getitem__)


@pytest.mark.parametrize(
    ("recipe", "shape", "sources"),
    [
        (a, (4, 6), {"a": (4, 6)}),
        (r.cast(r.affine(a, 1.0, 1.0), torch.float32), (4, 6), {"a": (4, 6)}),
        (r.take_slice(a, 1, 2, 5), (4, 3), {"a": (4, 5)}),
        (r.take_slice(a, 1, 0, 2, every=3), (4, 4), {"a": (4, 6)}),
        (r.take_slice(r.cast(a, torch.float32), 0, 1, 3), (2, 6), {"a": (3, 6)}),
        (r.stack([a, b], 1), (4, 2, 6), {"a": (4, 6), "b": (4, 6)}),
        (r.concat([a, b]), (8, 6), {}),
        (r.permute(a, (1, 0)), (6, 4), {"a": (4, 6)}),
        (r.permute(r.take_slice(a, 1, 2, 5), (1, 0)), (3, 4), {"a": (4, 5)}),
        (r.reshape(a, (6, 4)), (6, 4), {}),
    ],
)
def test_source_shapes_are_told_where_the_steps_tell(
    recipe: Recipe, shape: tuple[int, ...], sources: dict[str, tuple[int, ...]]
) -> None:
    assert recipe.source_shapes(shape) == sources
    assert recipe.execute(FILES.__getitem__).shape == shape


def test_affine_and_matmul_round_once() -> None:
    # (1 + 2^-7) (1 + 2^-6) - 1: in bfloat16 the product loses its last term, which the difference can hold.
    close = torch.tensor([1 + 2**-7], dtype=torch.bfloat16)
    assert r.affine(source("x"), 1 + 2**-6, -1.0).execute(lambda _: close).item() == 2**-6 + 2**-7 + 2**-13
    # 10^8 + 1 - 10^8: in float32 the one is lost.
    row = {"x": torch.tensor([[1e8, 1.0, -1e8]]), "ones": torch.ones(3, 1)}
    assert r.matmul(source("x"), source("ones")).execute(row.__getitem__).item() == 1.0
    exact = torch.tensor([1.0 + 2**-50], dtype=torch.float64)
    assert r.affine(source("x"), 1.0, -1.0).execute(lambda _: exact).item() == 2.0**-50


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_a_merged_weight_reassemble(world: int, dim: int) -> None:
    """Each rank holds its part of q, of k and of v; ranks together hold the weight."""
    segments = (16, 4, 4)
    merged = torch.randn(24, 24, generator=torch.Generator().manual_seed(2))
    parts = [part(source("m"), dim, rank, world, segments).execute(lambda _: merged) for rank in range(world)]
    split = [own.split([size // world for size in segments], dim) for own in parts]
    whole = torch.cat([torch.cat(pieces, dim) for pieces in zip(*split, strict=True)], dim)
    assert torch.equal(whole, merged)
    plain = [part(source("m"), dim, rank, world).execute(lambda _: merged) for rank in range(world)]
    assert torch.equal(torch.cat(plain, dim), merged)


def test_a_rank_needs_a_place_on_the_axis() -> None:
    recipe = r.cast(r.concat([r.shard(a, "tp", 0), r.shard(b, "tp", 0)]), torch.float16)
    rank = Rank(1, (("tp", 1, 2), ("dp", 0, 1)))
    assert torch.equal(recipe.for_rank(rank).execute(FILES.__getitem__), torch.cat([A[2:], B[2:]]).half())
    assert recipe.inputs[0].inputs[0].attr("axis") == "tp" and a.for_rank(rank) is a
    with pytest.raises(VerifyError, match="rank 0 has no place on axis 'tp'"):
        recipe.for_rank(Rank(0, (("dp", 0, 2),)))


def test_memo_shares_steps() -> None:
    reads: list[str] = []

    def read(name: str) -> torch.Tensor:
        reads.append(name)
        return FILES[name]

    memo: dict[Recipe, r.Results] = {}
    merged = r.concat([source("a"), source("b")], 0)
    first = part(merged, 0, 0, 2).execute(read, memo)
    again = part(r.concat([source("a"), source("b")], 0), 0, 0, 2).execute(read, memo)
    assert first is again and reads == ["a", "b"]
    other = part(merged, 0, 1, 2).execute(read, memo)
    assert reads == ["a", "b"] and torch.equal(torch.cat([first, other]), torch.cat([A, B]))
    kept = memo[merged]
    assert isinstance(kept, torch.Tensor) and kept.shape == (8, 6)
    merged.execute(read)
    assert reads == ["a", "b", "a", "b"], "without a memo nothing is kept"


def test_sources_are_what_is_read() -> None:
    recipe = r.concat([r.cast(a, torch.float16), r.table(**ROPE), r.matmul(half, a)], 0)
    assert recipe.sources() == {"a", "half"}
    assert r.table(**ROPE).sources() == frozenset()


def test_a_recipe_reads_other_tensors() -> None:
    recipe = r.concat([r.cast(r.source("x.a"), torch.float16), r.table(**ROPE)], 0)
    assert recipe.renamed(lambda name: name.removeprefix("x.")) == r.concat([r.cast(a, torch.float16), r.table(**ROPE)])


def test_text_and_digest_are_stable() -> None:
    recipe = r.shard(r.concat([source("q"), r.affine(source("k"), 1, 1e-05)]), "tp", 0, (8, 4))
    assert str(recipe) == (
        'shard(concat(source(name="q"), affine(source(name="k"), offset=1e-05, scale=1.0), dim=0), '
        'axis="tp", dim=0, segments=[8, 4])'
    )
    # A change here gives every weight of every artifact a new identity.
    assert recipe.digest() == "06e128575ad80d8d31976f8187ab4c23cf180b842852e073e937885186e163d9"


@in_one_of(3)
def test_digest_does_not_depend_on_the_process() -> None:
    recipe = r.concat([a, r.table(**ROPE), b])
    code = f"from ingot.ir.parse import parse_recipe; print(parse_recipe({str(recipe)!r}).digest())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == recipe.digest()


def test_equal_recipes_are_one() -> None:
    assert r.concat([a, b]) == r.concat([source("a"), source("b")], 0)
    assert hash(r.concat([a, b])) == hash(r.concat([source("a"), source("b")], 0))
    assert r.concat([a, b]) != r.concat([b, a])
    assert r.affine(a, 2, 0) == r.affine(a, 2.0, 0.0) and str(r.affine(a, 2, 0)) == str(r.affine(a, 2.0, 0.0))
    assert r.table(theta=1.0, kind="rope") == r.table(kind="rope", theta=1.0)


LOST = source("not there")
BAD: list[tuple[Recipe, str]] = [
    (r.take_slice(a, 0, 2, 5), "'slice' cannot be applied to shapes ([4, 6])"),
    (r.take_slice(a, 2, 0, 1), "'slice' cannot be applied"),
    (r.take_slice(a, 0, 3, 2), "'slice' cannot be applied"),
    (r.take_slice(a, 1, 0, 2, every=4), "'slice' cannot be applied to shapes ([4, 6])"),
    (r.take_slice(a, 1, 1, 4, every=3), "'slice' cannot be applied to shapes ([4, 6])"),
    (r.take_slice(a, 1, 0, 0, every=0), "'slice' cannot be applied"),
    (r.take_slice(a, 2, 0, 1, every=1), "'slice' cannot be applied"),
    (r.concat([a, r.permute(b, (1, 0))]), "'concat' cannot be applied to shapes ([4, 6], [6, 4])"),
    (r.concat([]), "'concat' cannot be applied to shapes ()"),
    (r.stack([a, half]), "'stack' cannot be applied"),
    (r.reshape(a, (5, 5)), "'reshape' cannot be applied"),
    (r.permute(a, (0, 0)), "'permute' cannot be applied"),
    (r.pad(a, 0, 3), "'pad' cannot be applied"),
    (r.repeat(a, 0, -1), "'repeat' cannot be applied"),
    (r.matmul(a, b), "'matmul' cannot be applied"),
    (r.add(a, half), "'add' cannot be applied"),
    (r.shard(a, "tp", 0), "a shard step needs a rank: call for_rank before execute"),
    (part(a, 0, 0, 3), "segments [4] do not split 4 over 3 ranks"),
    (part(a, 0, 0, 2, (2, 1)), "segments [2, 1] do not split 4 over 2 ranks"),
    (part(a, 0, 0, 2, (3, 1)), "segments [3, 1] do not split 4 over 2 ranks"),
    (part(a, 0, 2, 2), "rank 2 is none of 2"),
    (part(a, 0, -1, 2), "rank -1 is none of 2"),
    (part(a, 0, 0, 0), "rank 0 is none of 0"),
    (part(a, 5, 0, 2), "'shard' cannot be applied"),
    (r.split(a, 0, (3, 2))[0], "'split' cannot be applied to shapes ([4, 6])"),
    (
        r.dequantize({"weight": a, "scales": r.permute(a, (1, 0))}, "int8"),
        "'dequantize' cannot be applied to shapes ([4, 6], [6, 4])",
    ),
    (r.quantize(a, "int4_g32_asym")["weight"], "rows of 6 elements are no multiple of the group of 32"),
    (parse_recipe('slice(source(name="a"))'), "'slice' cannot be applied"),
    (parse_recipe('slice(source(name="a"), dim="x", begin=0, end=1)'), "'slice' cannot be applied"),
    (parse_recipe('cast(source(name="a"), dtype="f33")'), "'cast' cannot be applied"),
    (parse_recipe("permute(dims=[0])"), "'permute' cannot be applied to shapes ()"),
    (r.table(kind="rope", rope_type="default"), "'table' cannot be applied to shapes (): KeyError: "),
    (q.check_scales(a), "1 of 24 scales are zero, the first at [0, 0]"),
    (q.check_scales(r.affine(a, math.inf, 0.0)), "24 of 24 scales are NaN or infinite, the first at [0, 0]"),
    (q.check_scales(r.affine(a, 1e-40, 0.0), zero=True), "23 of 24 scales are subnormal, the first at [0, 1]"),
    (q.unpack(words, 4, 1, 9), "8 codes are stored, and 9 are needed"),
    (q.group_order(groups, 3), "the groups of the columns are not 2 groups of 3"),
    (q.bitcast(words, torch.uint8), "has another size than torch.int32"),
]


@pytest.mark.parametrize(("recipe", "message"), BAD, ids=[str(recipe)[:60] for recipe, _ in BAD])
def test_a_step_that_does_not_fit_is_an_error_with_the_recipe(recipe: Recipe, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        recipe.execute(FILES.__getitem__)
    assert message in caught.value.what
    assert caught.value.where == str(replace(recipe, output=""))


def test_a_source_without_a_name_is_an_error() -> None:
    for use in (lambda: Recipe("source").execute(FILES.__getitem__), Recipe("source").sources):
        with pytest.raises(VerifyError, match="recipe step 'source' has no 'name'"):
            use()


def test_unknown_steps_and_tables_are_refused() -> None:
    with pytest.raises(VerifyError, match="unknown recipe step 'sauce'"):
        Recipe("sauce")
    with pytest.raises(ConfigError, match="unknown table"):
        r.table(kind="wavelet").execute(FILES.__getitem__)


def test_an_error_of_the_reader_comes_through() -> None:
    """A source that is not there is for the loader to say, in its own words."""

    def read(name: str) -> torch.Tensor:
        raise CheckpointError(f"no tensor '{name}'")

    with pytest.raises(CheckpointError, match="no tensor 'not there'"):
        r.concat([LOST]).execute(read)


NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.booleans(), st.none())
ATTRS = st.recursive(
    st.one_of(NUMBERS, st.text(max_size=8)), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4
)
KEYS = st.sampled_from(["dim", "begin", "rope_type", "_", "K9", "a.b", "x-y", "infinite", "nano", "shard"])


@st.composite
def recipes(draw: st.DrawFn, depth: int = 2) -> Recipe:
    inputs = draw(st.lists(recipes(depth - 1), max_size=2)) if depth else []
    attrs = draw(st.dictionaries(KEYS, ATTRS, max_size=2))
    output = draw(st.sampled_from(["", "", "left", "q_a.b-c"]))
    return Recipe(draw(st.sampled_from(sorted(STEPS))), tuple(inputs), tuple(attrs.items()), output)


@settings(max_examples=150, deadline=None)
@given(recipes())
def test_text_reads_back(recipe: Recipe) -> None:
    again = parse_recipe(str(recipe))
    assert again == recipe and str(again) == str(recipe) and hash(again) == hash(recipe)


def same_kind(left: object, right: object) -> bool:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(same_kind(*pair) for pair in zip(left, right, strict=True))
    return type(left) is type(right)


@settings(max_examples=100, deadline=None)
@given(ATTRS)
def test_attributes_keep_their_kind(value: r.Attr) -> None:
    """True is not 1 and 1.0 is not 1, though Python calls them equal."""
    again = parse_recipe(str(Recipe("table", (), (("value", value),)))).attr("value")
    assert again == value and same_kind(again, value)


def test_nan_reads_back() -> None:
    value = parse_recipe(str(Recipe("table", (), (("value", math.nan),)))).attr("value")
    assert isinstance(value, float) and math.isnan(value)


@settings(max_examples=100, deadline=None)
@given(recipes(depth=1))
def test_any_recipe_makes_a_tensor_or_an_error_of_ours(recipe: Recipe) -> None:
    with contextlib.suppress(IngotError):
        assert isinstance(recipe.execute(lambda _: A), torch.Tensor)


def test_a_step_that_is_registered_is_read_printed_and_executed() -> None:
    r.register_step("turned", lambda args, attrs: args[0].flip(int(str(attrs["dim"]))))
    try:
        recipe = parse_recipe('turned(source(name="a"), dim=0)')
        assert str(recipe) == 'turned(source(name="a"), dim=0)'
        assert recipe.execute(lambda _: torch.arange(3)).tolist() == [2, 1, 0]
        with pytest.raises(InternalError, match="the recipe step 'turned' is defined twice"):
            r.register_step("turned", STEPS["concat"])
    finally:
        del STEPS["turned"]
