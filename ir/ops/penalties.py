"""Penalties for tokens that a sequence holds already, and tokens that it may not take yet.

Each row of the state `token_counts` [S, vocab] belongs to a running sequence. Bit 0 of an entry says that the token
stands in the prompt, the bits above it count how often it was generated: penalties tell the two apart.
"""

import torch

from ingot.ir.ops.registry import Effect, Sample, bytes_of, define, nothing

# Tokens that a row of logits may be denied: the end tokens of a model (a few) and of a request. Ours; 64 bytes a row.
MAX_BANNED = 16
# Rows penalized at once: their counts are gathered, 0.5 MB a row of a vocabulary of 128 k.
_ROWS_AT_ONCE = 16
IN_PROMPT = 1
GENERATED = 2  # what one generated token adds to its entry


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _count_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    counts = torch.randint(0, 9, (5, 13), generator=g, dtype=torch.int32)
    # A new sequence in row 3, one that decodes in row 1, one that nobody counts in row 0, and padding.
    ids, positions = _ints(4, 4, 7, 12, 5, 6, 0), _ints(0, 1, 2, 3, 9, 0, 0)
    step = (ids, positions, _ints(0, 0, 0, 0, 1, 2, -1), _ints(3, 1, 0, -1), _ints(2, 4, -1, -1))
    return [Sample((counts, *step)), Sample((counts, *step[:-1], _ints(-1, -1, -1, -1)))]


def _count(
    token_counts: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    token_seqs: torch.Tensor,
    rows: torch.Tensor,
    prompt_ends: torch.Tensor,
) -> None:
    if not bool((prompt_ends >= 0).any()):
        return
    ends = prompt_ends[token_seqs.clamp(min=0).long()]
    counted = (token_seqs >= 0) & (ends >= 0)
    row, token = rows[token_seqs.clamp(min=0).long()].long(), ids.long()
    token_counts[row[counted & (positions == 0)]] = 0
    generated = counted & (positions >= ends)
    one = torch.full((1,), GENERATED, dtype=torch.int32, device=token_counts.device)
    token_counts.index_put_((row[generated], token[generated]), one, accumulate=True)
    prompt = counted & (positions < ends)
    place = row[prompt], token[prompt]
    token_counts[place] = token_counts[place] | IN_PROMPT  # equal tokens write equal values


def _count_all(
    token_counts: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    token_seqs: torch.Tensor,
    rows: torch.Tensor,
    prompt_ends: torch.Tensor,
) -> None:
    """As `_count` when every token is of a prompt, begins a row and is generated: more than any step."""
    ends = prompt_ends[token_seqs.clamp(min=0).long()]
    row, token = rows[token_seqs.clamp(min=0).long()].long(), ids.long()
    counted, prompt, generated = token_seqs >= 0, positions < ends, positions >= ends
    token_counts[row.clone()] = 0
    one = torch.full((1,), GENERATED, dtype=torch.int32, device=token_counts.device)
    token_counts.index_put_((row.clone(), token.clone()), one, accumulate=True)
    place = row.clone(), token.clone()
    token_counts[place] = token_counts[place] | IN_PROMPT
    del counted, prompt, generated


@define(
    samples=_count_samples,
    fake=lambda token_counts, *_: torch.empty_like(token_counts),
    states=("token_counts",),
    in_place=_count,
    costliest=_count_all,
    fusible=False,
)
def count_tokens(
    token_counts: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    token_seqs: torch.Tensor,
    rows: torch.Tensor,
    prompt_ends: torch.Tensor,
) -> torch.Tensor:
    """The state `token_counts` i32[S, vocab] with the tokens of this step counted.

    Token `ids[t]` at `positions[t]` of sequence b = `token_seqs[t]` (-1: padding) is counted in row `rows[b]`: as one
    of the prompt below position `prompt_ends[b]`, from there on as generated. A row is cleared when position 0 is fed,
    so that a sequence that is computed again is counted from the start. `prompt_ends[b]` -1: nobody asks, and the row
    stays as it is.
    """
    counts = token_counts.clone()
    _count(counts, ids, positions, token_seqs, rows, prompt_ends)
    return counts


