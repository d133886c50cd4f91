"""The op that writes keys and values to the paged KV cache.

`ingot.ir.cache.form` defines the cache's shape: [pages, 2, page, kv_heads, head_dim] if keys and values are equally
wide. A slot is `page * page_size + offset`. The cache has the dtype of the keys, or eight bits with scales
(`ingot.ir.cache.dtype`).
"""

import torch

from ingot.ir.cache.dtype import CacheScales, as_cached, check_cache_dtype, is_narrow, row_scales
from ingot.ir.cache.form import CacheForm
from ingot.ir.ops.registry import Sample, bytes_of, define
from ingot.ir.placements import Call, Fit, by_heads


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    slots = torch.tensor([17, 63, -1])
    kv = torch.randn(4, 2, 16, 2, 8, generator=g).to(dtype)
    k, v = (torch.randn(3, 2, 8, generator=g).to(dtype) for _ in range(2))
    two_widths, shared = (torch.randn(4, 1, 16, 2, row, generator=g).to(dtype) for row in (13, 8))
    narrow = torch.randn(3, 2, 5, generator=g).to(dtype)
    return [Sample((kv, k, v, slots)), Sample((two_widths, k, narrow, slots)), Sample((shared, k, None, slots))]


def _write(
    kv: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    per_token: bool = False,
) -> None:
    if bool((slots < 0).any()):  # padding
        keep = slots >= 0
        k, v, slots = k[keep], None if v is None else v[keep], slots[keep]
    _write_real(kv, k, v, slots, CacheScales(k_scale, v_scale, per_token))


def _write_real(
    kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor, scales: CacheScales
) -> None:
    form = CacheForm.of(k, v, per_token=scales.per_token)
    form.check(kv.shape)
    scaled = scales.per_token and is_narrow(kv.dtype)  # an interpreter that computes exactly has caches in float64
    page_size = kv.shape[2]
    place = slots // page_size, slots % page_size
    of_keys: float | torch.Tensor = scales.k
    if scaled:
        of_keys = row_scales(k, kv.dtype)
        form.key_scales(kv).index_put_(place, of_keys)
    form.keys(kv).index_put_(place, as_cached(k, kv.dtype, of_keys))
    if v is None:
        return
    of_values: float | torch.Tensor = scales.v
    if scaled:
        of_values = row_scales(v, kv.dtype)
        form.value_scales(kv).index_put_(place, of_values)
    form.values(kv).index_put_(place, as_cached(v, kv.dtype, of_values))


def _write_padded(
    kv: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    per_token: bool = False,
) -> None:
    """Allocate the most memory that a write to the cache can need. The memory planner measures it.

    The worst case is a step with padding, because the other rows of k and v are then copied.
    """
    v = None if v is None else v.clone()
    _write_real(kv, k.clone(), v, slots.clone(), CacheScales(k_scale, v_scale, per_token))


def _fake(
    kv: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    per_token: bool = False,
) -> torch.Tensor:
    check_cache_dtype(kv, k, CacheScales(k_scale, v_scale, per_token))
    CacheForm.of(k, v, per_token=per_token).check(kv.shape)
    return torch.empty_like(kv)


def _traffic(kv: torch.Tensor, k: torch.Tensor, *_: torch.Tensor | None, **__: object) -> dict[str, int]:
    """Return the bytes that a call of `kv_append` writes of the cache: a row for each token."""
    return {"kv": k.shape[0] * bytes_of(kv[:1, :, :1])}


def _placement(call: Call) -> Fit:
    return by_heads(call, {"kv": 3, "k": 1, "v": 1}, call.shard(3))


@define(
    samples=_samples,
    fake=_fake,
    states=("kv",),
    in_place=_write,
    costliest=_write_padded,
    flops=0,
    traffic=_traffic,
    fusible=False,
    needs_kernel=True,
    placement=_placement,
)
def kv_append(
    kv: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    per_token: bool = False,
) -> torch.Tensor:
    """Write k [T, KV, D] and v [T, KV, V] to the KV cache `kv` at `slots` i64[T], and return the new cache.

    A slot is page * page size + offset in the page. A negative slot is padding and writes nothing. If `v` is None,
    values are part of the keys, and only keys are stored. Keys are divided by `k_scale`, and values by `v_scale`. Both
    are rounded to the cache's dtype. With `per_token`, each row is divided by a scale of its own, stored at its end.

    Raises VerifyError if the cache's shape does not fit k and v. Also raises it unless the cache has the keys' dtype,
    f8e4m3 or i8.
    """
    result = kv.clone()
    _write(result, k, v, slots, k_scale=k_scale, v_scale=v_scale, per_token=per_token)
    return result
