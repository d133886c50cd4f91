"""Attention over parts, put together by their log-sum-exp: it is the attention over all of them."""

import math
from typing import Any

import pytest
import torch
from op_values import FLOATS, check, generator, ints, randn

from ingot.ir.ops import OPS, merge_attention, paged_attention, partial_attention

PAGE, HEADS, DIM = 4, 6, 8
VARIANTS: list[dict[str, Any]] = [{}, {"soft_cap": 1.5}, {"sinks": True}, {"sinks": True, "soft_cap": 2.0}]
# (tokens fed, positions cached in all) of each sequence.
LENGTHS = [(2, 13), (6, 6), (1, 9), (1, 1), (0, 5)]


def step(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The arguments of `paged_attention`; two tokens are of no sequence."""
    g = generator(31)
    table = torch.randperm(30, generator=g)[:20].view(5, 4).int()
    kv = randn(g, dtype, 30, 2, PAGE, 2, DIM)
    counts = [count for count, _ in LENGTHS]
    starts = [sum(counts[:b]) for b in range(len(counts))]
    lens = ints(*starts), ints(*counts), ints(*(length for _, length in LENGTHS))
    return randn(g, dtype, sum(counts) + 2, HEADS, DIM), kv, table, *lens


def cut(given: tuple[torch.Tensor, ...], pages: int) -> list[tuple[tuple[torch.Tensor, ...], str]]:
    """The arguments of both parts: up to `pages` full pages, all of which is seen by all tokens, and what follows."""
    q, kv, table, starts, lens, kv_lens = given
    first = torch.minimum((kv_lens - lens).clamp(min=0) // PAGE, torch.tensor(pages)).int()
    rest = torch.stack([table[b].roll(-int(first[b])) for b in range(len(table))])
    return [
        ((q, kv, table, starts, lens, first * PAGE), "bidirectional"),
        ((q, kv, rest, starts, lens, kv_lens - first * PAGE), "causal"),
    ]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pages", [0, 1, 2, 3])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("form", ["reference", "rowwise"])
def test_two_parts_are_the_whole(form: str, variant: dict[str, Any], pages: int, dtype: torch.dtype) -> None:
    given = step(dtype)
    sinks = randn(generator(32), dtype, HEADS) if variant.get("sinks") else None
    options = {"scale": 0.3, **{name: value for name, value in variant.items() if name != "sinks"}}
    function = getattr(partial_attention, form)
    parts = [
        function(*args, sinks if place else None, mask=mask, **options)
        for place, (args, mask) in enumerate(cut(given, pages))
    ]
    merged, lse = getattr(merge_attention, form)(*parts[0], *parts[1])
    whole, whole_lse = partial_attention.reference(*given, sinks, **options)
    wide = [one.double() if one.is_floating_point() else one for one in given]
    check(merged, paged_attention.reference(*wide, None if sinks is None else sinks.double(), **options), dtype)
    check(whole, paged_attention.reference(*given, sinks, **options), dtype)
    owned = sum(count for count, _ in LENGTHS)
    assert torch.allclose(lse[:owned], whole_lse[:owned], atol=1e-5)
    assert bool((lse[owned:] == -math.inf).all()) and bool((merged[owned:] == 0).all())


def test_log_sum_exp_by_hand() -> None:
    q, kv, table, *lens = step(torch.float64)
    _, lse = partial_attention.reference(q, kv, table, *lens, scale=0.3)
    keys = kv[table[2].long(), 0].flatten(0, 1)[:9, 1]  # of the head that the last three of q share
    scores = keys @ q[8, 4] * 0.3
    assert lse[8, 4].item() == pytest.approx(math.log(scores.exp().sum().item()))


def test_parts_come_in_any_order() -> None:
    for sample in merge_attention.samples(generator(33), torch.float32):
        one, other = sample.args[:2], sample.args[2:]
        both = merge_attention.reference(*one, *other)
        for found, expected in zip(merge_attention.reference(*other, *one), both, strict=True):
            assert torch.equal(found, expected)
        assert not both[0].isnan().any() and not both[1].isnan().any()


def test_three_parts_are_put_together_one_after_the_other() -> None:
    """Pages of a sequence in three hands, as on devices that share a context."""
    q, kv, table, starts, lens, kv_lens = step(torch.float64)
    parts = [
        partial_attention.reference(
            q[8:9], kv, table[2:3, page:], ints(0), ints(1), ints(length), scale=0.3, mask="bidirectional"
        )
        for page, length in ((2, 1), (0, 4), (1, 4))
    ]
    merged = merge_attention.reference(*merge_attention.reference(*parts[0], *parts[1]), *parts[2])
    whole = OPS["partial_attention"].reference(q, kv, table, starts, lens, kv_lens, scale=0.3)
    for found, expected in zip(merged, whole, strict=True):
        assert torch.allclose(found[0], expected[8])
