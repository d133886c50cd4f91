"""The fused op of q/k norm, rotary embedding and cache write, between the q/k/v matmul and attention."""

from collections.abc import Callable
from typing import Any

import torch

from ingot.ir.cache.dtype import CacheScales, check_cache_dtype
from ingot.ir.cache.form import CacheForm
from ingot.ir.ops.dense import rms_norm, rope, rope_flops
from ingot.ir.ops.kv_append import kv_append
from ingot.ir.ops.registry import Sample, bytes_of, define, rows_bytes
from ingot.ir.placements import Call, Fit, by_heads
from ingot.ir.tables import make_table


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    qkv = torch.randn(3, 8 * 16, generator=g).to(dtype)
    q, k, v = (part.view(3, -1, 16) for part in qkv.split([64, 32, 32], 1))
    kv = torch.randn(4, 2, 16, 2, 16, generator=g).to(dtype)
    q_weight, k_weight = (torch.randn(16, generator=g).to(dtype) for _ in range(2))
    table = make_table({"kind": "rope", "rope_type": "default", "positions": 64, "theta": 1e4, "rotary_dim": 16})
    args = (kv, q, k, v, torch.tensor([1, 40, 7], dtype=torch.int32), table, torch.tensor([17, 63, -1]))
    normed = (*args, q_weight, k_weight)
    return [
        Sample(args, {"eps": 1e-6}),
        Sample(normed, {"eps": 1e-6, "interleaved": True}),
        Sample(normed, {"eps": 1e-6, "norm_last": True}),
    ]


def _prepared(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    interleaved: bool,
    norm_last: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    made = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        if weight is not None and not norm_last:
            x = rms_norm.reference(x, weight, eps=eps)
        x = rope.reference(x, positions, table, interleaved=interleaved)
        made.append(x if weight is None or not norm_last else rms_norm.reference(x, weight, eps=eps))
    return made[0], made[1]


def _with_append(append: Callable[..., Any] | None) -> Callable[..., torch.Tensor]:
    """Return an in-place variant of `qk_norm_rope_append`. It updates the cache and returns only q.

    `append` is the function that writes keys and values: a variant of `kv_append` that works in place.
    """
    assert append is not None

    def run(
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
        q, k = _prepared(q, k, positions, table, q_weight, k_weight, eps, interleaved, norm_last)
        append(kv, k, v, slots, k_scale=k_scale, v_scale=v_scale, per_token=per_token)
        return q

    return run


def _decompose(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    order = {"interleaved": True} if interleaved else {}
    made = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        if weight is not None and not norm_last:
            x = rms_norm(x, weight, eps=eps)
        x = rope(x, positions, table, **order)
        made.append(x if weight is None or not norm_last else rms_norm(x, weight, eps=eps))
    return made[0], kv_append(kv, made[1], v, slots, **CacheScales(k_scale, v_scale, per_token).options())


def _fake(
    kv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *_: object,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    per_token: bool = False,
    **__: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_cache_dtype(kv, k, CacheScales(k_scale, v_scale, per_token))
    CacheForm.check_equal(kv, k, v, per_token=per_token)
    return torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(kv)


def _flops(
    kv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    *norms: torch.Tensor | None,
    **_: object,
) -> int:
    turned = sum(rope_flops(x, positions, table) for x in (q, k))
    return turned + (q.numel() + k.numel() if norms and norms[0] is not None else 0)


def _traffic(
    kv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *_: torch.Tensor | None,
    **__: object,
) -> dict[str, int]:
    """Return the bytes that a call writes of the cache, which are k and v in its dtype, and reads of the table."""
    return {"kv": k.shape[0] * bytes_of(kv[:1, :, :1]), "table": rows_bytes(positions, table)}


def _placement(call: Call) -> Fit:
    return by_heads(call, {"kv": 3, "q": 1, "k": 1, "v": 1}, (call.shard(1), call.shard(3)))


@define(
    samples=_samples,
    fake=_fake,
    states=("kv",),
    in_place=_with_append(kv_append.in_place),
    costliest=_with_append(kv_append.costliest),
    decompose=_decompose,
    flops=_flops,
    traffic=_traffic,
    fusible=False,
    needs_kernel=True,
    placement=_placement,
)
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and rotate q and k, write k and v to the KV cache, and return (q [T, H, D], new cache).

    q is [T, H, D], and k and v are [T, KV, D]. `q_weight` and `k_weight` [D] are the weights of the RMS norms, with
    `eps`. Without them nothing is normed. With `norm_last`, the norms come after the rotation. `positions` [T], `table`
    f32[N, R] and `interleaved` are explained at the op `rope`. `slots` i64[T] (page * page size + offset) says where
    keys and values are written; a negative slot is padding. Keys are divided by `k_scale`, values by `v_scale`;
    with `per_token`, each row by its own scale.

    The op fuses `rms_norm`, `rope` and `kv_append`, and rounds as they do: after each of the three.
    """
    q, k = _prepared(q, k, positions, table, q_weight, k_weight, eps, interleaved, norm_last)
    return q, kv_append.reference(kv, k, v, slots, k_scale=k_scale, v_scale=v_scale, per_token=per_token)
