"""The indexer of DeepSeek sparse attention (DeepSeek-V3.2): for each token, the positions that attention then reads.

`choose_positions` reads the step's own keys, as traced. A pass replaces it by `paged_choose_positions`, which reads the
keys of a paged cache.
"""

import torch

from ingot.ir.cache.form import CacheForm
from ingot.ir.errors import VerifyError
from ingot.ir.masks import CAUSAL
from ingot.ir.ops.paged_attention import cached_keys
from ingot.ir.ops.registry import Effect, Sample, define, own_row, rows_bytes, wide
from ingot.ir.placements import whole


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the scores [m] of `keys` [m, D] for one token: the sum over heads of weight * relu(q · key).

    `q` [1, H, D] and `weights` [1, H] belong to the token. The scores are float64 if `keys` is, else float32.
    """
    dots = wide(keys) @ wide(q)[0].T
    return torch.relu(dots) @ weights[0].to(dots.dtype)


def best_positions(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the indices of the `top_k` greatest of `scores` [m], in ascending order. Of equal scores, the first count.

    Without that many scores, it returns all indices.
    """
    return scores.sort(descending=True, stable=True).indices[:top_k].sort().values


def _check(q: torch.Tensor, width: object, weights: torch.Tensor, top_k: int, where: str) -> None:
    """Raise VerifyError unless `q` [T, H, D] fits keys of `width` elements and the `weights` [T, H] of its heads."""
    if top_k < 1:
        raise VerifyError(f"top_k {top_k}", where=where, expected="at least 1 position for each token")
    if q.shape[2] != width:
        raise VerifyError(f"q has heads of {q.shape[2]} numbers and keys of {width}", where=where, expected="one width")
    if weights.shape[1:] != q.shape[1:2] or weights.dtype not in (torch.float32, torch.float64):
        raise VerifyError(
            f"weights {weights.dtype} {list(weights.shape)}", where=where, expected=f"float32 [T, {q.shape[1]}]"
        )


def _nothing(q: torch.Tensor, top_k: int) -> torch.Tensor:
    return torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)


def _randn(g: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=g).to(dtype)


def _weights(g: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return _randn(g, torch.promote_types(dtype, torch.float32), *shape)


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    positions = torch.tensor([0, 1, 2, 0, 1], dtype=torch.int32)
    seqs = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32)
    args = (_randn(g, dtype, 5, 3, 16), _randn(g, dtype, 5, 1, 16), _weights(g, dtype, 5, 3), positions, seqs)
    return [Sample(args, {"top_k": 2, "layer": 0}), Sample(args, {"top_k": 7, "layer": 1})]


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    token_seqs: torch.Tensor,
    *,
    top_k: int,
    layer: int,
) -> torch.Tensor:
    """Return an empty result of `choose_positions`. Raises VerifyError for sizes that do not fit."""
    where = "ingot.choose_positions"
    if k.shape[1] != 1:
        raise VerifyError(f"keys with {k.shape[1]} heads", where=where, expected="one head for all heads of q")
    _check(q, k.shape[2], weights, top_k, where)
    return q.new_empty((q.shape[0], top_k), dtype=torch.int32)


def _costliest(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    token_seqs: torch.Tensor,
    *,
    top_k: int,
    layer: int,
) -> torch.Tensor:
    """Allocate the most memory that a call can need: the last token of one sequence sees all tokens."""
    out = _nothing(q, top_k)
    seen = torch.zeros(k.shape[0], dtype=torch.int64, device=k.device)
    best = best_positions(index_scores(own_row(q, 0), k[seen, 0], own_row(weights, 0)), top_k)
    out[0, : best.shape[0]] = positions[seen[best]]
    return out


def _flops(q: torch.Tensor, k: torch.Tensor, *_: object, **__: object) -> int:
    # An upper bound: treats all tokens as one unmasked sequence.
    return 2 * q.numel() * k.shape[0]


