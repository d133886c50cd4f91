"""Functions that allocate as much as a call of the cpu backend. They run on meta tensors, to measure memory.

The C++ kernels allocate only their results. Linears with quantized weights also keep about 1 MB for rearranged columns
of x, which is not counted. Attention for many tokens per sequence runs in torch (see
`calls/attention.py` and `calls/step_attention.py`). A step with drawn or penalized tokens runs the reference of
`sample`. `partial_attention` of many tokens per sequence also runs its reference.
"""

from collections.abc import Callable
from typing import Any

import torch

from ingot.backends.cpu.calls.attention import computed_by_torch, fused_by_torch
from ingot.ir.cache.form import CacheForm
from ingot.ir.masks import CAUSAL, Mask
from ingot.ir.ops import op_of, paged_attention, partial_attention, sample, step_attention
from ingot.ir.ops.attention import seen_in_step
from ingot.ir.ops.paged_attention import cached_keys, longest_read

# Block sizes of torch's flash attention for the CPU from 768 queries on (aten/src/ATen/native/cpu/
# FlashAttentionKernel.cpp). Each thread holds a block of scores, its maxima and sums, and a block of results in
# float32. If the dtype of q is narrower, it also holds the scores in that dtype.
_QUERIES, _KEYS = 256, 512


def costliest(target: Any, threads: int) -> Callable[..., Any]:
    """Return a function that allocates as much memory as the costliest call of an op.

    The compiler runs it to measure the memory of a step. The function takes the op's arguments. `target` is the op's
    function in the graph. `threads` is the number of torch's threads when the model is served.
    """
    op = op_of(target)
    assert op is not None
    if op is paged_attention:
        return lambda *args, **kwargs: _attention(threads, *args, **kwargs)
    if op is step_attention:
        return lambda *args, **kwargs: _step_attention(threads, *args, **kwargs)
    if op in (sample, partial_attention):
        return op.costliest

    def results_alone(*args: Any, **kwargs: Any) -> Any:
        # A state is updated in place: results that stand for states allocate nothing.
        args, kwargs = op.changed(args, kwargs, lambda name, value: value[:0] if name in op.states else value)
        return op.fake(*args, **kwargs)

    return results_alone


def _attention(
    threads: int,
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    sinks: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None,
    sharing: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    *,
    scale: float,
    mask: str = CAUSAL.name,
    soft_cap: float | None = None,
    value_width: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    per_token: bool = False,
) -> None:
    """Allocate and free as much memory as the costliest call of `paged_attention`.

    In that call, all tokens belong to one sequence, and its context fills all its pages. `threads` is the number of
    torch's threads. The other arguments are those of the op.
    """
    form = CacheForm.of_cache(kv.shape, q.shape[2], value_width, per_token=per_token)
    if not fused_by_torch(form, sinks, slopes, soft_cap, v_scale):
        paged_attention.costliest(
            q, kv, page_table, q_starts, q_lens, kv_lens, sinks, ancestors, sharing, slopes,
            scale=scale, mask=mask, soft_cap=soft_cap, value_width=value_width, k_scale=k_scale, v_scale=v_scale,
            per_token=per_token,
        )  # fmt: skip
        return
    out = torch.zeros(q.shape, dtype=q.dtype)
    by = Mask.named(mask)
    count, length = longest_read(q.shape[0], page_table.shape[1], kv.shape[2], by)
    k, v, places = cached_keys(kv, form, page_table[0], by, length - count, length)
    query = q[:count].to(computed_by_torch(q.dtype, form))
    as_q = [part.to(query.dtype) for part in (k, v)]  # the same tensors if the cache has the dtype of q
    own = None if ancestors is None else ancestors[:count]
    _in_torch(threads, query, seen_in_step(by, places[-count:], places, own, length - count))
    del out, k, v, as_q, query


def _step_attention(
    threads: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    *,
    scale: float,
    mask: str = CAUSAL.name,
    soft_cap: float | None = None,
) -> None:
    """Allocate and free as much memory as the costliest call of `step_attention`: one sequence has all tokens.

    `threads` is the number of torch's threads. The other arguments are those of the op.
    """
    if sinks is not None or slopes is not None or soft_cap is not None:
        step_attention.costliest(q, k, v, q_starts, q_lens, sinks, slopes, scale=scale, mask=mask, soft_cap=soft_cap)
        return
    out, by, places = torch.zeros(q.shape, dtype=q.dtype), Mask.named(mask), torch.arange(q.shape[0])
    _in_torch(threads, q, None if by.kind == "bidirectional" else by.seen(places, places))
    del out


def _in_torch(threads: int, q: torch.Tensor, seen: torch.Tensor | None) -> None:
    """Allocate and free as much memory as torch's attention of one sequence.

    That is memory for the mask, the result, the sums, and blocks of scores in each thread. `threads` is the number of
    torch's threads. `seen` is the bool mask [queries, keys]; None means that every query sees every key.
    """
    bias = None if seen is None else torch.empty(seen.shape, dtype=q.dtype)
    mixed = torch.empty_like(q, memory_format=torch.contiguous_format)
    sums = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32)
    blocks = torch.empty(threads, _QUERIES * (_KEYS + 2 + q.shape[2]), dtype=torch.float32)
    narrow = torch.empty(threads, _QUERIES, _KEYS if q.dtype != torch.float32 else 0, dtype=q.dtype)
    del bias, mixed, sums, blocks, narrow
