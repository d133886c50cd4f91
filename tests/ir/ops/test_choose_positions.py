"""The indexer's choice against transformers' module, over a step and over a paged cache, and attention over it."""

from typing import Any

import pytest
import torch
from op_values import F32, F64, check, every_dtype, generator, ints, randn
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek_v32

from ingot.ir.errors import VerifyError
from ingot.ir.ops import OPS

HEADS, WIDTH = 14, 10


def arguments(dtype: torch.dtype, seed: int = 0) -> list[Any]:
    """Sequences of 9 and 4 tokens: queries, keys, weights, and the rows."""
    g = generator(seed)
    rows = ints(*range(9), *range(4)), ints(*[0] * 9, *[1] * 4)
    return [
        randn(g, dtype, 13, HEADS, WIDTH),
        randn(g, dtype, 13, 1, WIDTH),
        randn(g, torch.promote_types(dtype, F32), 13, HEADS),
        *rows,
    ]


def test_it_is_transformers_choice() -> None:
    """The indexer's scores, which it multiplies by a positive constant, and its own choice of the best."""
    hidden, rank, rotated, top_k = 12, 8, 4, 3
    config = deepseek_v32.DeepseekV32Config(
        hidden_size=hidden,
        q_lora_rank=rank,
        qk_rope_head_dim=rotated,
        index_n_heads=HEADS,
        index_head_dim=WIDTH,
        index_topk=top_k,
    )
    theirs, g = deepseek_v32.DeepseekV32Indexer(config, 0).double(), generator(3)
    for parameter in theirs.parameters():
        parameter.data.copy_(randn(g, F64, *parameter.shape))
    x, latent, angles = randn(g, F64, 1, 9, hidden), randn(g, F64, 1, 9, rank), randn(g, F64, 9, rotated // 2)
    cos, sin = (one(torch.cat([angles, angles], -1))[None] for one in (torch.cos, torch.sin))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()[None]
    expected = theirs(x, latent, (cos, sin), mask, torch.arange(9)[None])[0]
    table = torch.cat([angles.cos(), angles.sin()], -1)
    positions, seqs = ints(*range(9)), ints(*[0] * 9)
    q = OPS["rope"].reference(theirs.wq_b(latent)[0].view(9, HEADS, WIDTH), positions, table)
    k = OPS["rope"].reference(theirs.k_norm(theirs.wk(x))[0].view(9, 1, WIDTH), positions, table)
    weights = theirs.weights_proj(x)[0]
    found = OPS["choose_positions"].reference(q, k, weights, positions, seqs, top_k=top_k, layer=0)
    for row in range(9):
        seen = min(row + 1, top_k)
        assert found[row, seen:].tolist() == [-1] * (top_k - seen)
        kept = [place for place in sorted(expected[row].tolist()) if place <= row]  # theirs has masked ones too
        assert found[row, :seen].tolist() == kept


@pytest.mark.parametrize("top_k", [1, 4, 9, 12])
def test_a_paged_cache_gives_the_same_choice(top_k: int) -> None:
    """Pages of three tokens in any order, the last tokens fed; the first sequence's in two steps."""
    q, k, weights, positions, seqs = arguments(F64, seed=1)
    expected = OPS["choose_positions"].reference(q, k, weights, positions, seqs, top_k=top_k, layer=0)
    keys = torch.full((8, 1, 3, 1, WIDTH), torch.nan, dtype=F64)
    table = ints(6, 0, 3, 5, 1, 0).view(2, 3)
    for token, (place, seq) in enumerate(zip(positions.tolist(), seqs.tolist(), strict=True)):
        keys[table[seq, place // 3], 0, place % 3] = k[token]
    op, fed = OPS["paged_choose_positions"], torch.tensor([9, 10, 11, 12, 4, 5, 6, 7, 8, 0])
    args = (q[fed], keys, weights[fed], table, ints(4, 0), ints(5, 4), ints(9, 4))
    assert torch.equal(op.reference(*args, top_k=top_k), torch.cat([expected[fed[:9]], ints(*[-1] * top_k)[None]]))
    early = (q[:4], keys, weights[:4], table[:1], ints(0), ints(4), ints(4))
    assert torch.equal(op.reference(*early, top_k=top_k), expected[:4])


def test_of_equal_scores_earlier_positions_count() -> None:
    q, k, weights, positions, seqs = arguments(F32)
    same = OPS["choose_positions"].reference(q * 0, k, weights, positions, seqs, top_k=3, layer=0)
    assert same[8].tolist() == [0, 1, 2] and same[10].tolist() == [0, 1, -1]


@every_dtype
def test_attention_over_all_positions_is_attention(dtype: torch.dtype) -> None:
    """And over some it is attention that sees only those: over a step, and over a cache of latents."""
    g, rows = generator(5), (ints(*range(9)), ints(*[0] * 9))
    q, k = randn(g, dtype, 9, 4, 12), randn(g, dtype, 9, 1, 12)
    plain = OPS["attention"].reference(q, k, None, *rows, scale=0.4, layer=0, value_width=8)
    every = torch.where(torch.arange(9) <= torch.arange(9)[:, None], torch.arange(9), -1).int()
    some = ints(*[[0, -1, -1], [1, -1, -1], [0, 2, -1], *[[1, 2, row] for row in range(3, 9)]]).view(9, 3)
    kv = torch.zeros(5, 1, 2, 1, 12, dtype=dtype)
    table = ints(4, 0, 2, 3, 1).view(1, 5)
    kv[table[0, torch.arange(9) // 2].long(), 0, torch.arange(9) % 2] = k
    for chosen in (every, some):
        options = {"scale": 0.4, "value_width": 8}
        expected = OPS["attention"].reference(q, k, None, *rows, None, None, chosen, layer=0, **options)
        assert torch.equal(expected, plain) == (chosen is every)
        found = OPS["sparse_attention"].reference(q, kv, chosen, table, ints(0), ints(9), **options)
        check(found, expected, dtype)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("q", torch.zeros(13, HEADS, WIDTH + 2), "heads of 12 numbers and keys of 10"),
        ("k", torch.zeros(13, 2, WIDTH), "keys with 2 heads"),
        ("weights", torch.zeros(13, HEADS - 1), "weights"),
        ("weights", torch.zeros(13, HEADS, dtype=torch.bfloat16), "weights"),
        ("top_k", 0, "top_k 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name: str, value: Any, problem: str) -> None:
    op = OPS["choose_positions"]
    named = {**dict(zip(op.parameters.names, arguments(F32), strict=False)), "top_k": 3, "layer": 0, name: value}
    for function in (op.reference, op.fake):
        with pytest.raises(VerifyError, match=problem):
            function(**named)


def test_caches_and_choices_that_do_not_fit_are_refused() -> None:
    q, weights, lens = torch.zeros(4, 3, 8), torch.zeros(4, 3), (ints(0, 1).view(1, 2), ints(0), ints(4), ints(4))
    choose, sparse = OPS["paged_choose_positions"], OPS["sparse_attention"]
    for shape, problem in (((2, 2, 4, 1, 8), "a cache"), ((2, 1, 4, 2, 8), "2 heads"), ((2, 1, 4, 1, 9), "keys of 9")):
        with pytest.raises(VerifyError, match=problem):
            choose.fake(q, torch.zeros(shape), weights, *lens, top_k=2)
    kv = torch.zeros(2, 1, 4, 1, 8)
    for chosen in (torch.zeros(4, 2), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)):
        with pytest.raises(VerifyError, match="chosen positions"):
            sparse.fake(q, kv, chosen, *lens[:3], scale=1.0, value_width=4)


def test_costs_count_scores_and_what_is_read() -> None:
    """All keys are scored; attention reads as many rows as it has chosen."""
    q, keys, weights = torch.zeros(2, 3, 8), torch.zeros(5, 1, 4, 1, 8), torch.zeros(2, 3)
    table, lens = ints(*range(5)).view(1, 5), (ints(0), ints(2))
    choose = OPS["paged_choose_positions"].cost(q, keys, weights, table, *lens, ints(20), top_k=6)
    assert choose.flops == 2 * 2 * 3 * 8 * 20
    chosen = torch.zeros(2, 6, dtype=torch.int32)
    sparse = OPS["sparse_attention"].cost(q, keys, chosen, table, *lens, scale=1.0, value_width=5)
    assert sparse.flops == 2 * 2 * 3 * (8 + 5) * 6
    rows = 2 * 6 * 8 * 4
    assert sparse.bytes == rows + q.numel() * 4 + chosen.numel() * 4 + 4 * (5 + 2) + 2 * 3 * 5 * 4