@define(
    samples=_samples,
    fake=_fake,
    costliest=_costliest,
    flops=_flops,
    fusible=False,
    legal="pure",
    placement=whole,
)
def choose_positions(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    token_seqs: torch.Tensor,
    *,
    top_k: int,
    layer: int,
) -> torch.Tensor:
    """Return for each token the `top_k` positions of its sequence with the greatest scores, i32[T, top_k].

    The score of a position for a token is the sum over heads of `weight * relu(q · key)`, for q [T, H, D], keys k
    [T, 1, D] and `weights` f32[T, H]. A token chooses among its own and earlier positions. Of equal scores, earlier
    positions count. A row is in ascending order. If a token sees fewer positions, the row has them all, and then -1.

    `token_seqs` [T] holds the sequence of each token, and `positions` i32[T] its position there. A pass replaces this
    op by `paged_choose_positions`. `layer` is for that pass. Calls with equal `layer` have equal keys. Raises
    VerifyError for sizes that do not fit.
    """
    _fake(q, k, weights, positions, token_seqs, top_k=top_k, layer=layer)
    out = _nothing(q, top_k)
    for row in range(q.shape[0]):
        seen = ((token_seqs == token_seqs[row]) & (positions <= positions[row])).nonzero()[:, 0]
        best = best_positions(index_scores(own_row(q, row), k[seen, 0], own_row(weights, row)), top_k)
        out[row, : len(best)] = positions[seen[best]]
    return out


def _form(q: torch.Tensor) -> CacheForm:
    """Return how a cache stores the indexer's keys: rows as wide as a head of q."""
    return CacheForm(q.shape[2], q.shape[2], shared=True)


def _paged_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    """Return sample calls with sequences of 3 tokens, 1 token and no token in the step, and with one padding token."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    keys, q, weights = _randn(g, dtype, 6, 1, 16, 1, 8), _randn(g, dtype, 5, 4, 8), _weights(g, dtype, 5, 4)
    table = ints(3, 0, 5, 1, 2, 2).view(3, 2)
    args = (q, keys, weights, table, ints(0, 3, 4), ints(3, 1, 0), ints(20, 9, 0))
    return [Sample(args, {"top_k": 6}), Sample(args, {"top_k": 32})]


def _paged_fake(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    top_k: int,
) -> torch.Tensor:
    """Return an empty result of `paged_choose_positions`. Raises VerifyError for sizes that do not fit."""
    _check(q, keys.shape[-1], weights, top_k, "ingot.paged_choose_positions")
    _form(q).check(keys.shape)
    if keys.shape[3] != 1:
        raise VerifyError(f"a cache with {keys.shape[3]} heads", expected="one head of keys for all heads of q")
    return q.new_empty((q.shape[0], top_k), dtype=torch.int32)


def _read(keys: torch.Tensor, q: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """Return the keys [length, D] of one sequence, whose pages are in `table` [P]."""
    return wide(cached_keys(keys, _form(q), table, CAUSAL, 0, length)[0][:, 0])


def _paged_costliest(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    top_k: int,
) -> torch.Tensor:
    """Allocate the most memory that a call can need: a token of the longest sequence sees all of its positions."""
    out = _nothing(q, top_k)
    held = _read(keys, q, page_table[0], page_table.shape[1] * keys.shape[2])
    best_positions(index_scores(own_row(q, 0), held, own_row(weights, 0)), top_k)
    return out


def _paged_flops(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, table: torch.Tensor, *_: object) -> int:
    return 2 * q.numel() * table.shape[1] * keys.shape[2]


def _paged_traffic(
    q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, table: torch.Tensor, *_: object, **__: object
) -> dict[str, int]:
    return {"keys": rows_bytes(table, keys)}  # a row of the cache is a page


@define(
    samples=_paged_samples,
    fake=_paged_fake,
    costliest=_paged_costliest,
    flops=lambda *args, **_: _paged_flops(*args),
    traffic=_paged_traffic,
    fusible=False,
    needs_kernel=True,
    legal="cached",
    effect=Effect.READS_STATE,
    placement=whole,
)
def paged_choose_positions(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    top_k: int,
) -> torch.Tensor:
    """Return for each token the `top_k` positions of its sequence with the greatest scores, i32[T, top_k].

    The scores and the order of a row are those of `choose_positions`, for q [T, H, D] and `weights` f32[T, H]. Keys are
    in the paged cache `keys` [pages, 1, page, 1, D]. `page_table`, `q_starts`, `q_lens` and `kv_lens` are those of
    `paged_attention`. The rows of padding tokens are -1. Raises VerifyError for sizes that do not fit.
    """
    _paged_fake(q, keys, weights, page_table, q_starts, q_lens, kv_lens, top_k=top_k)
    out = _nothing(q, top_k)
    for b, (start, count, length) in enumerate(zip(q_starts.tolist(), q_lens.tolist(), kv_lens.tolist(), strict=True)):
        held = _read(keys, q, page_table[b], length) if count else None
        for place in range(count):
            assert held is not None
            row, seen = start + place, length - count + place + 1
            best = best_positions(index_scores(own_row(q, row), held[:seen], own_row(weights, row)), top_k)
            out[row, : len(best)] = best
    return out
