"""q/k norm, rotary embedding and the cache write, each head a row of a program's tile."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _normed(x, rstd, weight, dtype: tl.constexpr):
    """rms_norm of float32 rows, rounded as that op rounds; values in float32."""
    if weight.dtype == dtype:
        return ((x * rstd).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)
    return (x * rstd * weight.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def angles(
    table,
    positions,
    INTERLEAVED: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """(cosines, sines) by which each element of a head turns at `positions` [N], rows of `table`: [N, BLOCK_DIM]."""
    HALF: tl.constexpr = ROTARY // 2
    d = tl.arange(0, BLOCK_DIM)
    if INTERLEAVED:
        frequency = d // 2
    else:
        frequency = tl.where(d < HALF, d, d - HALF)
    at = table + positions.to(tl.int64)[:, None] * ROTARY + frequency[None, :]
    rotary = (d < ROTARY)[None, :]
    return tl.load(at, mask=rotary, other=1.0), tl.load(at + HALF, mask=rotary, other=0.0)


@triton.jit
def _partners(INTERLEAVED: tl.constexpr, ROTARY: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Which element of a head each one is turned against."""
    HALF: tl.constexpr = ROTARY // 2
    d = tl.arange(0, BLOCK_DIM)
    if INTERLEAVED:
        return d ^ 1
    else:
        return tl.where(d < HALF, d + HALF, d - HALF)


