"""The ops of gates and activations in feed-forward layers, and ops that bound values."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from ingot.ir.errors import VerifyError
from ingot.ir.ops.registry import Sample, define, wide
from ingot.ir.placements import elementwise

# The functions of `activate` by kind, on float32.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


def _randn(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _silu_mul_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    merged = _randn(g, dtype, 5, 64)
    return [Sample((merged[:, :32], merged[:, 32:])), Sample((_randn(g, dtype, 1, 24), _randn(g, dtype, 1, 24)))]


@define(rows=("gate", "up"), samples=_silu_mul_samples, flops=1, placement=elementwise)
def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` for two tensors [T, F], as in SwiGLU (arXiv 2002.05202).

    Only the result is rounded to their dtype.
    """
    return (F.silu(wide(gate)) * wide(up)).to(gate.dtype).contiguous()


def _gelu_mul_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    gate, up = _randn(g, dtype, 5, 24), _randn(g, dtype, 5, 24)
    return [Sample((gate, up), {"approximate": "tanh"}), Sample((gate, up), {"approximate": "none"})]


@define(rows=("gate", "up"), samples=_gelu_mul_samples, flops=1, placement=elementwise)
def gelu_mul(gate: torch.Tensor, up: torch.Tensor, *, approximate: str) -> torch.Tensor:
    """Return `gelu(gate) * up` for two tensors [T, F] (arXiv 1606.08415).

    Only the result is rounded to their dtype. `approximate` is "none" or "tanh", as in torch.
    """
    return (F.gelu(wide(gate), approximate=approximate) * wide(up)).to(gate.dtype).contiguous()


def _activate_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    return [Sample((_randn(g, dtype, 5, 24),), {"kind": kind}) for kind in ACTIVATIONS]


@define(rows=("x",), samples=_activate_samples, flops=1, placement=elementwise)
def activate(x: torch.Tensor, *, kind: str) -> torch.Tensor:
    """Apply the activation function `kind` to x [T, F], and round the result to x's dtype.

    `kind` is "gelu" or "gelu_tanh" (arXiv 1606.08415), "relu", "relu_squared" (arXiv 2109.08668), or "sigmoid". Raises
    VerifyError for another kind.
    """
    if kind not in ACTIVATIONS:
        raise VerifyError(f"activation '{kind:.80}'", where="ingot.activate", expected=", ".join(ACTIVATIONS))
    return ACTIVATIONS[kind](wide(x)).to(x.dtype).contiguous()


def _soft_cap_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    return [Sample((_randn(g, dtype, 4, 33) * 40,), {"cap": 30.0})]


@define(rows=("x",), samples=_soft_cap_samples, flops=1, placement=elementwise)
def soft_cap(x: torch.Tensor, *, cap: float) -> torch.Tensor:
    """Return `cap * tanh(x / cap)`, in x's dtype.

    It keeps logits between -cap and cap (arXiv 2408.00118, section 2).
    """
    return (torch.tanh(wide(x) / cap) * cap).to(x.dtype)


def _clamp_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    return [Sample((_randn(g, dtype, 4, 33) * 2,), {"limit": 0.7})]


@define(rows=("x",), samples=_clamp_samples, flops=1, placement=elementwise)
def clamp(x: torch.Tensor, *, limit: float) -> torch.Tensor:
    """Return x with each element limited to the range from -limit to limit."""
    return wide(x).clamp(-limit, limit).to(x.dtype).contiguous()
