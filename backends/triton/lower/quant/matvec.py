"""Lowering of a matmul of one token with a quantized weight: one launch."""

from dataclasses import replace

import torch

from ingot.backends.triton.kernels.quant.constants import Elements
from ingot.backends.triton.kernels.quant.matvec import quant_matvec
from ingot.backends.triton.lower.linear.call import Linear
from ingot.backends.triton.lower.quant.form import StoredForm
from ingot.backends.triton.lower.quant.tiles import (
    QUANT_MATVEC,
    QuantMatvecTiles,
    chunk_of,
    cores_fit,
    matvec_tiles,
)
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.machine.gpus import FEATURES

# Registers of a multiprocessor, the most of a thread, and their granule in an allocation (CUDA C++ Programming Guide,
# "Compute Capabilities", and the CUDA occupancy calculator).
_REGISTERS = 65536
_MOST_REGISTERS = 255
_GRANULE = 8
_THREADS = 32  # of a warp


def takes_one_token(depth: int, form: StoredForm) -> bool:
    """Return whether the kernel for one token supports a weight: rows and groups are whole chunks of a thread."""
    chunk = chunk_of(form)
    columns = form.elements.scale_columns
    halves = columns == chunk // 2 and form.elements.element != "f8e4m3"
    return not (depth % chunk or form.rounded.columns % chunk or (columns % chunk and not halves))


def one_token_elements(form: StoredForm, dtype: torch.dtype, sm: int) -> Elements:
    """Return how the kernels for one token read a weight. `dtype` is that of x."""
    native = dtype is not torch.float32 and (form.elements.element != "f8e4m3" or sm in FEATURES["fp8"])
    return replace(form.elements, assembly=native)


def launch_matvec(linear: Linear, form: StoredForm, schedule: Schedule) -> Value:
    """Add the launch of `quant_matvec` to `schedule`, and return the result. `takes_one_token` must be true."""
    problem = linear.problem(1)
    chosen = schedule.choose(
        QUANT_MATVEC,
        problem.fields(),
        QuantMatvecTiles,
        lambda: (matvec_tiles(problem.product(), form, schedule.cores), "heuristic"),
    )
    if chosen.cores and not cores_fit(problem.product(), form, chosen):
        raise Refused(f"tensor cores cannot multiply one token with the tile sizes {chosen}")
    weight, gate, norm = linear.weight, linear.gate, linear.norm
    result = schedule.output(linear.result)
    groups = -(-linear.columns // chosen.rows)
    programs = min(groups, chosen.programs * schedule.cores) if chosen.programs else groups
    schedule.launch(
        quant_matvec,
        (programs, linear.rows),
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
            "PROGRAMS": programs,
            "BLOCK_K": max(chunk_of(form), chosen.block_k),
            "HELD": chosen.held,
            "FETCHED": chosen.fetched,
            "CORES": chosen.cores > 0,
            "ELEMENTS": one_token_elements(form, linear.x.type.dtype, schedule.sm),
            "ROUNDED": form.rounded,
            "DEPENDENT": schedule.dependent,
        },
        warps=chosen.warps,
        registers=chosen.registers or registers_of(chosen.programs, chosen.warps),
        dependent=schedule.dependent,
    )
    return result


def registers_of(programs: int, warps: int) -> int | None:
    """Return how many registers a thread may have, so that a multiprocessor runs `programs` programs at once.

    Each has `warps` warps. None: as many as the compiler takes.
    """
    if not programs:
        return None
    return min(_MOST_REGISTERS, _REGISTERS // (programs * warps * _THREADS) // _GRANULE * _GRANULE)
