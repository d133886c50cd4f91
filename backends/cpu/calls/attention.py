"""Attention over the paged KV cache on a CPU: the C++ kernel for few tokens per sequence, torch for many."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ingot.backends.cpu.calls.kernels import INT, NO_SCALE, POINTER, REAL, Kernels
from ingot.ir.cache.form import CacheForm
from ingot.ir.masks import CAUSAL, KINDS, Mask
from ingot.ir.ops import paged_attention, partial_attention
from ingot.ir.ops.attention import seen_in_step
from ingot.ir.ops.paged_attention import cached_keys

# From this many tokens per sequence on, torch's matmuls over all tokens are faster than the token-by-token kernel.
_MANY = 16


def attention_ops(kernels: Kernels) -> dict[str, Callable[..., Any]]:
    """Return the functions that compute attention on paged caches.

    Keys of the dict are op names, such as "ingot.paged_attention".
    """
    return {
        "ingot.paged_attention": _over_pages(kernels, partial=False),
        "ingot.partial_attention": _over_pages(kernels, partial=True),
    }


def _over_pages(kernels: Kernels, *, partial: bool) -> Callable[..., Any]:
    """Return the function that computes the op `paged_attention`; with `partial`, the op `partial_attention`.

    The function of `partial_attention` returns (attention, log-sum-exp of each row). For few tokens per sequence, the
    C++ kernel computes the attention. For many, torch's attention or the op's reference does.
    """
    functions = kernels.by_cache(
        "paged_attention",
        *(POINTER, POINTER, POINTER, INT, POINTER, POINTER, INT, POINTER, POINTER, POINTER, INT, POINTER, POINTER),
        *[INT] * 10,
        *(REAL, INT, INT, REAL, REAL, INT, INT),
    )

    def attend(
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
        cached: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        by = Mask.named(mask)
        kv_lens = kv_lens - q_lens if cached else kv_lens
        form = CacheForm.of_cache(kv.shape, q.shape[2], value_width, per_token=per_token)
        sequences, heads, (page, kv_heads) = q_lens.shape[0], q.shape[1], kv.shape[2:4]
        # In the kernel, a token sees one range of positions. With `ancestors` (a tree mask), that range has gaps.
        if q.shape[0] >= _MANY * sequences or ancestors is not None:
            if not partial and fused_by_torch(form, sinks, slopes, soft_cap, v_scale):
                return _by_sequence(q, kv, form, page_table, q_starts, q_lens, kv_lens, scale * k_scale, by, ancestors)
            op, last = (partial_attention, ()) if partial else (paged_attention, (ancestors, None, slopes))
            attended: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = op.reference(
                q, kv, page_table, q_starts, q_lens, kv_lens, sinks, *last,
                scale=scale, mask=mask, soft_cap=soft_cap, value_width=value_width, k_scale=k_scale, v_scale=v_scale,
                per_token=per_token,
            )  # fmt: skip
            return attended
        out = torch.zeros(*q.shape[:2], form.value_width, dtype=q.dtype)
        lse = torch.full(q.shape[:2], float("-inf")) if partial else None
        functions[q.dtype, kv.dtype](
            out.data_ptr(),
            None if lse is None else lse.data_ptr(),
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
            None if slopes is None else slopes.data_ptr(),
            heads,
            kv_heads,
            form.key_width,
            form.value_width,
            page,
            q.stride(1),
            kv.stride(0),
            kv.stride(2),
            kv.stride(3),
            form.value_offset(page, kv_heads),
            scale * k_scale,
            KINDS.index(by.kind),
            by.size,
            soft_cap or 0.0,
            v_scale,
            *((form.key_scale_offset, form.value_scale_offset(page, kv_heads)) if per_token else (NO_SCALE, NO_SCALE)),
        )
        return out if lse is None else (out, lse)

    return attend


def fused_by_torch(
    form: CacheForm,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    soft_cap: float | None,
    v_scale: float,
) -> bool:
    """Return whether torch's fused attention can compute a call with these arguments.

    If not, the op's reference computes it. `form` is the shape of the cache, and `sinks` are logits of attention sinks.
    ALiBi `slopes` exclude torch: it adds the bias in the dtype of q, and bfloat16 cannot hold long distances.
    """
    return form.equal and sinks is None and slopes is None and soft_cap is None and v_scale == 1.0


def computed_by_torch(dtype: torch.dtype, form: CacheForm) -> torch.dtype:
    """Return the dtype in which torch's fused attention computes a call with q of `dtype`.

    It is float32 for a cache with scales per token: scaled keys and values are not rounded a second time.
    """
    return torch.float32 if form.per_token else dtype


def _by_sequence(
    q: torch.Tensor,
    kv: torch.Tensor,
    form: CacheForm,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    by: Mask,
    ancestors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention [T, H, D] over a paged cache, with one call of torch's fused attention per sequence.

    `form` says how the cache stores keys and values. `by` is the attention mask. The other arguments are those of the
    op `paged_attention`.
    """
    out = torch.zeros(q.shape, dtype=q.dtype)
    computed = computed_by_torch(q.dtype, form)
    for b, (start, count, length) in enumerate(zip(q_starts.tolist(), q_lens.tolist(), kv_lens.tolist(), strict=True)):
        if count == 0:
            continue
        k, v, places = cached_keys(kv, form, page_table[b], by, length - count, length)
        row = slice(start, start + count)
        query = q[row].to(computed).transpose(0, 1)[None]
        own = None if ancestors is None else ancestors[row]
        keys, values = (part.to(computed).transpose(0, 1)[None] for part in (k, v))
        mixed = F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=seen_in_step(by, places[-count:], places, own, length - count),
            scale=scale,
            enable_gqa=q.shape[1] != kv.shape[3],
        )
        out[row] = mixed[0].transpose(0, 1)
    return out
