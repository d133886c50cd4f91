"""Gates of an MLP: an activation of one half times the other."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.numbers import tanh


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
    """ACTIVATION(gate) * up of [rows, WIDTH], rounded once. ACTIVATION is "silu", "gelu" or "gelu_tanh"."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    x = tl.load(gate + row * GATE_ROW + column, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(up + row * UP_ROW + column, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        active = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # sqrt(2 / pi) and the cubic's factor: arXiv 1606.08415, section 2.
        active = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    tl.store(result + row * WIDTH + column, (active * factor).to(result.dtype.element_ty), mask=mask)
