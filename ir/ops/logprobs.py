"""The op of log-probabilities: of the chosen and the most likely tokens, before temperature and penalties."""

import torch

from ingot.ir.logprob_limits import MAX_LOGPROBS
from ingot.ir.ops.registry import Sample, define, own_row
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
    """Return the token ids of the `count` greatest `scores` [V], greatest first. Equal scores are in order of ids.

    torch's topk does not guarantee the order of equal scores.
    """
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    least = scores.topk(min(count, scores.shape[0])).values[-1]
    return _in_order(scores, (scores >= least).nonzero().flatten())[:count]


def _in_order(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Sort the token ids `ids` by their `scores` [V], greatest first.

    `ids` must be in ascending order. Ids with equal scores stay in this order.
    """
    return ids[scores[ids].sort(stable=True, descending=True).indices]


def _of_equals(
    logits: torch.Tensor, sampled: torch.Tensor, targets: torch.Tensor, num_logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate the most memory that a call of `top_logprobs` can need. The memory planner measures it.

    The worst case is a row with equal logits, because then the whole vocabulary is sorted. No data is read. The results
    only have the right shapes.
    """
    results = _none(logits.shape[0], logits.device)
    chosen = torch.where(targets >= 0, targets, sampled)
    scores = own_row(logits, 0)[0].float()
    first = chosen[:1].long()
    least = scores.topk(min(MAX_LOGPROBS, scores.shape[0])).values
    _in_order(scores, torch.zeros(scores.shape, dtype=torch.int64, device=scores.device))
    scores.log_softmax(-1)
    del chosen, first, least  # `top_logprobs` keeps them until here
    return results


@define(
    samples=_samples,
    fake=_fake,
    costliest=_of_equals,
    # Without a request for log-probabilities, the logits are not read.
    flops=0,
    traffic=lambda *_: {"logits": 0},
    # No `rows`: the reference computes rows one by one anyway, so that the scores of one row stay in the CPU cache.
    fusible=False,
    legal="cached",
    placement=whole,
)
def top_logprobs(
    logits: torch.Tensor, sampled: torch.Tensor, targets: torch.Tensor, num_logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the log-probabilities that requests need: (ids i32[L, 21], logprobs f32[L, 21], ranks i32[L]).

    They are computed in float32 from `logits` [L, V]. Column 0 holds the chosen token of row i: `targets[i]`, or
    `sampled[i]` if that is -1. The next columns hold the `num_logprobs[i]` most likely tokens in order. Among equals,
    lower ids come first. `ranks[i]` is 1 plus the number of tokens that are more likely than the chosen one.

    Unused columns have id -1 and logprob -inf. If `num_logprobs[i]` is -1, or if the row has no chosen token, the whole
    row is unused and its rank is 0. `sampled`, `targets` and `num_logprobs` are i32[L].
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
