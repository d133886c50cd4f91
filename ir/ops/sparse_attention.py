"""Attention over a paged KV cache in which each token reads positions that an indexer has chosen for it."""

import torch

from ingot.ir.cache.dtype import CacheScales, as_movable, check_cache_dtype
from ingot.ir.cache.form import CacheForm
from ingot.ir.ops.attention import attend, check_chosen, flops_of, heads_over, result_of
from ingot.ir.ops.paged_attention import keys_of_pages
from ingot.ir.ops.registry import Effect, Sample, bytes_of, define, own_row, wide
from ingot.ir.placements import Call, Fit


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    """Return sample calls with sequences of 3 tokens and 1 token in the step, with all forms of caches."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    q, table = randn(4, 4, 8), ints(3, 0, 5, 1).view(2, 2)
    chosen = ints(0, 5, 16, 17, 1, 2, 18, -1, 19, -1, -1, -1, 0, 4, 7, 8).view(4, 4)
    rows = (chosen, table, ints(0, 3), ints(3, 1))
    latents, plain, two_widths = randn(6, 1, 16, 1, 8), randn(6, 2, 16, 2, 8), randn(6, 1, 16, 2, 13)
    return [
        Sample((q, latents, *rows), {"scale": 0.35, "value_width": 6}),
        Sample((q, plain, *rows), {"scale": 0.35}),
        Sample((q, two_widths, *rows), {"scale": 0.35}),
    ]


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    form: CacheForm,
    table: torch.Tensor,
    places: torch.Tensor,
    scale: float,
    scales: CacheScales,
) -> torch.Tensor:
    """Return the attention [1, H, V] of one token q [1, H, D] over the positions `places` [n] of its sequence.

    `table` [P] holds the sequence's pages in the cache `kv`.
    """
    size = kv.shape[2]
    # Pages of one position each.
    read = as_movable(kv)[table[places // size].long(), :, places % size].unsqueeze(2).view(kv.dtype)
    k, v = keys_of_pages(read, form, places.shape[0], wide(q[:0]).dtype)
    seen = torch.ones(1, places.shape[0], dtype=torch.bool, device=q.device)
    return attend(q, k, v, seen, scale, None, None, scales)


def _fake(
    q: torch.Tensor,
    kv: torch.Tensor,
    chosen: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    *,
    scale: float,
    value_width: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    per_token: bool = False,
) -> torch.Tensor:
    check_chosen(q, chosen)
    check_cache_dtype(kv, q, CacheScales(k_scale, v_scale, per_token))
    return result_of(q, CacheForm.of_cache(kv.shape, q.shape[2], value_width, per_token=per_token))


def _most(kv: torch.Tensor, chosen: torch.Tensor, page_table: torch.Tensor) -> int:
    """Return the most positions that a token reads."""
    return min(chosen.shape[1], page_table.shape[1] * kv.shape[2])


def _costliest(
    q: torch.Tensor,
    kv: torch.Tensor,
    chosen: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    *,
    scale: float,
    value_width: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    per_token: bool = False,
) -> torch.Tensor:
    """Allocate the most memory that a call can need: a token has chosen as many positions as it can."""
    form = CacheForm.of_cache(kv.shape, q.shape[2], value_width, per_token=per_token)
    out, scales = result_of(q, form).zero_(), CacheScales(k_scale, v_scale, per_token)
    places = torch.zeros(_most(kv, chosen, page_table), dtype=torch.int64, device=q.device)
    out[:1] = _attend(own_row(q, 0), kv, form, page_table[0], places, scale, scales)
    return out


def _flops(
    q: torch.Tensor,
    kv: torch.Tensor,
    chosen: torch.Tensor,
    page_table: torch.Tensor,
    *_: object,
    value_width: int | None = None,
    per_token: bool = False,
    **__: object,
) -> int:
    form = CacheForm.of_cache(kv.shape, q.shape[2], value_width, per_token=per_token)
    return flops_of(q, form) * _most(kv, chosen, page_table)


def _traffic(
    q: torch.Tensor,
    kv: torch.Tensor,
    chosen: torch.Tensor,
    page_table: torch.Tensor,
    *_: torch.Tensor,
    **__: object,
) -> dict[str, int]:
    return {"kv": q.shape[0] * _most(kv, chosen, page_table) * bytes_of(kv[:1, :, :1])}


def _placement(call: Call) -> Fit:
    return heads_over(call, "kv", 3, {"q": 1})


@define(
    samples=_samples,
    fake=_fake,
    costliest=_costliest,
    flops=_flops,
    traffic=_traffic,
    fusible=False,
    needs_kernel=True,
    legal="cached",
    effect=Effect.READS_STATE,
    placement=_placement,
)
def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    chosen: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    *,
    scale: float,
    value_width: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    per_token: bool = False,
) -> torch.Tensor:
    """Return the attention [T, H, V] of q [T, H, D] over the positions that `chosen` i32[T, K] lists for each token.

    A row of `chosen` has positions of the token's sequence, each once, and -1 after them. The op
    `paged_choose_positions` makes it. The cache `kv`, `page_table`, `q_starts`, `q_lens`, `value_width` and the scales
    are those of `paged_attention`. The rows of padding tokens are zero.

    Raises VerifyError for an unknown cache shape, or if the cache's dtype is neither q's nor f8e4m3 nor i8.
    """
    check_chosen(q, chosen)
    form = CacheForm.of_cache(kv.shape, q.shape[2], value_width, per_token=per_token)
    out, scales = result_of(q, form).zero_(), CacheScales(k_scale, v_scale, per_token)
    for b, (start, count) in enumerate(zip(q_starts.tolist(), q_lens.tolist(), strict=True)):
        for row in range(start, start + count):
            places = chosen[row][chosen[row] >= 0].long()
            out[row : row + 1] = _attend(own_row(q, row), kv, form, page_table[b], places, scale, scales)
    return out
