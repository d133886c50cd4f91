"""The ops of a dense layer on a CPU, computed by C++ kernels: matmuls, norms, gates and activations."""

from collections.abc import Callable
from typing import Any

import torch

from ingot.backends.cpu.calls.kernels import INT, POINTER, REAL, Function, Kernels
from ingot.ir.ops.activations import ACTIVATIONS


def dense_ops(kernels: Kernels) -> dict[str, Callable[..., Any]]:
    """Return the functions that compute matmuls, norms, gates and activations.

    Keys of the dict are op names, such as "ingot.linear".
    """
    return {
        "ingot.linear": _linear(kernels),
        "ingot.rms_norm": _rms_norm(kernels),
        "ingot.layer_norm": _layer_norm(kernels),
        "ingot.add_rms_norm": _add_rms_norm(kernels),
        "ingot.silu_mul": _silu_mul(kernels),
        "ingot.gelu_mul": _gelu_mul(kernels),
        "ingot.activate": _activate(kernels),
    }


def _linear(kernels: Kernels) -> Callable[..., torch.Tensor]:
    functions = kernels.by_dtype("linear", *[POINTER] * 2, INT, *[POINTER] * 2, *[INT] * 3)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        tokens, (n, k) = x.shape[0], weight.shape
        out = x.new_empty((tokens, n))
        functions[x.dtype](
            out.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            tokens,
            n,
            k,
        )
        return out

    return linear


def _rows(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes and strides that a norm kernel takes, for x [tokens, elements] or [tokens, heads, elements].

    They are (tokens, heads, elements, x's stride between tokens, x's stride between heads, the weight's stride between
    heads). If x has no axis of heads, there is 1 head. If all heads share one weight, its stride is 0.
    """
    tokens, *middle, dim = x.shape
    strides = x.stride(0), x.stride(1) if middle else 0
    return tokens, middle[0] if middle else 1, dim, *strides, dim if weight.dim() == 2 else 0


def _rms_norm(kernels: Kernels) -> Callable[..., torch.Tensor]:
    functions = kernels.by_weight("rms_norm", *[POINTER] * 3, *[INT] * 6, REAL)

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        out = x.new_empty(x.shape)
        function = functions[x.dtype, weight.dtype]
        function(out.data_ptr(), x.data_ptr(), weight.data_ptr(), *_rows(x, weight), eps)
        return out

    return rms_norm


def _layer_norm(kernels: Kernels) -> Callable[..., torch.Tensor]:
    functions = kernels.by_weight("layer_norm", *[POINTER] * 4, *[INT] * 6, REAL)

    def layer_norm(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, eps: float
    ) -> torch.Tensor:
        out = x.new_empty(x.shape)
        pointers = weight.data_ptr(), None if bias is None else bias.data_ptr()
        functions[x.dtype, weight.dtype](out.data_ptr(), x.data_ptr(), *pointers, *_rows(x, weight), eps)
        return out

    return layer_norm


def _add_rms_norm(kernels: Kernels) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    functions = kernels.by_weight("add_rms_norm", *[POINTER] * 5, *[INT] * 4, REAL)

    def add_rms_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, total = x.new_empty(x.shape), x.new_empty(x.shape)
        functions[x.dtype, weight.dtype](
            out.data_ptr(),
            total.data_ptr(),
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            *x.shape,
            x.stride(0),
            residual.stride(0),
            eps,
        )
        return out, total

    return add_rms_norm


def _gate(function: Function, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    out = gate.new_empty(gate.shape)
    function(out.data_ptr(), gate.data_ptr(), up.data_ptr(), *gate.shape, gate.stride(0), up.stride(0))
    return out


def _silu_mul(kernels: Kernels) -> Callable[..., torch.Tensor]:
    functions = kernels.by_dtype("silu_mul", *[POINTER] * 3, *[INT] * 4)
    return lambda gate, up: _gate(functions[gate.dtype], gate, up)


def _gelu_mul(kernels: Kernels) -> Callable[..., torch.Tensor]:
    functions = {kind: kernels.by_dtype(f"gelu_mul_{kind}", *[POINTER] * 3, *[INT] * 4) for kind in ("tanh", "none")}
    return lambda gate, up, *, approximate: _gate(functions[approximate][gate.dtype], gate, up)


def _activate(kernels: Kernels) -> Callable[..., torch.Tensor]:
    functions = {kind: kernels.by_dtype(kind, *[POINTER] * 2, *[INT] * 3) for kind in ACTIVATIONS}

    def activate(x: torch.Tensor, *, kind: str) -> torch.Tensor:
        out = x.new_empty(x.shape)
        functions[kind][x.dtype](out.data_ptr(), x.data_ptr(), *x.shape, x.stride(0))
        return out

    return activate