@triton.jit
def with_partners(
    x,
    rows,
    held,
    INTERLEAVED: tl.constexpr,
    ROTARY: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Heads at the offsets `rows` [N] of x, where `held` [N], and for each element the one that it is turned against:
    twice [N, BLOCK_DIM] in float32, zero elsewhere. Partners come from memory as well: registers hold no shuffle."""
    d = tl.arange(0, BLOCK_DIM)
    partner = _partners(INTERLEAVED, ROTARY, BLOCK_DIM)
    own = tl.load(x + rows[:, None] + d[None, :], mask=held[:, None] & (d < DIM)[None, :], other=0.0)
    other = tl.load(x + rows[:, None] + partner[None, :], mask=held[:, None] & (d < ROTARY)[None, :], other=0.0)
    return own.to(tl.float32), other.to(tl.float32)


@triton.jit
def gains(weight, INTERLEAVED: tl.constexpr, ROTARY: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """What a norm multiplies each element and its partner by: `weight` [DIM], or ones where it is None, twice."""
    d = tl.arange(0, BLOCK_DIM)
    own = tl.full((1, BLOCK_DIM), 1.0, tl.float32)
    other = own
    if weight is not None:
        partner = _partners(INTERLEAVED, ROTARY, BLOCK_DIM)
        own = tl.load(weight + d, mask=d < DIM, other=0.0)[None, :]
        other = tl.load(weight + partner, mask=d < ROTARY, other=0.0)[None, :]
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
    EPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROTARY: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Heads `with_partners`, normed with their `gains` where NORMED, and rotated: [N, BLOCK_DIM] in `dtype`.

    `cos` and `sin` [N or 1, BLOCK_DIM] are their angles. The norm is rounded before the rotation.
    """
    d = tl.arange(0, BLOCK_DIM)
    if NORMED:
        rstd = tl.rsqrt(tl.sum(own * own, 1) / DIM + EPS)[:, None]
        own = _normed(own, rstd, gain, dtype)
        other = _normed(other, rstd, other_gain, dtype)
    first = d % 2 == 0 if INTERLEAVED else d < ROTARY // 2
    sign = tl.where(first, -1.0, 1.0)
    return tl.where((d < ROTARY)[None, :], own * cos + sign[None, :] * other * sin, own).to(dtype)


@triton.jit
def prepared(
    x,
    rows,
    held,
    cos,
    sin,
    weight,
    EPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROTARY: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Heads at the offsets `rows` [N] of x, where `held` [N], `turned`; zeros elsewhere."""
    own, other = with_partners(x, rows, held, INTERLEAVED, ROTARY, DIM, BLOCK_DIM)
    gain, other_gain = gains(weight, INTERLEAVED, ROTARY, DIM, BLOCK_DIM)
    dtype: tl.constexpr = x.dtype.element_ty
    normed: tl.constexpr = weight is not None
    return turned(own, other, cos, sin, gain, other_gain, normed, dtype, EPS, INTERLEAVED, ROTARY, DIM, BLOCK_DIM)


@triton.jit
def rope(
    out,
    x,
    positions,
    table,
    HEADS: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROTARY: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: tokens, blocks of heads."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    position = tl.load(positions + token + tl.zeros((1,), tl.int32))
    rows = token * TOKEN_STRIDE + head * HEAD_STRIDE
    cos, sin = angles(table, position, INTERLEAVED, ROTARY, BLOCK_DIM)
    rotated = prepared(x, rows, head < HEADS, cos, sin, None, 0.0, INTERLEAVED, ROTARY, DIM, BLOCK_DIM)
    d = tl.arange(0, BLOCK_DIM)
    into = out + token * HEADS * DIM + head[:, None] * DIM + d[None, :]
    tl.store(into, rotated, mask=(head < HEADS)[:, None] & (d < DIM)[None, :])


@triton.jit
def cache_rows(slots, SLOT_STRIDE: tl.constexpr, PAGE_STRIDE: tl.constexpr, PAGE: tl.constexpr):
    """Offsets of slots in a cache [pages, 2, page, kv_heads, head_dim]."""
    slots = slots.to(tl.int64)
    return slots // PAGE * PAGE_STRIDE + slots % PAGE * SLOT_STRIDE


@triton.jit
def kv_append(
    kv,
    k,
    v,
    slots,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: tokens, blocks of heads."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    d = tl.arange(0, BLOCK_DIM)[None, :]
    slot = tl.load(slots + token)
    inside = (head < KV_HEADS) & (d < DIM) & (slot >= 0)
    into = kv + cache_rows(slot, SLOT_STRIDE, PAGE_STRIDE, PAGE) + head * DIM + d
    tl.store(into, tl.load(k + token * K_TOKEN + head * K_HEAD + d, mask=inside), mask=inside)
    tl.store(into + PART_STRIDE, tl.load(v + token * V_TOKEN + head * V_HEAD + d, mask=inside), mask=inside)


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
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    EPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROTARY: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: tokens, blocks of the heads of q and then of those of k and v."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(positions + token + tl.zeros((1,), tl.int32))
    cos, sin = angles(table, position, INTERLEAVED, ROTARY, BLOCK_DIM)
    d = tl.arange(0, BLOCK_DIM)[None, :]
    if block < Q_BLOCKS:
        head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        rows = token * Q_TOKEN + head * Q_HEAD
        rotated = prepared(q, rows, head < HEADS, cos, sin, q_weight, EPS, INTERLEAVED, ROTARY, DIM, BLOCK_DIM)
        into = out + token * HEADS * DIM + head[:, None] * DIM + d
        tl.store(into, rotated, mask=(head < HEADS)[:, None] & (d < DIM))
    else:
        slot = tl.load(slots + token)
        head = (block - Q_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        held = (head < KV_HEADS) & (slot >= 0)
        rows = token * K_TOKEN + head * K_HEAD
        rotated = prepared(k, rows, held, cos, sin, k_weight, EPS, INTERLEAVED, ROTARY, DIM, BLOCK_DIM)
        inside = held[:, None] & (d < DIM)
        into = kv + cache_rows(slot, SLOT_STRIDE, PAGE_STRIDE, PAGE) + head[:, None] * DIM + d
        tl.store(into, rotated, mask=inside)
        value = tl.load(v + token * V_TOKEN + head[:, None] * V_HEAD + d, mask=inside)
        tl.store(into + PART_STRIDE, value, mask=inside)
