"""The first and last ops of a step: `feed` computes ids, positions and cache slots, `advance` updates the states.

Each running request has a device row: a row of the states `last_token` and `position`. A step reads the row first and
updates it last, so the next step needs nothing from the host.
"""

import torch

from ingot.ir.ops.registry import Effect, Sample, define
from ingot.ir.placements import whole


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _slots(
    positions: torch.Tensor, seq: torch.Tensor, real: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Return the cache slots i64[T] (page * page size + offset) of tokens at `positions` [T], and -1 for padding.

    A token is padding where `real` [T] is False. `seq` [T] holds the sequence of each token. `page_table` [B, P] holds
    the pages of each sequence.
    """
    page = page_table[seq, (positions // page_size).long()].long()
    return torch.where(real, page * page_size + positions % page_size, -1)


def _feed_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    table = torch.tensor([[2, 5], [1, 0], [0, 0]], dtype=torch.int32)
    return [
        Sample(
            (
                _ints(-1, 11, 12, 13, 0),
                _ints(0, 1, 1, 1, -1),
                _ints(0, 1, 0),
                _ints(1, 3, 0),
                _ints(3, 0, -1),
                _ints(-1, 4, -1),
                table,
                _ints(9, 9, 9, 42),
                _ints(0, 0, 0, 17),
            ),
            {"page_size": 16},
        ),
        Sample(
            (
                _ints(-1, 11),
                _ints(0, 1),
                _ints(0, 1),
                _ints(1, 1),
                _ints(1, 0),
                _ints(-1, 4),
                None,
                *[_ints(9, 42)] * 2,
            ),
            {"page_size": 1},
        ),
    ]


def _feed_fake(
    tokens: torch.Tensor,
    token_seqs: torch.Tensor,
    q_starts: torch.Tensor,
    *_: torch.Tensor | None,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    slots = torch.empty(tokens.shape, dtype=torch.int64, device=tokens.device)
    return torch.empty_like(tokens), torch.empty_like(tokens), slots, torch.empty_like(q_starts)


@define(
    samples=_feed_samples,
    fake=_feed_fake,
    fusible=False,
    legal="cached",
    effect=Effect.READS_STATE,
    flops=1,
    placement=whole,
)
def feed(
    tokens: torch.Tensor,
    token_seqs: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    page_table: torch.Tensor | None,
    last_token: torch.Tensor,
    position: torch.Tensor,
    *,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (ids i32[T], positions i32[T], slots i64[T], kv_lens i32[B]): what the model needs to run a step.

    `slots` are the cache slots of the tokens (page * page size + offset). `kv_lens` are the lengths of the sequences
    after the step. Tokens `q_starts[b]` to `q_starts[b] + q_lens[b]` belong to sequence b. `token_seqs` [T] holds b for
    each token. Row `page_table[b]` of [B, P] holds the sequence's pages. Without a page table, all slots are -1.

    Sampled tokens need not be copied to the host. A token -1 in `tokens` means the last sampled one:
    `last_token[rows[b]]`, in a state [R]. The first position of the sequence is `starts[b]`. If that is -1, it is
    `position[rows[b]]`, in another state [R].

    A token of sequence -1 is padding and gets id 0, position 0 and slot -1. A sequence of row -1 is padding and gets
    length 0.
    """
    real = token_seqs >= 0
    seq = token_seqs.clamp(min=0).long()
    row = rows.clamp(min=0).long()
    begin = torch.where(starts >= 0, starts, position[row])
    places = begin[seq] + torch.arange(tokens.shape[0], dtype=torch.int32, device=tokens.device) - q_starts[seq]
    positions = torch.where(real, places, 0).int()
    ids = torch.where(real, torch.where(tokens >= 0, tokens, last_token[row[seq]]), 0).clamp(min=0).int()
    slots = torch.full(tokens.shape, -1, dtype=torch.int64, device=tokens.device)
    if page_table is not None:
        slots = _slots(positions, seq, real, page_table, page_size)
    return ids, positions, slots, torch.where(rows >= 0, begin + q_lens, 0).int()


def _page_slots_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    table = torch.tensor([[2, 5], [0, 7], [0, 0]], dtype=torch.int32)
    return [Sample((_ints(3, 17, 18, 4, 0), _ints(0, 1, 1, 0, -1), table), {"page_size": 16})]


@define(
    samples=_page_slots_samples,
    fake=lambda positions, *_, page_size: torch.empty(positions.shape, dtype=torch.int64, device=positions.device),
    fusible=False,
    legal="cached",
    flops=1,
    placement=whole,
)
def page_slots(
    positions: torch.Tensor, token_seqs: torch.Tensor, page_table: torch.Tensor, *, page_size: int
) -> torch.Tensor:
    """Return the cache slots i64[T] (page * page size + offset) of tokens at `positions` [T], for one group of caches.

    The op `feed` already returns the slots of one group. This op is for further groups, such as caches of a window.
    `token_seqs` [T] holds the sequence b of each token. Row `page_table[b]` of [B, P] holds the sequence's pages. A
    token of sequence -1 is padding and gets slot -1.
    """
    return _slots(positions, token_seqs.clamp(min=0).long(), token_seqs >= 0, page_table, page_size)


def _advance_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    states = (_ints(9, 9, 9, 42), _ints(0, 0, 0, 17))
    return [Sample((*states, _ints(3, 0, -1), _ints(18, 7, 0), _ints(77, 78), _ints(1, -1, -1)))]


def _move(
    last_token: torch.Tensor,
    position: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    sampled: torch.Tensor,
    sample_index: torch.Tensor,
    rejected: torch.Tensor | None = None,
) -> None:
    if rejected is not None:
        kv_lens = kv_lens - rejected
        sample_index = torch.where(sample_index >= 0, sample_index - rejected, -1)
    real = rows >= 0
    position[rows[real].long()] = kv_lens[real]
    commits = real & (sample_index >= 0)
    last_token[rows[commits].long()] = sampled[sample_index[commits].long()]


def _move_all(
    last_token: torch.Tensor,
    position: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    sampled: torch.Tensor,
    sample_index: torch.Tensor,
    rejected: torch.Tensor | None = None,
) -> None:
    """Allocate the most memory that a call of `advance` can need. The memory planner measures it.

    The worst case is that no sequence is padding and all of them sample a token.
    """
    if rejected is not None:
        kv_lens, sample_index = kv_lens - rejected, torch.where(sample_index >= 0, sample_index - rejected, -1)
    position[rows.long()] = kv_lens.clone()
    last_token[rows.long()] = sampled[sample_index.long()]


@define(
    samples=_advance_samples,
    fake=lambda last_token, position, *_: (torch.empty_like(last_token), torch.empty_like(position)),
    states=("last_token", "position"),
    in_place=_move,
    costliest=_move_all,
    fusible=False,
    flops=1,
    placement=whole,
)
def advance(
    last_token: torch.Tensor,
    position: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    sampled: torch.Tensor,
    sample_index: torch.Tensor,
    rejected: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Update the states `last_token` and `position`, both [R], at the end of a step, and return them.

    Sequence b has the row `rows[b]`; -1 is padding. Its position becomes `kv_lens[b]`. Its last token becomes
    `sampled[sample_index[b]]`, the token sampled from its last row of logits. If `sample_index[b]` is -1, the last
    token does not change.

    With `rejected` i32[B], the last `rejected[b]` tokens of the step do not count. The position is smaller by that
    number. The last token is the one sampled after the last kept token. This needs a row of logits for each rejected
    token. The cache entries of rejected tokens are never read, and later tokens overwrite them.
    """
    tokens, positions = last_token.clone(), position.clone()
    _move(tokens, positions, rows, kv_lens, sampled, sample_index, rejected)
    return tokens, positions
