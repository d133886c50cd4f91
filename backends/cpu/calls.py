"""The C++ kernels as the ops that they compute: pointers, sizes and strides of torch tensors. Run side.

Every kernel takes its outputs first. What a kernel expects of dtypes and strides, `emit` has checked in its claim.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ingot.ir.ops import paged_attention

SUFFIXES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_POINTER, _INT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
# From this many tokens of one sequence on, torch's products over all of them beat token-by-token kernels.
_MANY = 16

Function = Callable[..., None]


class Kernels:
    """The functions of a library. Raises OSError for what is no library, AttributeError where one is missing."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def one(self, name: str, *types: Any) -> Function:
        function: Any = getattr(self._library, name)
        function.argtypes, function.restype = types, None
        return function  # type: ignore[no-any-return]  # ctypes makes it callable

    def by_dtype(self, name: str, *types: Any) -> dict[torch.dtype, Function]:
        return {dtype: self.one(f"{name}_{suffix}", *types) for dtype, suffix in SUFFIXES.items()}

    def by_weight(self, name: str, *types: Any) -> dict[tuple[torch.dtype, torch.dtype], Function]:
        """By the dtypes of the elements and of a weight, which is of the same one or float32."""
        return {
            (dtype, weight): self.one(f"{name}_{suffix}_{SUFFIXES[weight]}", *types)
            for dtype, suffix in SUFFIXES.items()
            for weight in {dtype, torch.float32}
        }


def ops_of(kernels: Kernels) -> dict[str, Callable[..., Any]]:
    """The ops by their printed names; one with a state updates it in place. They use as many threads as torch does."""
    kernels.one("set_threads", _INT)(torch.get_num_threads())
    return {
        "ingot.linear": _linear(kernels),
        "ingot.rms_norm": _norm(kernels, "rms_norm"),
        "ingot.layer_norm": _norm(kernels, "layer_norm"),
        "ingot.add_rms_norm": _add_rms_norm(kernels),
        "ingot.silu_mul": _silu_mul(kernels),
        "ingot.gelu_mul": _gelu_mul(kernels),
        "ingot.rope": _rope(kernels),
        "ingot.qk_norm_rope_append": _qk_norm_rope_append(kernels),
        "ingot.kv_append": _kv_append(kernels),
        "ingot.paged_attention": _paged_attention(kernels),
    }


def _linear(kernels: Kernels) -> Callable[..., torch.Tensor]:
    functions = kernels.by_dtype("linear", *[_POINTER] * 2, _INT, *[_POINTER] * 2, *[_INT] * 3)

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


def _norm(kernels: Kernels, name: str) -> Callable[..., torch.Tensor]:
    functions = kernels.by_weight(name, *[_POINTER] * 3, *[_INT] * 6, _REAL)

    def norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        out = x.new_empty(x.shape)
        tokens, *middle, dim = x.shape
        functions[x.dtype, weight.dtype](
            out.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            tokens,
            middle[0] if middle else 1,
            dim,
            x.stride(0),
            x.stride(1) if middle else 0,
            dim if weight.dim() == 2 else 0,
            eps,
        )
        return out

    return norm


def _add_rms_norm(kernels: Kernels) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    functions = kernels.by_weight("add_rms_norm", *[_POINTER] * 5, *[_INT] * 4, _REAL)

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
    functions = kernels.by_dtype("silu_mul", *[_POINTER] * 3, *[_INT] * 4)
    return lambda gate, up: _gate(functions[gate.dtype], gate, up)


def _gelu_mul(kernels: Kernels) -> Callable[..., torch.Tensor]:
    functions = {kind: kernels.by_dtype(f"gelu_mul_{kind}", *[_POINTER] * 3, *[_INT] * 4) for kind in ("tanh", "none")}
    return lambda gate, up, *, approximate: _gate(functions[approximate][gate.dtype], gate, up)


def _rope(kernels: Kernels) -> Callable[..., torch.Tensor]:
    functions = kernels.by_dtype("rope", *[_POINTER] * 4, *[_INT] * 7)

    def rope(
        x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, interleaved: bool = False
    ) -> torch.Tensor:
        out = x.new_empty(x.shape)
        functions[x.dtype](
            out.data_ptr(),
            x.data_ptr(),
            positions.data_ptr(),
            table.data_ptr(),
            *x.shape,
            table.shape[1],
            x.stride(0),
            x.stride(1),
            interleaved,
        )
        return out

    return rope