def _penalize_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    logits = torch.randn(4, 13, generator=g) * 3
    counts = torch.randint(0, 7, (5, 13), generator=g, dtype=torch.int32)
    banned = _ints(3, 5, -1, -1, -1, -1, 12, -1).view(4, 2)
    columns = (
        _ints(2, -1, 0, 4),
        torch.tensor([1.3, 1.0, 0.7, 1.0]),
        torch.tensor([0.5, 0.0, 0.0, -1.0]),
        torch.tensor([0.0, 0.0, -2.0, 1.5]),
    )
    return [Sample((logits, counts, *columns, banned))]


def _penalize_rows(
    result: torch.Tensor,
    logits: torch.Tensor,
    held: torch.Tensor,
    place: torch.Tensor,
    token: torch.Tensor,
    rows: torch.Tensor,
    penalties: tuple[torch.Tensor, ...],
) -> None:
    """Penalize `rows` of `result` for the tokens that they hold: `held[place, token]` are their entries."""
    repetition, frequency, presence = penalties
    row, times = rows[place], held[place, token] // GENERATED
    chosen, factor = logits[row, token], repetition[row]
    repeated = torch.where(chosen > 0, chosen / factor, chosen * factor)
    result[row, token] = repeated - times * frequency[row] - (times > 0) * presence[row]


def _penalize_most(
    logits: torch.Tensor,
    token_counts: torch.Tensor,
    count_rows: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    banned: torch.Tensor,
) -> torch.Tensor:
    """As `penalize` when every row holds the whole vocabulary."""
    result = logits.clone()
    rows = torch.arange(min(logits.shape[0], _ROWS_AT_ONCE), device=logits.device)
    held = token_counts[count_rows[rows].long()]
    place, token = (torch.empty(held.numel(), dtype=torch.int64, device=logits.device) for _ in range(2))
    _penalize_rows(result, logits, held, place, token, rows, (repetition, frequency, presence))
    return result


@define(
    samples=_penalize_samples,
    fake=lambda logits, *_: torch.empty_like(logits),
    # No `rows`: every element is computed by itself.
    costliest=_penalize_most,
    # Without a request that asks for it, nothing is done.
    flops=nothing,
    traffic=lambda logits, token_counts, *asked: bytes_of(*asked),
    may_return="logits",
    effect=Effect.READS_STATE,
    fusible=False,
    legal="cached",
)
def penalize(
    logits: torch.Tensor,
    token_counts: torch.Tensor,
    count_rows: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    banned: torch.Tensor,
) -> torch.Tensor:
    """Logits f32[L, V] after penalties and bans; `logits` itself when no row asks for any.

    Row i is penalized by row `count_rows[i]` of the state `token_counts` (-1: not at all), in vLLM's order. The logit
    of a token in prompt or output is divided by `repetition[i]` when positive, else multiplied by it (CTRL, arXiv
    1909.05858, section 4.1). Then a token that was generated n > 0 times loses n * `frequency[i]` and `presence[i]`
    (OpenAI's API reference, "frequency and presence penalties"). The token ids in `banned` i32[L, K] get -inf; -1 is
    none.
    """
    asks = count_rows >= 0
    bans = banned >= 0
    if not bool(asks.any()) and not bool(bans.any()):
        return logits
    result = logits.clone()
    for rows in asks.nonzero().flatten().split(_ROWS_AT_ONCE) if bool(asks.any()) else ():
        held = token_counts[count_rows[rows].long()]
        place, token = held.nonzero(as_tuple=True)  # a sequence holds few of the vocabulary's tokens
        _penalize_rows(result, logits, held, place, token, rows, (repetition, frequency, presence))
    row, column = bans.nonzero(as_tuple=True)
    result[row, banned[row, column].long()] = float("-inf")
    return result
