"""The cpu provider, run side: the C++ kernels as the ops that they compute."""

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ingot.ir.errors import BackendError
from ingot.ir.ops import paged_attention
from ingot.ir.plan import Executable

_SUFFIXES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_POINTER, _INT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_ATTENTION = (
    *(_POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER),
    *(_INT, _INT, _INT, _INT, _REAL, _INT, _REAL),
)
_APPEND = (_POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _INT, _INT)
# From this many tokens of one sequence on, torch's products over all of them beat token-by-token kernels.
_MANY = 16


def load_library(executable: Executable, directory: Path) -> Mapping[str, Callable[..., Any]]:
    """The library's ops by their printed names; one with a state updates it in place."""
    path = directory / executable.files[0]
    try:
        library = ctypes.CDLL(str(path))
        attention = {dtype: getattr(library, f"paged_attention_{suffix}") for dtype, suffix in _SUFFIXES.items()}
        append = library.kv_append
    except (OSError, AttributeError) as error:
        raise BackendError(f"the library does not load: {error}", where=str(path)) from error
    for function in attention.values():
        function.argtypes, function.restype = _ATTENTION, None
    append.argtypes, append.restype = _APPEND, None
    return {"ingot.paged_attention": _Attention(attention), "ingot.kv_append": _Append(append)}


class _Append:
    """`kv_append`, in place."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        size = kv.element_size()
        self._function(
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


class _Attention:
    """`paged_attention`: the kernel for steps that feed few tokens of each sequence, torch for the others."""

    def __init__(self, functions: Mapping[torch.dtype, Callable[..., None]]) -> None:
        self._functions = functions

    def __call__(
        self,
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
        self._functions[q.dtype](
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
