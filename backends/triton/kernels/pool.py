"""Kernels that pool the hidden states of each sequence of a step into one vector."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pool_rows(
    x,
    q_starts,
    q_lens,
    dimensions,
    out,
    X_TOKEN: tl.constexpr,
    WIDTH: tl.constexpr,
    POOLING: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Pool the rows of x of each sequence into one row of `out`: the op `pool`, without its scaling to length 1.

    POOLING is "mean", "last" or "cls" (the first token). `dimensions` is the number of columns to keep per sequence, or
    0 for all; the rest becomes zeros. A program takes BLOCK columns of a sequence, TOKENS tokens at a time.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(q_starts + sequence)
    count = tl.load(q_lens + sequence)
    kept = tl.load(dimensions + sequence)
    end = begin + count
    if POOLING == "last":
        begin = tl.maximum(begin, end - 1)
    elif POOLING == "cls":
        end = tl.minimum(begin + 1, end)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(begin, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        held = (token < end)[:, None] & (column < WIDTH)[None, :]
        rows = x + token.to(tl.int64)[:, None] * X_TOKEN + column[None, :]
        total += tl.sum(tl.load(rows, mask=held, other=0.0).to(tl.float32), 0)
    mean = total / tl.maximum(end - begin, 1).to(tl.float32)
    mean = tl.where((kept == 0) | (column < kept), mean, 0.0)
    tl.store(out + sequence * WIDTH + column, mean, mask=column < WIDTH)


@triton.jit
def unit_rows(
    out,
    normalize,
    WIDTH: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Scale each row of `out` f32[B, WIDTH] with a nonzero `normalize` to length 1, in place.

    A length below LEAST counts as LEAST. A program takes one row.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.program_id(0).to(tl.int64)
    if tl.load(normalize + sequence) != 0:
        column = tl.arange(0, BLOCK)
        squares = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, WIDTH, BLOCK):
            inside = first + column < WIDTH
            part = tl.load(out + sequence * WIDTH + first + column, mask=inside, other=0.0)
            squares += part * part
        length = tl.maximum(tl.sqrt_rn(tl.sum(squares)), LEAST)
        for first in range(0, WIDTH, BLOCK):
            inside = first + column < WIDTH
            place = out + sequence * WIDTH + first + column
            tl.store(place, tl.load(place, mask=inside, other=0.0) / length, mask=inside)
