"""Lowering of `head_linear`: each head of x times a matrix of its own, as latent attention absorbs them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ingot.backends.triton.kernels.linear.head_linear import head_linear_blocks, head_linear_few
from ingot.backends.triton.launches import cdiv
from ingot.backends.triton.lower.attention.heads import static
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.linear.invariant import invariant_products
from ingot.backends.triton.lower.rows import most_rows, want_floats
from ingot.backends.triton.lower.sizes import LEAST, padded_tokens, tile_width
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.artifact.plan import GPU_FEW_TOKENS

# Most weights that a program of few tokens holds in registers: 64 for each thread of 8 warps. 4 warps hold half.
_HELD = 1 << 14
# Most elements of x in a tile of few tokens: 64 KB of bf16 in shared memory, which every GPU from 8.0 on has.
_MOST_X = 1 << 15
# Least bytes of adjacent weights that a program reads: two sectors of the L2 cache, of 32 bytes each.
_LEAST_BYTES = 64
# Tiles of many tokens, and their columns of x. Hopper's tensor cores take 64 rows of the weight or more.
_BLOCK, _BLOCK_FEW, _BLOCK_K = 128, 64, 64
# Float32 has no tensor cores here: both operands are in registers.
_BLOCK_F32 = 32


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a call: `heads` matrices [`columns`, `depth`], for steps of up to `most` rows."""

    heads: int
    columns: int
    depth: int
    most: int
    dtype: torch.dtype


def _head_linear(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    x, weight = call.value("x"), call.value("weight")
    want_floats(call, "x", "weight")
    call.want(x.type.dtype == weight.type.dtype, f"x and weight differ in dtype: {x.type} and {weight.type}")
    call.want_dense_rows("x")
    heads, columns, depth = (static(weight, axis) for axis in range(3))
    sizes = _Sizes(heads, columns, depth, most_rows(x.type.shape[0], schedule), x.type.dtype)
    if schedule.bucket.batch_invariant:
        call.want(
            invariant_products(schedule.sm, sizes.dtype),
            f"on compute capability {schedule.sm // 10}.{schedule.sm % 10}, matmuls with other tile sizes are not known"
            " to have the same bits",
        )
    out = schedule.output(call.results[0])
    given = {"x": x, "weight": weight, "y": out, "rows": x.type.shape[0]}
    constants = {
        "H": sizes.heads,
        "N": sizes.columns,
        "K": sizes.depth,
        "X_ROW": x.strides[0],
        "X_HEAD": x.strides[1],
        **{f"W_{name}": stride for name, stride in zip(("HEAD", "ROW", "COLUMN"), weight.strides, strict=True)},
        "DEPENDENT": schedule.dependent,
    }
    tokens, block_k = padded_tokens(sizes.most), tile_width(sizes.depth)
    few = sizes.most <= GPU_FEW_TOKENS and block_k * LEAST <= _HELD and block_k * tokens <= _MOST_X
    few &= sizes.dtype is not torch.float32 or tokens == 1
    if few and not schedule.bucket.batch_invariant:
        block_n = _few_columns(sizes, block_k, weight, schedule.cores)
        schedule.launch(
            head_linear_few,
            (cdiv(sizes.columns, block_n), sizes.heads),
            given,
            {**constants, "TOKENS": tokens, "BLOCK_N": block_n, "BLOCK_K": block_k},
            warps=8 if block_n * block_k > _HELD // 2 else 4,
            dependent=schedule.dependent,
        )
        return (out,)
    full = sizes.dtype is torch.float32
    most = _BLOCK_F32 if full else _BLOCK_FEW if sizes.most <= GPU_FEW_TOKENS else _BLOCK
    block_n, block_t = most, min(most, max(LEAST, tokens))
    schedule.launch(
        head_linear_blocks,
        (cdiv(sizes.columns, block_n), cdiv(x.type.shape[0], block_t), sizes.heads),
        given,
        {
            **constants,
            "TOKENS": block_t,
            "BLOCK_N": block_n,
            "BLOCK_K": min(_BLOCK_F32 if full else _BLOCK_K, block_k),
            "FETCH": sizes.most <= GPU_FEW_TOKENS,
        },
        warps=8 if most == _BLOCK else 4,
        stages=2 if full else 3,
        dependent=schedule.dependent,
    )
    return (out,)


def _few_columns(sizes: _Sizes, block_k: int, weight: Value, cores: int) -> int:
    """Return the columns of a program of few tokens.

    They are as many as its registers hold, and fewer if the multiprocessors would not all have a program.
    """
    # Programs of fewer adjacent columns would read parts of sectors.
    least = max(LEAST, _LEAST_BYTES // sizes.dtype.itemsize) if weight.strides[1] == 1 else LEAST
    block_n = min(_BLOCK_FEW, max(LEAST, _HELD // block_k), tile_width(sizes.columns))
    while block_n > least and sizes.heads * -(-sizes.columns // block_n) < cores:
        block_n //= 2
    return block_n


LOWERINGS: Mapping[str, Lowering] = {"head_linear": _head_linear}
