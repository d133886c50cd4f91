"""The ops of speculative decoding: take drafts into a step, accept them, and read and write rows of states."""

import torch

from ingot.ir.ops.registry import Effect, Sample, define
from ingot.ir.placements import whole


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _take_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    drafts = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]], dtype=torch.int32)
    return [Sample((_ints(-1, -2, -3, 42, 43, -1, 0), _ints(0, 0, 0, 1, 1, 2, -1), _ints(2, 0, 3, -1), drafts))]


@define(
    samples=_take_samples,
    fake=lambda tokens, *_: torch.empty_like(tokens),
    fusible=False,
    legal="cached",
    effect=Effect.READS_STATE,
    on_device=True,
    flops=1,
    placement=whole,
)
def take_drafts(
    tokens: torch.Tensor, token_seqs: torch.Tensor, rows: torch.Tensor, drafts: torch.Tensor
) -> torch.Tensor:
    """Return the step's `tokens` i32[T] with the ids of drafts filled in. A draft is a proposed token.

    Token -2 - i of sequence b stands for draft i of b. Its id is `drafts[rows[b], i]` in the state `drafts` i32[R, K].
    Other tokens, also -1, do not change. `token_seqs` i32[T] holds the sequence b of each token, or -1 for padding.
    """
    row = rows[token_seqs.clamp(min=0).long()].clamp(min=0).long()
    place = (-2 - tokens).clamp(min=0, max=drafts.shape[1] - 1).long()
    return torch.where((tokens < -1) & (token_seqs >= 0), drafts[row, place], tokens)


def _accept_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    # Drafts 11 and 12 after 10 (the first is right), a prompt of three, one token, and padding.
    tokens, seqs = _ints(10, 11, 12, 5, 6, 7, 9, 0), (_ints(0, 3, 6, 0), _ints(3, 3, 1, 0))
    rows = _ints(0, 1, 2, 5, 6)
    return [
        Sample((tokens, _ints(11, 90, 91, 92, 93), rows, *seqs, _ints(2, 3, 4, -1))),
        Sample((tokens, _ints(11, 12, 91, 92, 93), rows, *seqs, _ints(2, 3, 4, -1))),
        Sample((tokens, _ints(1, 12, 91, 92, -1), rows, *seqs, _ints(2, 3, 4, -1))),
    ]


@define(
    samples=_accept_samples,
    fake=lambda tokens, sampled, logit_rows, q_starts, *_: (torch.empty_like(q_starts), torch.empty_like(q_starts)),
    fusible=False,
    legal="cached",
    on_device=True,
    flops=1,
    placement=whole,
)
def accept_drafts(
    tokens: torch.Tensor,
    sampled: torch.Tensor,
    logit_rows: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    sample_index: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare drafts with sampled tokens, and return (rejected i32[B], taken i32[B]).

    `rejected[b]` is how many tokens at the end of sequence b are rejected. `taken[b]` is the row of logits of the last
    token that is kept; -1 if `sample_index[b]` is -1.

    Tokens `q_starts[b]` to `q_starts[b] + q_lens[b]` of `tokens` i32[T] belong to sequence b. Its last row of logits is
    `sample_index[b]`. `logit_rows` i32[L] holds the token index of each row. `sampled` i32[L] holds the token sampled
    from each row.

    A draft is kept if all drafts before it are kept, and if it equals the token sampled from the row before it. This
    holds for a sequence with a row of logits for each token. A sequence with fewer rows, such as a prompt, keeps all
    tokens.
    """
    ends = q_starts + q_lens
    follows = (logit_rows + 1).clamp(max=tokens.shape[0] - 1).long()
    row = torch.arange(logit_rows.shape[0], dtype=torch.int32, device=tokens.device)
    own = (row[None, :] <= sample_index[:, None]) & (row[None, :] > (sample_index - q_lens)[:, None])
    inside = own & (logit_rows >= q_starts[:, None]) & (logit_rows + 1 < ends[:, None])
    wrong = inside & (tokens[follows] != sampled)[None, :]
    kept = torch.where(wrong, logit_rows[None, :] + 1, ends[:, None]).amin(-1)
    rejected = (ends - kept).int()
    return rejected, torch.where(sample_index >= 0, sample_index - rejected, -1).int()


def _row_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    state = torch.randn(5, 3, generator=g).to(dtype)
    return [Sample((state, _ints(3, 0, -1))), Sample((torch.arange(5, dtype=torch.int32), _ints(4, -1, 1)))]


@define(
    samples=_row_samples,
    fake=lambda state, rows: state.new_empty((rows.shape[0], *state.shape[1:])),
    fusible=False,
    legal="cached",
    effect=Effect.READS_STATE,
    on_device=True,
    flops=0,
    placement=whole,
)
def read_rows(state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of a state [R, …] as a tensor [B, …]. `rows` i32[B] lists their indices.

    For an index of -1, which is padding, the row is zero.
    """
    there = (rows >= 0).view(-1, *[1] * (state.dim() - 1))
    return torch.where(there, state[rows.clamp(min=0).long()], torch.zeros((), dtype=state.dtype, device=state.device))


def _write_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    state, values = torch.randn(5, 3, generator=g).to(dtype), torch.randn(4, 3, generator=g).to(dtype)
    return [
        Sample((state, _ints(3, 0, -1), values, _ints(3, -1, 0))),
        Sample((state, _ints(1, 0, -1, 4), values)),
    ]


def _write(state: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, index: torch.Tensor | None = None) -> None:
    source = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device) if index is None else index
    written = (rows >= 0) & (source >= 0)
    # The host does not know which rows are written, so this writes all of them, the others with their old contents. No
    # two sequences share a row. Padding may name row 0, so it must write what row 0 ends with.
    places = torch.where(written, rows, -1).long()
    slot = torch.arange(state.shape[0], device=state.device)
    match = slot[:, None] == places[None, :]
    chosen = values[source.clamp(min=0).long()][match.int().argmax(-1)]
    hit = match.any(-1).view(-1, *[1] * (state.dim() - 1))
    state.copy_(torch.where(hit, chosen, state))


@define(
    samples=_write_samples,
    fake=lambda state, *_: torch.empty_like(state),
    states=("state",),
    in_place=_write,
    fusible=False,
    on_device=True,
    flops=0,
    placement=whole,
)
def write_rows(
    state: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, index: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the state [R, …] with row `rows[b]` set to `values[index[b]]`, or to `values[b]` without `index`.

    `rows` and `index` are i32[B], and `values` is [N, …]. Nothing is written for a row or an index of -1.
    """
    result = state.clone()
    _write(result, rows, values, index)
    return result
