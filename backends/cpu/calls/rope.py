"""Rotary embedding and writes to the KV cache on a CPU, computed by C++ kernels."""

from collections.abc import Callable
from typing import Any

import torch

from ingot.backends.cpu.calls.kernels import INT, NARROW, NO_SCALE, POINTER, REAL, Kernels
from ingot.ir.cache.form import CacheForm


def rope_ops(kernels: Kernels) -> dict[str, Callable[..., Any]]:
    """Return the functions that compute rotary embedding and cache writes.

    Keys of the dict are op names, such as "ingot.kv_append". Functions that write to the cache update it in place.
    """
    return {
        "ingot.rope": _rope(kernels),
        "ingot.qk_norm_rope_append": _qk_norm_rope_append(kernels),
        "ingot.kv_append": _kv_append(kernels),
    }


def _rope(kernels: Kernels) -> Callable[..., torch.Tensor]:
    functions = kernels.by_dtype("rope", *[POINTER] * 4, *[INT] * 7)

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
    functions = kernels.by_cache("qk_norm_rope_append", *[POINTER] * 10, *[INT] * 13, REAL, INT, INT, REAL, REAL, INT)

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
        norm_last: bool = False,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        per_token: bool = False,
    ) -> torch.Tensor:
        out = q.new_empty(q.shape)
        tokens, heads, dim = q.shape
        form = CacheForm.of(k, v, per_token=per_token)
        functions[q.dtype, kv.dtype](
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
            kv.shape[4],
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            eps,
            interleaved,
            norm_last,
            k_scale,
            v_scale,
            form.key_scale_offset if per_token else NO_SCALE,
        )
        return out

    return qk_norm_rope_append


def _kv_append(kernels: Kernels) -> Callable[..., None]:
    types = (*[POINTER] * 4, *[INT] * 13)
    copy = kernels.one("kv_append", *types)
    convert = kernels.by_narrow_cache("kv_append", *types, REAL, REAL, INT, INT)

    def kv_append(
        kv: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        slots: torch.Tensor,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        per_token: bool = False,
    ) -> None:
        form, narrow = CacheForm.of(k, v, per_token=per_token), kv.dtype in NARROW
        size = 1 if narrow else kv.element_size()  # copies count in bytes
        values = (0, 0) if v is None else v.stride()[:2]
        strides = (*k.stride()[:2], *values, kv.stride(0), kv.stride(2), kv.stride(3))
        offset, value_scale = (at(kv.shape[2], kv.shape[3]) for at in (form.value_offset, form.value_scale_offset))
        places = (form.key_scale_offset, value_scale - offset) if per_token else (NO_SCALE, NO_SCALE)
        function, scales = (convert[k.dtype, kv.dtype], (k_scale, v_scale, *places)) if narrow else (copy, ())
        function(
            kv.data_ptr(),
            k.data_ptr(),
            None if v is None else v.data_ptr(),
            slots.data_ptr(),
            k.shape[0],
            kv.shape[2],
            kv.shape[3],
            form.key_width * size,
            form.value_width * size,
            *(stride * size for stride in (*strides, offset)),
            *scales,
        )

    return kv_append
