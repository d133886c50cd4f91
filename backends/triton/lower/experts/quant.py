"""Launches of the matmuls of experts with quantized weights: choices one by one, and in blocks of one expert."""

from dataclasses import replace
from typing import Any

from ingot.backends.triton.kernels.experts.quant_rows import quant_experts_down_rows, quant_experts_up_rows
from ingot.backends.triton.kernels.experts.quant_tile import quant_experts_down_tile, quant_experts_up_tile
from ingot.backends.triton.kernels.quant.columns import FRAGMENTS
from ingot.backends.triton.launches import Expr, cdiv, times
from ingot.backends.triton.lower.experts.blocks import Blocks
from ingot.backends.triton.lower.experts.call import Experts, QuantizedExperts
from ingot.backends.triton.lower.experts.fragments import (
    down_fragments,
    fitting,
    fragment_tiles,
    reads_fragments,
    up_fragments,
)
from ingot.backends.triton.lower.experts.problem import EXPERTS
from ingot.backends.triton.lower.experts.tiles import GroupTiles, quant_group_tiles
from ingot.backends.triton.lower.quant.form import StoredForm
from ingot.backends.triton.lower.quant.matvec import one_token_elements
from ingot.backends.triton.lower.quant.prepared_rows import KERNEL_DTYPES, GivenRows, needs_preparing, prepared_rows
from ingot.backends.triton.lower.quant.tiles import QuantMatvecTiles, chunk_of, expert_row_tiles
from ingot.backends.triton.schedule import Schedule, Value


def _row_tiles(one: Experts, quantized: QuantizedExperts, schedule: Schedule, *, gated: bool) -> QuantMatvecTiles:
    problem = one.problem(gated, 1)
    chosen = schedule.choose(
        EXPERTS,
        problem.fields(),
        QuantMatvecTiles,
        lambda: (expert_row_tiles(problem.depth, quantized.form), "heuristic"),
    )
    return replace(chosen, block_k=max(chunk_of(quantized.form), chosen.block_k))


def _read(one: Experts, quantized: QuantizedExperts, schedule: Schedule) -> dict[str, Any]:
    """Return the constants that say how kernels for choices one by one read a weight and round x."""
    return {
        "SIZES": quantized.sizes,
        "ELEMENTS": one_token_elements(quantized.form, one.dtype, schedule.sm),
        "ROUNDED": quantized.form.rounded,
        "DEPENDENT": schedule.dependent,
    }


def up_alone(one: Experts, quantized: QuantizedExperts, schedule: Schedule, here: Expr, hidden: Value) -> None:
    """Add the launch that computes the joined gate and up of each choice. `here` is 1 for its steps, else 0."""
    chosen = _row_tiles(one, quantized, schedule, gated=True)
    schedule.launch(
        quant_experts_up_rows,
        (cdiv(one.ffn, chosen.rows), times(here, one.choices)),
        {
            "x": one.x,
            "chosen": one.call.value("chosen"),
            **quantized.arguments,
            "bias": one.call.optional("gate_up_bias"),
            "hidden": hidden,
        },
        {
            "TOP_K": one.top_k,
            "F": one.ffn,
            "K": one.hidden,
            "X_STRIDE": one.x.strides[0],
            **one.activation(),
            "ROWS": chosen.rows,
            "BLOCK_K": chosen.block_k,
            "HELD": chosen.held,
            **_read(one, quantized, schedule),
        },
        warps=chosen.warps,
        dependent=schedule.dependent,
    )


def down_alone(
    one: Experts, quantized: QuantizedExperts, schedule: Schedule, here: Expr, hidden: Value, result: Value
) -> None:
    """Add the launch that computes the weighted sums of choices. `here` is 1 for its steps, else 0."""
    chosen = _row_tiles(one, quantized, schedule, gated=False)
    schedule.launch(
        quant_experts_down_rows,
        (cdiv(one.hidden, chosen.rows), times(here, one.rows)),
        {
            "hidden": hidden,
            "weights": one.call.value("weights"),
            "chosen": one.call.value("chosen"),
            **quantized.arguments,
            "bias": one.call.optional("down_bias"),
            "residual": one.residual,
            "y": result,
        },
        {
            "TOP_K": one.top_k,
            "N": one.hidden,
            "K": one.ffn,
            "RESIDUAL_STRIDE": one.residual_stride,
            "WEIGH": not one.weigh_input,
            "ROWS": chosen.rows,
            "BLOCK_K": chosen.block_k,
            **_read(one, quantized, schedule),
        },
        warps=chosen.warps,
        dependent=schedule.dependent,
    )


def _of_block(one: Experts, name: str, sm: int, block: int) -> StoredForm | None:
    """Return how blocks of `block` choices read a weight and its x. None if the weight is plain."""
    if (quantized := one.quantized.get(name)) is None:
        return None
    form = quantized.form
    if reads_fragments(quantized.weight.packing, one.dtype, sm, block):
        return replace(form, elements=replace(form.elements, chunk=FRAGMENTS.value))
    return form


def hidden_chunk(one: Experts, sm: int, block: int) -> int:
    """Return the order (CHUNK in `kernels/quant/columns.py`) in which blocks of gate and up write their results.

    It is 0 if down reads the columns in their order, or after a launch that rounds them.
    """
    up, down = one.quantized.get("gate_up"), _of_block(one, "down", sm, block)
    if up is None or down is None or down.rounded.element != "none":
        return 0
    return down.elements.chunk


