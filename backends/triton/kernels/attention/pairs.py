"""Values of an 8-bit cache as pairs of elements: loaded as words of 16 bits, and multiplied with weights in f16.

Weights are multiplied with values along positions. Tensor cores then need two positions of a column in one register.
They load words of 16 bits that way (`ldmatrix` with `.trans`), but not bytes. Even and odd columns therefore have
weighted sums of their own. Tiles of many rows are multiplied by `wgmma`, which reads values from shared memory in any
order and needs no pairs.
"""

import triton
import triton.language as tl

from ingot.backends.triton.kernels.attention.addresses import rows_of
from ingot.backends.triton.kernels.attention.cache_dtype import LEAST_SCALE
from ingot.backends.triton.kernels.attention.softmax import softmax_step
from ingot.backends.triton.kernels.conversions import f8_pairs_as_f16, i8_pairs_as_f16

# Triton multiplies tiles of 64 rows and more by `wgmma` for compute capability 9.0. Pairs would need a `wgmma` for each
# half there.
_WGMMA_ROWS = 64


@triton.constexpr_function
def has_pairs(kv, dtype, cache, form, rows):
    """Return whether values are loaded as pairs of 8-bit elements, for tiles of `rows` queries of `dtype`.

    Values that are parts of keys are not: they are loaded with the keys.
    """
    strides = (cache.page_stride, cache.part_stride, cache.slot_stride, cache.row)
    even = not any(size % 2 for size in (form.value_dim, *strides))
    narrow = kv.element_ty.primitive_bitwidth == 8 and dtype.primitive_bitwidth == 16
    return narrow and even and rows < _WGMMA_ROWS and not form.same


@triton.jit
def load_pairs(kv, pages, place, inside, head, CACHE: tl.constexpr, FORM: tl.constexpr):
    """Load values at the positions `place` [N] of a sequence as pairs of 8-bit elements, i16[N, FORM.block_value / 2].

    The other arguments are those of `rows_of`. Pairs at masked-out positions are 0.
    """
    w = tl.arange(0, FORM.block_value // 2)
    rows = rows_of(kv.to(tl.pointer_type(tl.int16), bitcast=True), pages, place, inside, head, CACHE, 2)
    held = inside[:, None] & (w < FORM.value_dim // 2)[None, :]
    return tl.load(rows[:, None] + CACHE.part_stride // 2 + w[None, :], mask=held, other=0)


@triton.jit
def halves(total):
    """Return the even and the odd columns of `total` [M, D], each [M, D / 2]."""
    return tl.split(tl.reshape(total, (total.shape[0], total.shape[1] // 2, 2)))


@triton.jit
def joined(first, second):
    """Return the matrix [M, D] whose `halves` are `first` and `second`."""
    return tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1] * 2))


@triton.jit
def pairs_of(words, kv, ASSEMBLY: tl.constexpr):
    """Return the first and the second elements, in f16, of pairs of elements of the cache `kv`.

    `words` i16[N, D / 2] has a pair in each word. Tensor cores load words of 16 bits with their rows and columns
    swapped, but not bytes.
    """
    element: tl.constexpr = kv.dtype.element_ty
    if ASSEMBLY and element == tl.int8:
        return i8_pairs_as_f16(words)
    elif ASSEMBLY:
        return f8_pairs_as_f16(words)
    else:
        first = words.to(tl.int8).to(element, bitcast=True)
        second = (words >> 8).to(tl.int8).to(element, bitcast=True)
        return first.to(tl.float16), second.to(tl.float16)


@triton.jit
def weighed_pairs(
    scores,
    words,
    first_total,
    second_total,
    weight_sum,
    peak,
    seen,
    kv,
    operands,
    SCORES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Add N keys to the state of M query rows as `weighed` does, with values that are pairs of 8-bit elements.

    `words` i16[N, D / 2] are results of `load_pairs` from `kv`. `first_total` and `second_total` are the `halves` of
    the weighted sum of values. Return (first_total, second_total, weight_sum, peak).

    Weights are multiplied by `value_scales` relative to the largest of the N. Rounding to f16 then errs less than
    rounding to bf16 if the largest is up to 4096 times the scales that matter, and more from 2^15 times on. A test
    measures it (tests/backends/triton/test_pairs.py).
    """
    first, second = pairs_of(words, kv, ASSEMBLY)
    weights, shrunk, weight_sum, peak = softmax_step(scores, weight_sum, peak, seen, operands, SCORES)
    if operands.value_scales is None:
        weights = weights.to(tl.float16)
        first_total = tl.dot(weights, first, first_total * shrunk[:, None])
        second_total = tl.dot(weights, second, second_total * shrunk[:, None])
    else:
        # Positions that are masked out have scale 0.
        most = tl.maximum(tl.max(operands.value_scales, 0), LEAST_SCALE)
        weights = (weights * (operands.value_scales / most)[None, :]).to(tl.float16)
        first_total = first_total * shrunk[:, None] + tl.dot(weights, first) * most
        second_total = second_total * shrunk[:, None] + tl.dot(weights, second) * most
    return first_total, second_total, weight_sum, peak