def _qk_norm_rope_append(kernels: Kernels) -> Callable[..., torch.Tensor]:
    functions = kernels.by_dtype("qk_norm_rope_append", *[_POINTER] * 10, *[_INT] * 12, _REAL, _INT)

    def qk_norm_rope_append(
        kv: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        *,
        eps: float,
        interleaved: bool = False,
    ) -> torch.Tensor:
        out = q.new_empty(q.shape)
        tokens, heads, dim = q.shape
        functions[q.dtype](
            out.data_ptr(),
            kv.data_ptr(),
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            positions.data_ptr(),
            table.data_ptr(),
            slots.data_ptr(),
            None if q_weight is None else q_weight.data_ptr(),
            None if k_weight is None else k_weight.data_ptr(),
            tokens,
            heads,
            k.shape[1],
            dim,
            table.shape[1],
            kv.shape[2],
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            eps,
            interleaved,
        )
        return out

    return qk_norm_rope_append


def _kv_append(kernels: Kernels) -> Callable[..., None]:
    function = kernels.one("kv_append", *[_POINTER] * 4, *[_INT] * 5)

    def kv_append(kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        size = kv.element_size()
        function(
            kv.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            slots.data_ptr(),
            k.shape[0],
            kv.shape[2],
            k.shape[1] * k.shape[2] * size,
            k.stride(0) * size,
            v.stride(0) * size,
        )

    return kv_append


def _paged_attention(kernels: Kernels) -> Callable[..., torch.Tensor]:
    """The kernel for steps that feed few tokens of each sequence, torch for the others."""
    functions = kernels.by_dtype(
        "paged_attention",
        *(_POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER),
        *(_INT, _INT, _INT, _INT, _REAL, _INT, _REAL),
    )

    def attend(
        q: torch.Tensor,
        kv: torch.Tensor,
        page_table: torch.Tensor,
        q_starts: torch.Tensor,
        q_lens: torch.Tensor,
        kv_lens: torch.Tensor,
        sinks: torch.Tensor | None = None,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        sequences, heads, kv_heads = q_lens.shape[0], q.shape[1], kv.shape[3]
        if q.shape[0] >= _MANY * sequences:
            return _by_sequence(q, kv, page_table, q_starts, q_lens, kv_lens, sinks, scale, window, soft_cap)
        out = torch.zeros(q.shape, dtype=q.dtype)
        functions[q.dtype](
            out.data_ptr(),
            q.data_ptr(),
            q.stride(0),
            kv.data_ptr(),
            page_table.data_ptr(),
            page_table.stride(0),
            q_starts.data_ptr(),
            q_lens.data_ptr(),
            kv_lens.data_ptr(),
            sequences,
            None if sinks is None else sinks.data_ptr(),
            heads,
            kv_heads,
            q.shape[2],
            kv.shape[2],
            scale,
            window or 0,
            soft_cap or 0.0,
        )
        return out

    return attend


def _by_sequence(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """One sequence after the other, through torch's fused attention where it has what the model needs."""
    if sinks is not None or soft_cap is not None:
        attended: torch.Tensor = paged_attention.reference(
            q, kv, page_table, q_starts, q_lens, kv_lens, sinks, scale=scale, window=window, soft_cap=soft_cap
        )
        return attended
    out = torch.zeros(q.shape, dtype=q.dtype)
    page_size = kv.shape[2]
    for b, (start, count, length) in enumerate(zip(q_starts.tolist(), q_lens.tolist(), kv_lens.tolist(), strict=True)):
        if count == 0:
            continue
        # Pages that lie wholly before the first token's window are not even read.
        first = 0 if window is None else max(0, length - count - window + 1) // page_size
        pages = kv.index_select(0, page_table[b, first : -(-length // page_size)])
        places = torch.arange(first * page_size, length)
        k, v = (pages[:, part].flatten(0, 1)[: places.shape[0]].transpose(0, 1)[None] for part in (0, 1))
        behind = torch.arange(length - count, length)[:, None] - places[None, :]
        mask = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        query = q[start : start + count].transpose(0, 1)[None]
        mixed = F.scaled_dot_product_attention(
            query, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != kv.shape[3]
        )
        out[start : start + count] = mixed[0].transpose(0, 1)
    return out