def _group_tiles(
    one: Experts, quantized: QuantizedExperts, schedule: Schedule, block: int, *, gated: bool
) -> GroupTiles:
    problem, form = one.problem(gated, block), quantized.form
    known = quant_group_tiles(problem.columns, problem.depth, gated, block, form, schedule.sm)
    if schedule.bucket.batch_invariant:
        return known
    chosen = schedule.choose(EXPERTS, problem.fields(), GroupTiles, lambda: (known, "heuristic"))
    # A block has whole parts, because a scale multiplies the sum over a part.
    return replace(chosen, block_k=max(1, chosen.block_k // form.block_k) * form.block_k)


def _fragment_tiles(one: Experts, schedule: Schedule, block: int, *, gated: bool) -> GroupTiles:
    problem, known = one.problem(gated, block), fragment_tiles(gated, block)
    chosen = schedule.choose(EXPERTS, problem.fields(), GroupTiles, lambda: (known, "heuristic"))
    return fitting(chosen, gated, block)


def _tiles(quantized: QuantizedExperts, chosen: GroupTiles, depth: int) -> dict[str, Any]:
    return {
        "BLOCK_N": chosen.block_n,
        "BLOCK_K": chosen.block_k,
        "TOGETHER": chosen.together,
        "SHARE": -(-depth // chosen.block_k) * chosen.block_k,
        "COLUMNS": quantized.form.block_k,
        "SIZES": quantized.sizes,
        "ELEMENTS": quantized.form.elements,
        "DTYPE": KERNEL_DTYPES[quantized.form.codes],
    }


def x_chunk(one: Experts, sm: int, block: int) -> int:
    """Return the order (CHUNK in `kernels/quant/columns.py`) in which blocks of `block` choices read x."""
    form = _of_block(one, "gate_up", sm, block)
    return form.elements.chunk if form else 0


def prepared_x(one: Experts, schedule: Schedule, here: Expr, block: int) -> tuple[Value, Value | None]:
    """Return x as blocks of gate and up read it, and its scales. `here` is 1 for the steps that need it, else 0."""
    form = _of_block(one, "gate_up", schedule.sm, block)
    if form is None or not needs_preparing(form):
        return one.x, None
    return prepared_rows(GivenRows(one.x, one.rows, one.hidden), form, schedule, None, here)


def prepared_hidden(
    one: Experts, schedule: Schedule, here: Expr, block: int, hidden: Value
) -> tuple[Value, Value | None]:
    """Return the results of gate and up as blocks of down read them, and their scales.

    `here` is 1 for the steps that need it, else 0.
    """
    form = _of_block(one, "down", schedule.sm, block)
    if form is None or not needs_preparing(form) or hidden_chunk(one, schedule.sm, block):
        return hidden, None
    return prepared_rows(GivenRows(hidden, one.choices, one.ffn), form, schedule, None, here)


def up_blocks(
    one: Experts,
    quantized: QuantizedExperts,
    schedule: Schedule,
    here: Expr,
    blocks: Blocks,
    x: tuple[Value, Value | None],
    hidden: Value,
) -> None:
    """Add the launch of gate and up for blocks of choices. `x` is `prepared_x`; `here` is 1 for its steps, else 0."""
    if reads_fragments(quantized.weight.packing, one.dtype, schedule.sm, blocks.choices):
        chosen = _fragment_tiles(one, schedule, blocks.choices, gated=True)
        up_fragments(
            one, quantized, schedule, here, blocks, x[0], hidden, hidden_chunk(one, schedule.sm, blocks.choices), chosen
        )
        return
    chosen = _group_tiles(one, quantized, schedule, blocks.choices, gated=True)
    schedule.launch(
        quant_experts_up_tile,
        (times(times(here, blocks.count), -(-one.ffn // chosen.block_n)),),
        {
            "x": x[0],
            "x_scales": x[1],
            **blocks.arguments,
            **quantized.arguments,
            "bias": one.call.optional("gate_up_bias"),
            "hidden": hidden,
            "rows": one.rows,
        },
        {
            "TOP_K": one.top_k,
            "F": one.ffn,
            "K": one.hidden,
            "X_STRIDE": x[0].strides[0],
            **one.activation(),
            **blocks.constants,
            **_tiles(quantized, chosen, one.hidden),
            "CHUNK": hidden_chunk(one, schedule.sm, blocks.choices),
        },
        warps=chosen.warps,
        stages=chosen.stages,
        dependent=schedule.dependent,
    )


def down_blocks(
    one: Experts,
    quantized: QuantizedExperts,
    schedule: Schedule,
    here: Expr,
    blocks: Blocks,
    hidden: tuple[Value, Value | None],
    made: Value,
) -> None:
    """Add the launch of down for blocks of choices. `here` is 1 for its steps, else 0."""
    if reads_fragments(quantized.weight.packing, one.dtype, schedule.sm, blocks.choices):
        chosen = _fragment_tiles(one, schedule, blocks.choices, gated=False)
        down_fragments(one, quantized, schedule, here, blocks, hidden[0], made, chosen)
        return
    chosen = _group_tiles(one, quantized, schedule, blocks.choices, gated=False)
    schedule.launch(
        quant_experts_down_tile,
        (times(times(here, blocks.count), -(-one.hidden // chosen.block_n)),),
        {
            "hidden": hidden[0],
            "x_scales": hidden[1],
            **blocks.arguments,
            **quantized.arguments,
            "bias": one.call.optional("down_bias"),
            "made": made,
            "choices": one.choices,
        },
        {
            "N": one.hidden,
            "K": one.ffn,
            **blocks.constants,
            **_tiles(quantized, chosen, one.ffn),
        },
        warps=chosen.warps,
        stages=chosen.stages,
        dependent=schedule.dependent,
    )
