"""Launches of the matmuls of experts on Hopper, for blocks of many choices.

The kernel is `experts_warpgroups`, whose tile sizes are fixed: those of its warpgroups and of shared memory.
"""

import torch

from ingot.backends.triton.compile import is_aligned
from ingot.backends.triton.kernels.experts.warpgroups.kernel import experts_warpgroups
from ingot.backends.triton.kernels.experts.warpgroups.tile import COLUMNS, rows_in_tile
from ingot.backends.triton.launches import Expr, least, times
from ingot.backends.triton.lower.experts.blocks import Blocks
from ingot.backends.triton.lower.experts.call import Experts, QuantizedExperts
from ingot.backends.triton.lower.experts.tiles import LARGEST_BLOCK
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.formats import find_format

_SM = 90  # wgmma is an instruction of compute capability 9.0 only
_GROUP = 32  # columns that share a scale. A step of the kernel has 64 columns, and two scales of a row.
_CHUNKS = (64, 128)
_ACTIVATIONS = ("clamped", "silu")  # the kernel has run with no other one
# Programs in turn that take the same rows of a weight, as for `experts_up_tile`.
_TOGETHER = 8


def takes_warpgroups(one: Experts, name: str, sm: int, block: int) -> bool:
    """Return whether the kernel multiplies blocks of `block` choices by the weight `name`.

    `name` is "gate_up" or "down", and `sm` the compute capability. Registers have room for the sums of the largest
    blocks and two matrices. Deterministic mode has other blocks (`invariant_block`).
    """
    gated = name == "gate_up"
    if sm != _SM or block != LARGEST_BLOCK or (gated and one.call.attributes["activation"] not in _ACTIVATIONS):
        return False
    if (quantized := one.quantized.get(name)) is not None:
        return one.dtype is torch.bfloat16 and _takes_words(quantized)
    depth = one.hidden if gated else one.ffn
    # x is copied by 16 bytes, from rows of its own.
    copied = is_aligned(one.x) or not gated
    return one.dtype.itemsize == 2 and depth % COLUMNS.value == 0 and copied and not (gated and one.weigh_input)


def _takes_words(quantized: QuantizedExperts) -> bool:
    format = find_format(quantized.weight.packing)
    scales = [(level.rows, level.columns, level.dtype) for level in format.levels]
    return (
        format.element == "f4e2m1"
        and scales == [(1, _GROUP, torch.float8_e8m0fnu)]
        and format.activations is None
        and quantized.form.elements.chunk in _CHUNKS
    )


def add_warpgroups(
    one: Experts, name: str, schedule: Schedule, here: Expr, blocks: Blocks, x: Value, y: Value, chunk: int
) -> None:
    """Add the launch of gate and up, or of down, for blocks of choices. `here` is 1 for its steps, else 0.

    x has its columns in the order of the weight's chunks, and those of `y` get the order `chunk`
    (`kernels/quant/columns.py`).
    """
    gated, quantized = name == "gate_up", one.quantized.get(name)
    columns, depth = (one.ffn, one.hidden) if gated else (one.hidden, one.ffn)
    items = times(blocks.count, -(-columns // rows_in_tile(gated)))
    schedule.launch(
        experts_warpgroups,
        (times(here, least(items, schedule.cores)),),
        {
            "x": x,
            "order": blocks.order,
            "listed": blocks.listed,
            "work": blocks.work,
            "weight": quantized.arguments["weight"] if quantized else one.weight(name)[0],
            "scales": quantized.arguments["scales"] if quantized else None,
            "bias": one.call.optional(f"{name}_bias"),
            "y": y,
        },
        {
            "TOP_K": one.top_k,
            "N": columns,
            "K": depth,
            "X_STRIDE": x.strides[0],
            "GATED": gated,
            **one.activation(),
            "TOKENS": LARGEST_BLOCK,
            "TOGETHER": _TOGETHER,
            "SIZES": quantized.sizes if quantized else None,
            "ELEMENTS": quantized.form.elements if quantized else None,
            "CHUNK": chunk,
            "DEPENDENT": schedule.dependent,
        },
        dependent=schedule.dependent,
    )
