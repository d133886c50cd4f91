"""Norm, rope and cache write in one op against its parts."""

import pytest
import torch
from op_values import F32, FLOATS, generator, ints, randn, rope_attrs

from ingot.ir.ops import OPS
from ingot.ir.tables import make_table


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", ["", "first", "last"])
@pytest.mark.parametrize("wide_weight", [False, True])
def test_qk_norm_rope_append_is_its_parts(
    dtype: torch.dtype, interleaved: bool, normed: str, wide_weight: bool
) -> None:
    g = generator(30)
    qkv = randn(g, dtype, 5, 8 * 12)
    q, k, v = (part.view(5, -1, 12) for part in qkv.split([48, 24, 24], 1))
    weights = [randn(g, torch.promote_types(dtype, F32) if wide_weight else dtype, 12) for _ in range(2)]
    kv, slots = randn(g, dtype, 6, 2, 4, 2, 12), torch.tensor([5, 23, -1, 0, 12])
    positions, table = ints(3, 0, 9, 9, 31), make_table(rope_attrs({"rope_type": "default"}, 8, 1e4, 32))
    args = (kv, q, k, v, positions, table, slots, *(weights if normed else ()))
    order = {"interleaved": interleaved, "norm_last": normed == "last"}
    found = OPS["qk_norm_rope_append"].reference(*args, eps=1e-3, **order)
    if normed == "first":
        q, k = (OPS["rms_norm"].reference(x, w, eps=1e-3) for x, w in zip((q, k), weights, strict=True))
    q, k = (OPS["rope"].reference(x, positions, table, interleaved=interleaved) for x in (q, k))
    if normed == "last":
        q, k = (OPS["rms_norm"].reference(x, w, eps=1e-3) for x, w in zip((q, k), weights, strict=True))
    assert torch.equal(found[0], q)
    assert torch.equal(found[1], OPS["kv_append"].reference(kv, k, v, slots))
    untouched = torch.ones(6, 4, dtype=torch.bool)
    untouched.view(-1)[slots[slots >= 0]] = False
    changed = found[1].transpose(1, 2)
    assert torch.equal(changed[untouched], kv.transpose(1, 2)[untouched])


@pytest.mark.parametrize("dtype", FLOATS)
def test_qk_norm_rope_append_of_a_token_does_not_see_the_others(dtype: torch.dtype) -> None:
    """No backend computes it row by row, so its own bits must not depend on the batch."""
    op = OPS["qk_norm_rope_append"]
    g = generator(31)
    for heads, dim in ((4, 64), (2, 80), (3, 36)):
        q, k, v = (randn(g, dtype, 33, n, dim) for n in (heads * 2, heads, heads))
        kv, slots = torch.zeros(5, 2, 16, heads, dim, dtype=dtype), torch.randperm(80, generator=g)[:33]
        positions = torch.randint(0, 64, (33,), generator=g).int()
        table = make_table(rope_attrs({"rope_type": "default"}, dim, 1e4, 64))
        weights = (randn(g, dtype, dim), randn(g, dtype, dim))
        query, cache = op.rowwise(kv, q, k, v, positions, table, slots, *weights, eps=1e-6)
        for row in range(33):
            one = slice(row, row + 1)
            alone, kv = op.rowwise(kv, q[one], k[one], v[one], positions[one], table, slots[one], *weights, eps=1e-6)
            assert torch.equal(alone, query[one])
        assert torch.equal(kv, cache)
