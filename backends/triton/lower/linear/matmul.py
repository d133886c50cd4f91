"""Lowering of the matmul op `linear`, alone or fused with ops before and after it: choose a kernel and tile sizes."""

from collections.abc import Mapping

import torch

from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.linear.call import Linear
from ingot.backends.triton.lower.linear.choice import known_microseconds, known_tiles, share_of
from ingot.backends.triton.lower.linear.invariant import block_tiles, few_tiles, require_invariant, sums_of
from ingot.backends.triton.lower.linear.launches import launch_blocks, launch_matvec, launch_tile
from ingot.backends.triton.lower.linear.problem import LINEAR
from ingot.backends.triton.lower.linear.tiles import MatvecTiles
from ingot.backends.triton.lower.linear.weight import plain_weight, stored_weight
from ingot.backends.triton.lower.quant.linear import schedule_quant_linear
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.lower.rows import most_rows
from ingot.backends.triton.lower.sizes import MOST_NORMED, padded_tokens
from ingot.backends.triton.operands import loader_of
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.artifact.plan import GPU_FEW_TOKENS
from ingot.ir.formats import find_format

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def lower_linear(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    """Add the launches of one call of `linear`, without fused ops, to `schedule`, and return the result.

    Raises Refused if no kernel supports the call.
    """
    (result,) = call.results
    linear = Linear(call.value("x"), plain_weight(call.value("weight")), call.optional("bias"), result)
    return (schedule_linear(linear, schedule),)


def schedule_linear(linear: Linear, schedule: Schedule) -> Value:
    """Add the launches of a matmul with its fused ops to `schedule`, and return the result.

    Raises Refused if no kernel supports the matmul.
    """
    _check(linear)
    most = most_rows(linear.rows, schedule)
    if linear.weight.format is not None:
        return schedule_quant_linear(linear, schedule, most)
    if schedule.bucket.batch_invariant:
        return _invariant(linear, schedule, most)
    if most > GPU_FEW_TOKENS:
        raise Refused("the matmul of cuBLAS is faster for many tokens")
    tokens = padded_tokens(most)
    problem = linear.problem(tokens)
    chosen = schedule.choose(
        LINEAR,
        problem.fields(),
        problem.tiles_kind,
        lambda: known_tiles(problem.product(), tokens, schedule.sm),
        known_microseconds(problem.product(), tokens, schedule.sm),
    )
    if isinstance(chosen, MatvecTiles):
        return launch_matvec(linear, schedule, chosen)
    return launch_tile(linear, schedule, tokens, chosen, share_of(linear.depth, chosen))


def _invariant(linear: Linear, schedule: Schedule, most: int) -> Value:
    """Add the launches of a batch-invariant matmul to `schedule`, and return the result. x has up to `most` rows.

    The matmul sums in one order for any number of rows. The bits of a row therefore do not depend on other rows.
    """
    product = linear.problem(most).product()
    require_invariant(schedule.sm, product.dtype)
    sums = sums_of(product, schedule.sm)
    if most > GPU_FEW_TOKENS:
        return launch_blocks(linear, schedule, block_tiles(product, sums, schedule.sm), sums)
    tokens = max(16, padded_tokens(most))
    return launch_tile(linear, schedule, tokens, few_tiles(product, tokens, schedule.sm), sums.share)


def _check(linear: Linear) -> None:
    """Raise Refused if the kernels do not support the matmul's dtypes, strides or sizes."""
    dtype = linear.x.type.dtype
    if dtype not in _DTYPES:
        raise Refused(f"a matmul of {linear.x.type} and {linear.weight.parts[0].type}")
    if linear.weight.format is None:
        loader_of(linear.weight).stored(linear.weight, dtype)
    if len(linear.x.type.shape) != 2:
        raise Refused(f"a matmul of {linear.x.type}, where x must have two axes")
    for value in (linear.x, linear.residual):
        if value is not None and value.strides[-1] != 1:
            raise Refused(f"{value.type} is strided along its last axis")
    for value in (linear.bias, linear.norm.weight if linear.norm else None):
        if value is not None and value.strides != (1,):
            raise Refused(f"{value.type} is not a dense vector")
    if linear.norm is not None and linear.depth > MOST_NORMED:
        raise Refused(f"a norm over {linear.depth} elements, more than {MOST_NORMED}")


def lower_quant_linear(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    """Add the launches of one call of `quant_linear`, without fused ops, to `schedule`, and return the result.

    Raises Refused if no kernel supports the call.
    """
    (result,) = call.results
    format = find_format(call.attributes["format"])
    weight = stored_weight(format, {part: call.value(part) for part in format.parts})
    return (schedule_linear(Linear(call.value("x"), weight, call.optional("bias"), result), schedule),)


LOWERINGS: Mapping[str, Lowering] = {"linear": lower_linear, "quant_linear": lower_quant_linear}
