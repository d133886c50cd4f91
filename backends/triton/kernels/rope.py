"""Kernels of the q/k norm, rotary embedding and cache writes. Each head is a row of a program's tile."""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention.cache_dtype import as_cached, row_scales, store_scales


@dataclass(frozen=True)
class Head:
    """How a kernel norms and rotates a head of `dim` elements. The head is in a tile of `block` columns.

    The first `rotary` elements are rotated in pairs. A pair is two adjacent elements if `interleaved`, else two
    elements `rotary` / 2 apart. `eps` is the epsilon of the norm. The norm comes before the rotation, or after it with
    `norm_last`.
    """

    dim: int
    block: int
    rotary: int
    interleaved: bool
    eps: float = 0.0
    norm_last: bool = False


@triton.jit
def _normed(x, rstd, weight, dtype: tl.constexpr):
    """Return `x * rstd * weight` in float32, rounded to `dtype` as the op `rms_norm` rounds. `rstd` is 1 / rms."""
    if weight.dtype == dtype:
        return ((x * rstd).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)
    return (x * rstd * weight.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def angles(table, positions, HEAD: tl.constexpr):
    """Load the cosines and sines for heads at `positions` [N]. Return (cosines, sines), each [N, HEAD.block].

    `table` is the rotary table. A row of it has all cosines of a position, and then all sines.
    """
    HALF: tl.constexpr = HEAD.rotary // 2
    d = tl.arange(0, HEAD.block)
    if HEAD.interleaved:
        frequency = d // 2
    else:
        frequency = tl.where(d < HALF, d, d - HALF)
    at = table + positions.to(tl.int64)[:, None] * HEAD.rotary + frequency[None, :]
    rotary = (d < HEAD.rotary)[None, :]
    return tl.load(at, mask=rotary, other=1.0), tl.load(at + HALF, mask=rotary, other=0.0)


@triton.jit
def _partners(HEAD: tl.constexpr):
    """Return the partner of each element of a head: the index of the element that it is rotated with."""
    HALF: tl.constexpr = HEAD.rotary // 2
    d = tl.arange(0, HEAD.block)
    if HEAD.interleaved:
        return d ^ 1
    else:
        return tl.where(d < HALF, d + HALF, d - HALF)


@triton.jit
def with_partners(x, rows, held, HEAD: tl.constexpr):
    """Load heads at the offsets `rows` [N] of x, and the partner of each element in the rotation.

    Return (elements, partners), each [N, HEAD.block] in float32. Both are zero outside the mask `held` [N]. Partners
    are loaded from memory a second time, so no registers are shuffled.
    """
    d = tl.arange(0, HEAD.block)
    partner = _partners(HEAD)
    own = tl.load(x + rows[:, None] + d[None, :], mask=held[:, None] & (d < HEAD.dim)[None, :], other=0.0)
    other = tl.load(x + rows[:, None] + partner[None, :], mask=held[:, None] & (d < HEAD.rotary)[None, :], other=0.0)
    return own.to(tl.float32), other.to(tl.float32)


@triton.jit
def gains(weight, HEAD: tl.constexpr):
    """Load the norm weights of a head's elements, and the norm weights of their partners in the rotation.

    Return (weights, partners' weights), each [1, HEAD.block]. `weight` is [HEAD.dim]. If it is None, both are ones.
    """
    d = tl.arange(0, HEAD.block)
    own = tl.full((1, HEAD.block), 1.0, tl.float32)
    other = own
    if weight is not None:
        partner = _partners(HEAD)
        own = tl.load(weight + d, mask=d < HEAD.dim, other=0.0)[None, :]
        other = tl.load(weight + partner, mask=d < HEAD.rotary, other=0.0)[None, :]
    return own, other


@triton.jit
def turned(
    own,
    other,
    cos,
    sin,
    gain,
    other_gain,
    NORMED: tl.constexpr,
    dtype: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Rotate heads by the rotary embedding, and norm them if NORMED. Return [N, HEAD.block] in `dtype`.

    `own` are the elements, and `other` their partners in the rotation (`with_partners`). `gain` and `other_gain` are
    the norm weights of both (`gains`). `cos` and `sin` are [N or 1, HEAD.block]. The norm comes before the rotation, or
    after it with HEAD.norm_last. The first of the two steps rounds its result to `dtype`.
    """
    d = tl.arange(0, HEAD.block)
    if NORMED and not HEAD.norm_last:
        rstd = tl.rsqrt(tl.sum(own * own, 1) / HEAD.dim + HEAD.eps)[:, None]
        own = _normed(own, rstd, gain, dtype)
        other = _normed(other, rstd, other_gain, dtype)
    first = d % 2 == 0 if HEAD.interleaved else d < HEAD.rotary // 2
    sign = tl.where(first, -1.0, 1.0)
    rotated = tl.where((d < HEAD.rotary)[None, :], own * cos + sign[None, :] * other * sin, own).to(dtype)
    if NORMED and HEAD.norm_last:
        wide = rotated.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(wide * wide, 1) / HEAD.dim + HEAD.eps)[:, None]
        rotated = _normed(wide, rstd, gain, dtype).to(dtype)
    return rotated


@triton.jit
def prepared(x, rows, held, cos, sin, weight, HEAD: tl.constexpr):
    """Load heads at the offsets `rows` [N] of x, norm and rotate them, and return them [N, HEAD.block].

    `held` [N] masks the rows. Masked-out rows are zeros. `weight` is the norm's weight, or None for no norm.
    """
    own, other = with_partners(x, rows, held, HEAD)
    gain, other_gain = gains(weight, HEAD)
    dtype: tl.constexpr = x.dtype.element_ty
    normed: tl.constexpr = weight is not None
    return turned(own, other, cos, sin, gain, other_gain, normed, dtype, HEAD)


@triton.jit
def rope(
    out,
    x,
    positions,
    table,
    HEADS: tl.constexpr,
    X: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the op `rope`, the rotary embedding of x [T, H, D]. Grid: tokens, blocks of BLOCK_HEADS heads."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    position = tl.load(positions + token + tl.zeros((1,), tl.int32))
    rows = token * X.token + head * X.head
    cos, sin = angles(table, position, HEAD)
    rotated = prepared(x, rows, head < HEADS, cos, sin, None, HEAD)
    d = tl.arange(0, HEAD.block)
    into = out + token * HEADS * HEAD.dim + head[:, None] * HEAD.dim + d[None, :]
    tl.store(into, rotated, mask=(head < HEADS)[:, None] & (d < HEAD.dim)[None, :])


@triton.jit
def cache_rows(slots, CACHE: tl.constexpr):
    """Return the offsets of the keys at the cache slots `slots`, in elements from the start of the cache."""
    slots = slots.to(tl.int64)
    return slots // CACHE.page * CACHE.page_stride + slots % CACHE.page * CACHE.slot_stride


@triton.jit
def kv_append(
    kv,
    k,
    v,
    slots,
    FED: tl.constexpr,
    CACHE: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the op `kv_append`: write k and v [T, KV, D] into the cache at `slots`. A slot below 0 is padding.

    `v` is None if each value is a part of its key, as in latent attention (MLA). Grid: tokens, blocks of BLOCK_HEADS
    heads.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, FORM.block)[None, :]
    slot = tl.load(slots + token)
    held = (head < FORM.kv_heads) & (slot >= 0)
    rows = kv + cache_rows(slot, CACHE) + head * CACHE.row
    inside = held[:, None] & (d < FORM.dim)
    key = tl.load(k + token * FED.k.token + head[:, None] * FED.k.head + d, mask=inside, other=0.0)
    scales = row_scales(key, kv, CACHE)
    tl.store(rows[:, None] + d, as_cached(key, kv, CACHE.k_scale, scales), mask=inside)
    store_scales(rows, scales, held, CACHE.key_scale)
    if v is not None:
        e = tl.arange(0, FORM.block_value)[None, :]
        inside = held[:, None] & (e < FORM.value_dim)
        value = tl.load(v + token * FED.v.token + head[:, None] * FED.v.head + e, mask=inside, other=0.0)
        of_values = row_scales(value, kv, CACHE)
        value = as_cached(value, kv, CACHE.v_scale, of_values)
        tl.store(rows[:, None] + e + CACHE.part_stride, value, mask=inside)
        store_scales(rows, of_values, held, CACHE.value_scale)


@triton.jit
def qk_norm_rope_append(
    out,
    kv,
    q,
    k,
    v,
    positions,
    table,
    slots,
    q_weight,
    k_weight,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    FED: tl.constexpr,
    CACHE: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the op `qk_norm_rope_append`: norm and rotate q and k, write q to `out`, and k and v into the cache.

    A slot below 0 is padding. Grid: tokens, blocks of heads. The blocks of q heads come first, then those of k/v heads.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(positions + token + tl.zeros((1,), tl.int32))
    cos, sin = angles(table, position, HEAD)
    d = tl.arange(0, HEAD.block)[None, :]
    if block < Q_BLOCKS:
        head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        rows = token * FED.q.token + head * FED.q.head
        rotated = prepared(q, rows, head < HEADS, cos, sin, q_weight, HEAD)
        into = out + token * HEADS * HEAD.dim + head[:, None] * HEAD.dim + d
        tl.store(into, rotated, mask=(head < HEADS)[:, None] & (d < HEAD.dim))
    else:
        slot = tl.load(slots + token)
        head = (block - Q_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        held = (head < KV_HEADS) & (slot >= 0)
        rows = token * FED.k.token + head * FED.k.head
        rotated = prepared(k, rows, held, cos, sin, k_weight, HEAD)
        inside = held[:, None] & (d < HEAD.dim)
        at = kv + cache_rows(slot, CACHE) + head * CACHE.row
        scales = row_scales(rotated, kv, CACHE)
        tl.store(at[:, None] + d, as_cached(rotated, kv, CACHE.k_scale, scales), mask=inside)
        store_scales(at, scales, held, CACHE.key_scale)
        value = tl.load(v + token * FED.v.token + head[:, None] * FED.v.head + d, mask=inside, other=0.0)
        of_values = row_scales(value, kv, CACHE)
        value = as_cached(value, kv, CACHE.v_scale, of_values)
        tl.store(at[:, None] + d + CACHE.part_stride, value, mask=inside)
        store_scales(at, of_values, held, CACHE.value_scale)
