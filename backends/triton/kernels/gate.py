"""The kernel of the gate of an MLP, activation(gate) * up, or of an activation alone."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.linear.parts import gated


@triton.jit
def gate_mul(
    gate,
    up,
    result,
    WIDTH: tl.constexpr,
    GATE_ROW: tl.constexpr,
    UP_ROW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute ACTIVATION(gate) * up, rounded once, and write it to `result` [rows, WIDTH].

    If `up` is None, it is only ACTIVATION(gate). ACTIVATION is "silu", "gelu", "gelu_tanh", "relu", "relu_squared" or
    "sigmoid". GATE_ROW and UP_ROW are row strides in elements.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    x = tl.load(gate + row * GATE_ROW + column, mask=mask, other=0.0).to(tl.float32)
    if up is not None:
        factor = tl.load(up + row * UP_ROW + column, mask=mask, other=0.0).to(tl.float32)
    else:
        factor = 1.0
    value = gated(x, factor, ACTIVATION)
    tl.store(result + row * WIDTH + column, value.to(result.dtype.element_ty), mask=mask)
