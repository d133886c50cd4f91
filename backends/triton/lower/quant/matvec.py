"""Lowering of a matmul of one token with a quantized weight: one launch, without tensor cores."""

from dataclasses import replace

import torch

from ingot.backends.triton.kernels.quant.constants import Elements
from ingot.backends.triton.kernels.quant.matvec import quant_matvec
from ingot.backends.triton.lower.linear.call import Linear
from ingot.backends.triton.lower.quant.form import StoredForm
from ingot.backends.triton.lower.quant.tiles import QUANT_MATVEC, QuantMatvecTiles, matvec_tiles
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.machine.gpus import FEATURES

# A thread loads 16 bytes of a row at once, which have one scale.
_BYTES = 16


def takes_one_token(depth: int, form: StoredForm) -> bool:
    """Return whether the kernel for one token supports a weight: rows and groups are whole chunks of a thread."""
    chunk = chunk_of(form)
    columns = form.elements.scale_columns
    halves = columns == chunk // 2 and form.elements.element != "f8e4m3"
    return not (depth % chunk or form.rounded.columns % chunk or (columns % chunk and not halves))


def chunk_of(form: StoredForm) -> int:
    """Return how many columns of the weight a thread multiplies at once."""
    return _BYTES * (2 if form.elements.chunk else 1)


def one_token_elements(form: StoredForm, dtype: torch.dtype, sm: int) -> Elements:
    """Return how the kernels for one token read a weight. `dtype` is that of x."""
    native = dtype is not torch.float32 and (form.elements.element != "f8e4m3" or sm in FEATURES["fp8"])
    return replace(form.elements, assembly=native)


def launch_matvec(linear: Linear, form: StoredForm, schedule: Schedule) -> Value:
    """Add the launch of `quant_matvec` to `schedule`, and return the result. `takes_one_token` must be true."""
    chunk, problem = chunk_of(form), linear.problem(1)
    chosen = schedule.choose(
        QUANT_MATVEC,
        problem.fields(),
        QuantMatvecTiles,
        lambda: (matvec_tiles(problem.product(), chunk, schedule.cores), "heuristic"),
    )
    weight, gate, norm = linear.weight, linear.gate, linear.norm
    result = schedule.output(linear.result)
    schedule.launch(
        quant_matvec,
        (-(-linear.columns // chosen.rows), linear.rows),
        {
            "x": linear.x,
            "gain": norm.weight if norm else None,
            "stored": weight.part("input_scale"),
            "order": weight.part("order"),
            "weight": weight.part("weight"),
            "scales": weight.part("scales"),
            "zeros": weight.part("zeros"),
            "outer": weight.part("outer"),
            "y": result,
            "bias": linear.bias,
            "residual": linear.residual,
        },
        {
            "N": linear.columns,
            "K": linear.depth,
            "X_STRIDE": linear.x.strides[0],
            "RESIDUAL_STRIDE": linear.residual.strides[0] if linear.residual else 0,
            "FIRST": gate.gate if gate else 0,
            "UP": gate.up if gate else 0,
            "EPS": norm.eps if norm else 0.0,
            "GATED": gate is not None,
            "ACTIVATION": gate.activation if gate else linear.activation,
            "NORM": norm is not None,
            "BIAS": linear.bias is not None,
            "RESIDUAL": linear.residual is not None,
            "ROWS": chosen.rows,
            "BLOCK_K": max(chunk, chosen.block_k),
            "HELD": chosen.held,
            "ELEMENTS": one_token_elements(form, linear.x.type.dtype, schedule.sm),
            "ROUNDED": form.rounded,
            "DEPENDENT": schedule.dependent,
        },
        warps=chosen.warps,
        dependent=schedule.dependent,
    )
    return result
