"""Log-probabilities of chosen and of the most likely tokens, as the model gives them: before any temperature or
penalty."""

import torch

from ingot.ir.logprob_limits import MAX_LOGPROBS
from ingot.ir.ops.registry import Sample, bytes_of, define, own_row
from ingot.ir.placements import whole


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    logits = torch.randn(5, 37, generator=g) * 3
    logits[3, 5:9] = 12.0  # equals
    columns = ([4, 6, -1, 5, 0], [-1, 2, -1, -1, 3], [0, 20, 3, 2, -1])  # sampled, targets, num_logprobs
    vectors = tuple(torch.tensor(values, dtype=torch.int32) for values in columns)
    return [Sample((logits, *vectors)), Sample((logits[:, :7].clone(), *vectors))]


def _fake(logits: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _none(logits.shape[0], logits.device)


def _none(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = 1 + MAX_LOGPROBS
    return (
        torch.full((rows, width), -1, dtype=torch.int32, device=device),
        torch.full((rows, width), float("-inf"), dtype=torch.float32, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )


def _most_likely(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` greatest of scores [V], in order, the lower id first among equals (topk promises no order)."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    least = scores.topk(min(count, scores.shape[0])).values[-1]
    return _in_order(scores, (scores >= least).nonzero().flatten())[:count]


def _in_order(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`ids`, ascending, by their scores, the greatest first."""
    return ids[scores[ids].sort(stable=True, descending=True).indices]


def _of_equals(
    logits: torch.Tensor, sampled: torch.Tensor, targets: torch.Tensor, num_logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `top_logprobs` of a row whose tokens are all equally likely."""
    results = _none(logits.shape[0], logits.device)
    chosen = torch.where(targets >= 0, targets, sampled)
    scores = own_row(logits, 0)[0].float()
    first = chosen[:1].long()
    least = scores.topk(min(MAX_LOGPROBS, scores.shape[0])).values
    _in_order(scores, torch.zeros(scores.shape, dtype=torch.int64, device=scores.device))
    scores.log_softmax(-1)
    del chosen, first, least  # they were there all along
    return results


@define(
    samples=_samples,
    fake=_fake,
    costliest=_of_equals,
    # Without a request that asks for it, the logits are not read.
    flops=0,
    traffic=lambda logits, *asked: bytes_of(*asked, *_fake(logits, *asked)),
    # No `rows`: each is computed by itself anyway, so that a vocabulary's worth of scores stays in the cache.
    fusible=False,
    legal="cached",
    placement=whole,
)
def top_logprobs(
    logits: torch.Tensor, sampled: torch.Tensor, targets: torch.Tensor, num_logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids i32[L, 21], logprobs f32[L, 21], ranks i32[L]) from logits [L, V] and i32[L] each, computed
    in float32.

    Column 0 holds the chosen token of a row: `targets[i]`, or `sampled[i]` where that is -1. After it come the
    `num_logprobs[i]` most likely tokens, in order, the lower id first among equals. `ranks[i]` is one more than the
    number of tokens that are more likely than the chosen one. What is not asked for (`num_logprobs[i]` -1: the whole
    row) or not there (a row without a token) is id -1, logprob -inf, rank 0.
    """
    ids, logprobs, ranks = _none(logits.shape[0], logits.device)
    if not bool((num_logprobs >= 0).any()):
        return ids, logprobs, ranks
    chosen = torch.where(targets >= 0, targets, sampled)
    for row, (count, token) in enumerate(zip(num_logprobs.tolist(), chosen.tolist(), strict=True)):
        if count < 0 or token < 0:
            continue
        scores = own_row(logits, row)[0].float()
        listed = torch.cat([chosen[row : row + 1].long(), _most_likely(scores, count)])
        ids[row, : listed.shape[0]] = listed.int()
        logprobs[row, : listed.shape[0]] = scores.log_softmax(-1)[listed]
        ranks[row] = (scores > scores[token]).sum() + 1
    return ids, logprobs, ranks
