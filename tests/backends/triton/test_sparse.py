"""An indexer's choice and attention over it, by Triton kernels against the references of the ops."""

from typing import Any

import pytest
import torch
from call_cases import cases
from one_call import OneCall
from op_values import ints
from triton_schedules import DEVICE, TESTED, new_schedule, run_lowering

from ingot.backends.triton.launches import evaluate
from ingot.backends.triton.lower.attention import choose as lower_choose
from ingot.backends.triton.lower.call import Call, Refused
from ingot.backends.triton.lower.table import LOWERINGS
from ingot.backends.triton.schedule import Value
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS
from ingot.ir.types import TensorType

CHOOSE, SPARSE = "paged_choose_positions", "sparse_attention"
MANY = (65, 8192)
CLASSES = {"few": ((1, 16), False), "many": (MANY, False), "invariant": ((1, 16), True)}
# (tokens fed, positions before): a prompt, decoding with long contexts and short ones, nothing fed.
MIX = [(5, 3), (1, 130), (0, 9), (3, 61), (1, 0), (1, 40)]


def rows(mix: list[tuple[int, int]], page: int, behind: int = 3) -> tuple[tuple[torch.Tensor, ...], int, int]:
    """(page table, q_starts, q_lens, kv_lens), tokens of the step with padding, pages.

    Page 0 belongs to no sequence.
    """
    lens, totals = ints(*(fed for fed, _ in mix)), ints(*(fed + before for fed, before in mix))
    starts = (lens.cumsum(0) - lens + 1).int()
    width = -(-int(totals.max()) // page) + 1
    pages = torch.randperm(len(mix) * width, generator=torch.Generator().manual_seed(1)).int() + 1
    return (pages.view(len(mix), width), starts, lens, totals), int(lens.sum()) + 1 + behind, len(pages) + 1


def written(cache: torch.Tensor, lens: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The cache with NaN wherever no sequence has a position."""
    table, _, _, totals = lens
    page = cache.shape[2]
    held = torch.zeros(cache.shape[0], page, dtype=torch.bool)
    for pages, total in zip(table, totals.tolist(), strict=True):
        for place in range(total):
            held[pages[place // page], place % page] = True
    return cache.masked_fill(~held[:, None, :, None, None], torch.nan)


def whole(g: torch.Generator, most: int, *shape: int) -> torch.Tensor:
    """Whole numbers, of which sums are exact in any order, so that equal scores are equal bits."""
    return torch.randint(-most, most + 1, shape, generator=g).float()


def indexed(
    mix: list[tuple[int, int]], dtype: torch.dtype, *, heads: int = 3, width: int = 10, page: int = 7, most: int = 2
) -> list[Any]:
    g = torch.Generator().manual_seed(len(mix))
    lens, tokens, pages = rows(mix, page)
    keys = written(whole(g, most, pages, 1, page, 1, width), lens).to(dtype)
    # Queries are a part of a wider product, as behind a merged matmul.
    q = whole(g, most, tokens, heads, width + 3).to(dtype)[..., :width]
    return [q, keys, whole(g, most, tokens, heads), *lens]


def quick(op: str, dtype: torch.dtype) -> list[OneCall]:
    """All calls on a GPU; the interpreter, which is slow, gets small ones."""
    return [call for call in cases(op, dtype) if DEVICE == "cuda" or call.args[0].numel() < 500]


def dims(args: list[Any], over: int) -> dict[str, int]:
    """The sizes of symbols; `over` is the place of the page table."""
    return {"T": len(args[0]), "B": len(args[over])}


def chosen(args: list[Any], top_k: int, tokens: tuple[int, int], invariant: bool = False) -> torch.Tensor:
    sizes = {**dims(args, 3), "P": args[3].shape[1]}
    # With so few multiprocessors, a few programs share a token, each with several blocks of positions.
    (found,) = run_lowering(
        OPS[CHOOSE], LOWERINGS[CHOOSE], args, {"top_k": top_k}, tokens=tokens, dims=sizes, cores=8, invariant=invariant
    )
    return found.cpu()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("top_k", [1, 6, 40, 150])
def test_the_same_positions_with_many_ties(top_k: int, dtype: torch.dtype, kind: str) -> None:
    """Of contexts above and below `top_k`, at odd sizes: scores are whole numbers, and most equal another."""
    args = indexed(MIX, dtype)
    expected = OPS[CHOOSE].reference(*args, top_k=top_k)
    assert torch.equal(chosen(args, top_k, *CLASSES[kind]), expected)


@pytest.mark.parametrize("dtype", TESTED)
def test_scores_of_any_kind_and_rows_of_several_blocks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative ones, both zeros, infinite ones and NaN, which is the greatest; rows of more than one block."""
    monkeypatch.setattr(lower_choose, "_SCORES", 32)
    args = indexed([(2, 120), (1, 95)], dtype, heads=2, width=5, most=1)
    _, keys, weights, table = args[:4]
    page = keys.shape[2]
    for number, place in enumerate((3, 50, 51, 90)):
        value = (torch.inf, torch.nan, torch.nan, -torch.inf)[number]
        keys[table[0, place // page], 0, place % page, 0, 0] = value
    expected = OPS[CHOOSE].reference(*args, top_k=33)
    assert {50, 51} <= set(expected[1].tolist())
    assert torch.equal(chosen(args, 33, (1, 16)), expected)
    assert bool((weights < 0).any())


def test_large_steps_take_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of which has memory for the scores of few tokens."""
    monkeypatch.setattr(lower_choose, "_ROUND", 4)
    args = indexed(MIX[:2], torch.float32)
    assert torch.equal(chosen(args, 6, (1, 16)), OPS[CHOOSE].reference(*args, top_k=6))


def test_memory_and_programs_of_large_steps() -> None:
    """Scores of 1024 tokens at most, and no program for a round that a step has no tokens for."""
    schedule = new_schedule(MANY, cores=132)
    ints_ = {name: TensorType(torch.int32, ("B",)) for name in ("q_starts", "q_lens", "kv_lens")}
    types = {
        "q": TensorType(torch.bfloat16, ("T", 64, 128)),
        "keys": TensorType(torch.bfloat16, ("pages", 1, 16, 1, 128)),
        "weights": TensorType(torch.float32, ("T", 64)),
        "page_table": TensorType(torch.int32, ("B", "P")),
        **ints_,
    }
    values = {name: Value(one, input=place) for place, (name, one) in enumerate(types.items())}
    LOWERINGS[CHOOSE](Call(CHOOSE, values, {"top_k": 2048}, (TensorType(torch.int32, ("T", 2048)),)), schedule)
    sizes = {"T": 1500, "B": 8, "P": 1000}
    (scratch,) = [one for one in schedule.buffers.values() if one.kind == "scratch"]
    assert [evaluate(size, sizes) for size in scratch.shape] == [1024, 16000]
    grids = [[evaluate(size, sizes) for size in launch.grid] for launch in schedule.launches]
    assert grids[:6] == [[1024, 1], [1024], [476, 2], [476], [0, 528], [0]] and len(grids) == 16


@pytest.mark.parametrize("dtype", TESTED)
def test_choices_of_samples(dtype: torch.dtype) -> None:
    for call in quick(CHOOSE, dtype):
        args = list(call.args)
        found = chosen(args, call.kwargs["top_k"], (1, 16))
        assert torch.equal(found, call.reference()[0])


def attended(args: list[Any], options: dict[str, Any], kind: str, cores: int = 132) -> torch.Tensor:
    tokens, invariant = CLASSES[kind]
    sizes = {**dims(args, 3), "P": args[3].shape[1]}
    (found,) = run_lowering(
        OPS[SPARSE], LOWERINGS[SPARSE], args, options, tokens=tokens, dims=sizes, cores=cores, invariant=invariant
    )
    return found.cpu()


def sparse(
    mix: list[tuple[int, int]], top_k: int, dtype: torch.dtype, heads: int, row: int, page: int = 7
) -> list[Any]:
    """q, a cache of latents, chosen positions, and the rows."""
    g = torch.Generator().manual_seed(7)
    index = indexed(mix, torch.float32, page=page)
    picked = OPS[CHOOSE].reference(*index, top_k=top_k)
    lens, tokens, pages = rows(mix, page)
    kv = written(torch.randn(pages, 1, page, 1, row, generator=g), lens).to(dtype)
    return [torch.randn(tokens, heads, row, generator=g).to(dtype), kv, picked, *lens[:3]]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize(("top_k", "heads", "row", "value"), [(6, 3, 10, 7), (70, 20, 40, 32), (150, 64, 24, 16)])
def test_attention_over_a_choice(top_k: int, heads: int, row: int, value: int, dtype: torch.dtype, kind: str) -> None:
    """Heads of odd sizes, more than a tile has, keys of two tiles; lists that are full, short and split."""
    args, options = sparse(MIX, top_k, dtype, heads, row), {"scale": 0.3, "value_width": value}
    found, expected = attended(args, options, kind), OPS[SPARSE].reference(*args, **options)
    problem = compare(found, expected, expected.dtype, factor=4.0)
    assert problem is None, problem
    padding = [0, *range(len(expected) - 3, len(expected))]
    assert not bool(found[padding].any())


@pytest.mark.parametrize("dtype", TESTED)
def test_attention_over_every_form_of_cache(dtype: torch.dtype) -> None:
    """Also of eight bits, with a scale and with scales per token."""
    for call in quick(SPARSE, dtype):
        found = attended(list(call.args), dict(call.kwargs), "few")
        (expected,) = call.reference()
        problem = compare(found, expected, expected.dtype, factor=4.0)
        assert problem is None, f"{call.kwargs}: {problem}"


def test_a_row_has_the_same_bits_in_all_steps_of_deterministic_mode() -> None:
    """However many tokens are beside it, and in whichever class."""
    args, options = sparse(MIX, 70, torch.float32, 3, 40), {"scale": 0.3, "value_width": 32}
    together = attended(args, options, "invariant")
    q, kv, picked, table, starts, _ = args
    for sequence in (1, 4, 5):
        token = int(starts[sequence])
        alone = [q[token : token + 1], kv, picked[token : token + 1], table[sequence : sequence + 1], ints(0), ints(1)]
        assert torch.equal(attended(alone, options, "invariant")[0], together[token])


def test_few_tokens_divide_their_lists() -> None:
    """As many splits as multiprocessors have room for; none where rows must have one order, or tokens are many."""

    def splits(tokens: tuple[int, int], invariant: bool = False) -> tuple[int, int]:
        schedule = new_schedule(tokens, cores=132, invariant=invariant)
        lens = {name: TensorType(torch.int32, ("B",)) for name in ("q_starts", "q_lens")}
        types = {
            "q": TensorType(torch.bfloat16, ("T", 128, 576)),
            "kv": TensorType(torch.bfloat16, ("pages", 1, 16, 1, 576)),
            "chosen": TensorType(torch.int32, ("T", 2048)),
            "page_table": TensorType(torch.int32, ("B", "P")),
            **lens,
        }
        values = {name: Value(one, input=place) for place, (name, one) in enumerate(types.items())}
        attributes = {"scale": 0.1, "value_width": 512}
        result = TensorType(torch.bfloat16, ("T", 128, 512))
        LOWERINGS[SPARSE](Call(SPARSE, values, attributes, (result,)), schedule)
        launch, *merges = schedule.launches
        most = launch.constants["SPLITS"].most
        assert len(merges) == int(most > 1)
        return launch.constants["FORM"].group, most

    assert [splits((1, 1)), splits((2, 16)), splits((17, 32)), splits(MANY)] == [(16, 16), (64, 4), (64, 2), (64, 1)]
    assert splits((1, 16), True) == splits(MANY, True) == (64, 1)


def test_refuses() -> None:
    def choice(heads: int = 4, width: int = 8, weights: torch.dtype = torch.float32, keys: Any = None) -> Call:
        lens = {name: TensorType(torch.int32, ("B",)) for name in ("q_starts", "q_lens", "kv_lens")}
        types = {
            "q": TensorType(torch.bfloat16, ("T", heads, width)),
            "keys": TensorType(keys or torch.bfloat16, ("pages", 1, 16, 1, width)),
            "weights": TensorType(weights, ("T", heads)),
            "page_table": TensorType(torch.int32, ("B", "P")),
            **lens,
        }
        values = {name: Value(one, input=place) for place, (name, one) in enumerate(types.items())}
        return Call(CHOOSE, values, {"top_k": 4}, (TensorType(torch.int32, ("T", 4)),))

    for call, reason in (
        (choice(heads=129), "129 heads of an indexer"),
        (choice(width=300), "keys of 300 elements"),
        (choice(weights=torch.float64), "weights of heads are not f32"),
        (choice(keys=torch.float32), "dtypes differ"),
    ):
        with pytest.raises(Refused, match=reason):
            LOWERINGS[CHOOSE](call, new_schedule())
    q, kv, picked, *lens = sparse(MIX[:1], 6, torch.float32, 3, 10)
    wide = picked.new_full((len(q), 8193), -1)
    with pytest.raises(Refused, match="8193 chosen positions"):
        attended([q, kv, wide, *lens], {"scale": 1.0, "value_width": 7}, "few")
