"""Attention within a step and the op pool, in float64 against torch's own functions."""

import pytest
import torch
import torch.nn.functional as F

from ingot.ir.errors import VerifyError
from ingot.ir.masks import Mask
from ingot.ir.ops import OPS, pool, step_attention
from ingot.ir.ops.pool import POOLINGS

# Tokens of no sequence lie in front, between and after; one sequence is idle.
STARTS, LENS, TOKENS = [1, 7, 8, 9], [5, 0, 1, 4], 15


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poisoned(rows: torch.Tensor) -> torch.Tensor:
    """The rows, NaN where no sequence owns them."""
    owned = torch.zeros(TOKENS, dtype=torch.bool)
    for start, count in zip(STARTS, LENS, strict=True):
        owned[start : start + count] = True
    rows[~owned] = float("nan")
    return rows


@pytest.mark.parametrize("form", ["reference", "rowwise"])
@pytest.mark.parametrize("mask", ["causal", "bidirectional", "window_2", "block_causal_3"])
def test_attention_within_a_step(mask: str, form: str) -> None:
    g = torch.Generator().manual_seed(5)
    q, k, v = (poisoned(torch.randn(TOKENS, heads, 12, generator=g, dtype=torch.float64)) for heads in (6, 2, 2))
    found = getattr(OPS["step_attention"], form)(q, k, v, ints(*STARTS), ints(*LENS), scale=0.3, mask=mask)
    wanted = torch.zeros_like(q)
    for start, count in zip(STARTS, LENS, strict=True):
        own, places = slice(start, start + count), torch.arange(count)
        if count:
            heads = [one[own].transpose(0, 1) for one in (q, k, v)]
            seen = Mask.named(mask).seen(places, places)
            mixed = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=0.3, enable_gqa=True)
            wanted[own] = mixed.transpose(0, 1)
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooled_vectors(pooling: str) -> None:
    x = poisoned(torch.randn(TOKENS, 10, generator=torch.Generator().manual_seed(6), dtype=torch.float64))
    kept, unit = [0, 3, 10, 4], [1, 1, 0, 1]
    found = pool.reference(x, ints(*STARTS), ints(*LENS), ints(*kept), ints(*unit), pooling=pooling)
    wanted = torch.zeros(4, 10, dtype=torch.float64)
    for b, (start, count) in enumerate(zip(STARTS, LENS, strict=True)):
        rows = x[start : start + count]
        if count:
            row = {"last": rows[-1], "mean": rows.sum(0) / count, "cls": rows[0]}[pooling][: kept[b] or 10]
            wanted[b, : len(row)] = F.normalize(row, dim=0) if unit[b] else row
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_unknown_names() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(VerifyError, match="unknown pooling 'max'"):
        pool.fake(x, ints(0), ints(2), ints(0), ints(0), pooling="max")
    with pytest.raises(VerifyError, match="unknown mask 'all'"):
        step_attention.fake(x[:, None], x[:, None], x[:, None], ints(0), ints(2), scale=1.0, mask="all")
