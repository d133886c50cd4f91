"""The ops of block diffusion: each step runs all positions of a block, until every position holds a token."""

import torch

from ingot.ir.errors import VerifyError
from ingot.ir.ops.registry import Effect, Sample, define, wide
from ingot.ir.placements import whole


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _take_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    blocks = torch.tensor([[1, -1, 3], [4, 5, 6], [-1, -1, -1]], dtype=torch.int32)
    # The block of a row, the end of a prompt followed by a block, and padding.
    step = (_ints(-2, -3, -4, 42, 43, -1, -1, 0), _ints(0, 0, 0, 1, 1, 1, 1, -1), _ints(0, 2, -1), blocks)
    return [Sample(step, {"mask_token": 9})]


def _take_fake(tokens: torch.Tensor, *_: torch.Tensor, mask_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    if mask_token < 0:
        raise VerifyError(f"mask_token is {mask_token}", where="ingot.take_block", expected="the id of a token")
    return torch.empty_like(tokens), torch.empty_like(tokens)


@define(
    samples=_take_samples,
    fake=_take_fake,
    fusible=False,
    legal="cached",
    effect=Effect.READS_STATE,
    on_device=True,
    flops=1,
    placement=whole,
)
def take_block(
    tokens: torch.Tensor, token_seqs: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor, *, mask_token: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids i32[T], found i32[T]) of a step's tokens, for a model that denoises blocks of tokens.

    Each of `tokens` i32[T] is a token id, or -1 for a masked position, or -2 - i for position i of the sequence's
    block. The state `blocks` i32[R, N] holds the blocks, with -1 for masked positions. At masked positions, `ids` is
    `mask_token` and `found` is 0. Elsewhere `found` is 1.

    `token_seqs` i32[T] holds the sequence of each token, or -1 for padding. `rows` i32[B] holds the row of each
    sequence in `blocks`.
    """
    row = rows[token_seqs.clamp(min=0).long()].clamp(min=0).long()
    held = blocks[row, (-2 - tokens).clamp(min=0, max=blocks.shape[1] - 1).long()]
    ids = torch.where((tokens < -1) & (token_seqs >= 0), held, tokens)
    return torch.where(ids < 0, mask_token, ids).int(), (ids >= 0).int()


def _fill_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    # Blocks of two: one half found, one complete, one masked after a one-token prompt, a chunk of a prompt, and
    # padding.
    tokens, found = _ints(3, 0, 5, 6, 7, 0, 0, 4, 4), _ints(1, 0, 1, 1, 1, 0, 0, 1, 1)
    seqs = (_ints(0, 2, 4, 7, 0), _ints(2, 2, 3, 2, 0), _ints(1, 3, 5, -1, -1))
    logits = torch.randn(6, 11, generator=g).to(dtype)
    sharp = torch.where(torch.randint(2, (6, 1), generator=g).bool(), logits * 40, logits)
    sharp[3, 4] = float("inf")
    rows = _ints(0, 1, 2, 3, 5, 6)
    return [
        Sample((one, tokens, found, rows, *seqs), {"block": 2, "steps": steps, "sure_percent": 90})
        for one, steps in ((logits, 2), (sharp, 1))
    ]


def _fill_fake(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    found: torch.Tensor,
    logit_rows: torch.Tensor,
    q_starts: torch.Tensor,
    *_: torch.Tensor,
    block: int,
    steps: int,
    sure_percent: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if block < 2 or not 1 <= steps <= block:
        raise VerifyError(
            f"a block of {block} positions in {steps} steps",
            where="ingot.fill_block",
            expected="2 positions or more, and at most as many steps",
        )
    rows = logit_rows.new_empty(logit_rows.shape)
    return rows, torch.empty_like(q_starts), torch.empty_like(q_starts), q_starts.new_empty(q_starts.shape[0], block)


@define(
    samples=_fill_samples,
    fake=_fill_fake,
    flops=lambda logits, *_, **__: 3 * logits.numel(),  # maximum, exponentials and their sum
    fusible=False,
    legal="cached",
    on_device=True,
    placement=whole,
)
def fill_block(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    found: torch.Tensor,
    logit_rows: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    sample_index: torch.Tensor,
    *,
    block: int,
    steps: int,
    sure_percent: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run one denoising step: fill masked positions of each sequence's block with likely tokens.

    Returns (committed i32[L], rejected i32[B], taken i32[B], blocks i32[B, block]):

    committed  the token of each row of logits before the step; -1 if the block is aborted
    rejected   how many tokens of the sequence do not count yet
    taken      the row of logits of the last token that counts; -1: none
    blocks     the new blocks; -1 is a masked position

    Tokens `q_starts[b]` to `q_starts[b] + q_lens[b]` belong to sequence b. Its last `block` tokens are its block, if
    each has a row of `logits` [L, V]. `sample_index[b]` is the last of these rows. `logit_rows` i32[L] holds the token
    index of each row. A row predicts the token at its position, not the next one. `found` i32[T] is 0 for a masked
    token, else 1.

    A block without masked tokens is final. Its tokens count, and the new block is all masked. In any other block, some
    masked positions get their most likely token. These are the ceil(block / steps) most probable positions, and all
    positions with a probability above `sure_percent` percent. Among equals the first position wins. No token of the
    block counts yet: `rejected` is `block`, and `taken` is -1.

    A sequence without a block, such as a chunk of a prompt, rejects nothing. A block with NaN or infinite logits is
    aborted and rejects nothing. In both cases the new block is all masked.
    """
    device = logits.device
    place = torch.arange(block, dtype=torch.int32, device=device)
    own = sample_index[:, None] - (block - 1) + place  # [B, block], rows of logits
    at = own.clamp(min=0, max=logit_rows.shape[0] - 1).long()
    source = logit_rows[at]
    here = (own >= 0) & (source == (q_starts + q_lens - block)[:, None] + place)
    there = (sample_index >= 0) & (q_lens >= block) & here.all(-1)
    values = wide(logits)
    largest, choice = values.max(-1)
    bad = there & ~largest.isfinite()[at].all(-1)
    chance = (1 / (values - largest[:, None]).exp().sum(-1))[at]
    held = found[source.long()] > 0
    masked = ~held
    # The number of masked positions of the block with a higher probability, or an equal one and a lower index.
    before = chance[:, None, :] > chance[:, :, None]
    before |= (chance[:, None, :] == chance[:, :, None]) & (place[None, :] < place[:, None])
    rank = (before & masked[:, None, :]).sum(-1)
    new = masked & ((rank < -(-block // steps)) | (chance * 100 > sure_percent))
    ends = there & (held.all(-1) | bad)
    goes_on = there & ~ends
    filled = torch.where(held, tokens[source.long()], torch.where(new, choice[at].int(), -1))
    blocks = torch.where(goes_on[:, None], filled, -1).int()
    # Find the rows of logits of aborted blocks: a step may have rows that belong to no block.
    row = torch.arange(logit_rows.shape[0], dtype=torch.int32, device=device)
    mine = bad[:, None] & (row[None, :] <= sample_index[:, None]) & (row[None, :] > sample_index[:, None] - block)
    committed = torch.where(mine.any(0), -1, tokens[logit_rows.long()]).int()
    return committed, torch.where(goes_on, block, 0).int(), torch.where(goes_on, -1, sample_index).int(), blocks
