"""Lowering of a matmul with a quantized weight, alone or fused with the ops around it, for steps of few tokens.

The weight's elements are converted exactly, and scales multiply sums (`quant_tile`). If the format rounds activations,
or elements have four bits, or a norm comes first, a launch of `prepare_rows` precedes the matmul. It writes x in the
form that the matmul reads.
"""

from dataclasses import replace

import torch

from ingot.backends.triton.kernels.quant.tile import quant_tile
from ingot.backends.triton.launches import cdiv
from ingot.backends.triton.lower.linear.call import Linear
from ingot.backends.triton.lower.linear.choice import share_of
from ingot.backends.triton.lower.linear.invariant import require_invariant
from ingot.backends.triton.lower.linear.problem import LINEAR
from ingot.backends.triton.lower.linear.tiles import Tiles
from ingot.backends.triton.lower.quant.form import StoredForm, form_of
from ingot.backends.triton.lower.quant.matvec import launch_matvec, takes_one_token
from ingot.backends.triton.lower.quant.prepared_rows import KERNEL_DTYPES, GivenRows, prepared_rows
from ingot.backends.triton.lower.quant.tiles import many_tiles, quant_tiles
from ingot.backends.triton.lower.sizes import LEAST, padded_tokens
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.artifact.plan import GPU_FEW_TOKENS


def schedule_quant_linear(linear: Linear, schedule: Schedule, most: int) -> Value:
    """Add the launches of a matmul with a quantized weight and its fused ops to `schedule`, and return the result.

    x has up to `most` rows. Raises Refused if no kernel supports the format or the step.
    """
    form = form_of(linear.weight, linear.x.type.dtype, schedule.sm)
    if schedule.bucket.batch_invariant:
        return _invariant(linear, form, schedule, most)
    if most == 1 and takes_one_token(linear.depth, form):
        return launch_matvec(linear, form, schedule)
    if most > GPU_FEW_TOKENS:
        return _many(linear, form, schedule)
    tokens = max(LEAST, padded_tokens(most))
    problem = linear.problem(tokens)
    chosen = schedule.choose(
        LINEAR,
        problem.fields(),
        Tiles,
        lambda: (quant_tiles(problem.product(), form, tokens, schedule.cores, schedule.sm), "heuristic"),
    )
    # A block has whole parts, because a scale multiplies the sum over a part.
    chosen = replace(chosen, block_k=max(1, chosen.block_k // form.block_k) * form.block_k)
    x, scales = _prepared(linear, form, schedule, tokens)
    return _launch(linear, form, schedule, tokens, chosen, share_of(linear.depth, chosen), x, scales)


def _many(linear: Linear, form: StoredForm, schedule: Schedule) -> Value:
    """Add the launches of a matmul for steps of many tokens to `schedule`, and return the result."""
    tokens, chosen = many_tiles(form, linear.gate is not None, schedule.sm)
    x, scales = _prepared(linear, form, schedule, None)
    return _launch(linear, form, schedule, tokens, chosen, share_of(linear.depth, chosen), x, scales, many=True)


def _invariant(linear: Linear, form: StoredForm, schedule: Schedule, most: int) -> Value:
    """Add the launches of a batch-invariant matmul to `schedule`, and return the result. x has up to `most` rows.

    As with plain weights (`linear_invariant`), steps of all sizes use one instruction, and sum in one order: along the
    columns of a part, then parts, then splits.
    """
    product = linear.problem(LEAST).product()
    require_invariant(schedule.sm, form.codes)
    sums = quant_tiles(product, form, LEAST, schedule.cores, schedule.sm)
    share = share_of(linear.depth, sums)
    if most > GPU_FEW_TOKENS:
        tokens, chosen = many_tiles(form, linear.gate is not None, schedule.sm, sums.splits)
        x, scales = _prepared(linear, form, schedule, None)
        return _launch(linear, form, schedule, tokens, chosen, share, x, scales, many=True)
    tokens = max(LEAST, padded_tokens(most))
    chosen = quant_tiles(product, form, tokens, schedule.cores, schedule.sm)
    chosen = replace(chosen, splits=sums.splits, block_k=sums.block_k)
    x, scales = _prepared(linear, form, schedule, tokens)
    return _launch(linear, form, schedule, tokens, chosen, share, x, scales)


def _prepared(linear: Linear, form: StoredForm, schedule: Schedule, tokens: int | None) -> tuple[Value, Value | None]:
    """Return x as the matmul reads it, and its scales: normed, rounded and reordered, if the matmul needs that.

    The matmul kernel is compiled for `tokens` rows; None: any number.
    """
    stored = linear.weight.part("input_scale") if form.rounded.stored else None
    given = GivenRows(linear.x, linear.rows, linear.depth, linear.norm, stored, linear.weight.part("order"))
    return prepared_rows(given, form, schedule, tokens)


def _launch(
    linear: Linear,
    form: StoredForm,
    schedule: Schedule,
    tokens: int,
    chosen: Tiles,
    share: int,
    x: Value,
    x_scales: Value | None,
    many: bool = False,
) -> Value:
    """Add the launch of `quant_tile` to `schedule`, and return the result.

    `x` has up to `tokens` rows. With `many` it has any number, and a program computes `tokens` of them. A split has
    `share` columns.
    """
    weight, gate = linear.weight, linear.gate
    result = schedule.output(linear.result)
    blocks = -(-linear.columns // chosen.block_n)
    split = chosen.splits > 1 and not many
    sums = (chosen.splits, blocks, 1 if gate is None else 2, chosen.block_n, tokens)
    schedule.launch(
        quant_tile,
        (blocks, 1, cdiv(linear.rows, tokens)) if many else (blocks, chosen.splits, 1),
        {
            "x": x,
            "x_scales": x_scales,
            "weight": weight.part("weight"),
            "scales": weight.part("scales"),
            "zeros": weight.part("zeros"),
            "outer": weight.part("outer"),
            "y": result,
            "bias": linear.bias,
            "residual": linear.residual,
            "partial": schedule.scratch(torch.float32, sums) if split else None,
            "arrivals": schedule.counter((blocks,)) if split else None,
            "rows": linear.rows,
        },
        {
            "N": linear.columns,
            "K": linear.depth,
            "X_STRIDE": x.strides[0],
            "RESIDUAL_STRIDE": linear.residual.strides[0] if linear.residual else 0,
            "FIRST": gate.gate if gate else 0,
            "UP": gate.up if gate else 0,
            "GATED": gate is not None,
            "ACTIVATION": gate.activation if gate else linear.activation,
            "BIAS": linear.bias is not None,
            "RESIDUAL": linear.residual is not None,
            "TOKENS": tokens,
            "BLOCK_N": chosen.block_n,
            "BLOCK_K": chosen.block_k,
            "SPLITS": chosen.splits,
            "SHARE": share,
            "LINES": chosen.lines,
            "MANY": many,
            "COLUMNS": form.block_k,
            "ELEMENTS": form.elements,
            "DTYPE": KERNEL_DTYPES[form.codes],
            "DEPENDENT": schedule.dependent,
        },
        warps=chosen.warps,
        stages=chosen.stages,
        dependent=schedule.dependent,
    )
    return result
