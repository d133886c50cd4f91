"""Changes of logits before a token is chosen: penalties for tokens that a sequence contains already, bans of tokens
(`min_tokens`), and the edits of a request (`ingot.ir.ops.logit_edits`).

Each row of the state `token_counts` [R, vocab] belongs to a running sequence. Bit 0 of an entry is set if the token is
in the prompt; the higher bits count how often it was generated. Penalties need both.
"""

from dataclasses import dataclass, fields

import torch

from ingot.ir.ops.logit_edits import add_biases, forbid
from ingot.ir.ops.registry import Sample, define, wide_copy
from ingot.ir.placements import whole

# Banned tokens per row: the end tokens of the model (a few) and of the request. Our choice; 64 bytes a row.
MAX_BANNED = 16
# Rows penalized at once. Their counts are gathered: 0.5 MB a row for a vocabulary of 128 k.
_ROWS_AT_ONCE = 16
IN_PROMPT = 1
GENERATED = 2  # added to the entry for each generated token


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _count_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    counts = torch.randint(0, 9, (5, 13), generator=g, dtype=torch.int32)
    # A new sequence in row 3, a decoding one in row 1, an uncounted one in row 0, and padding.
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
    """Allocate the most memory that a call of `count_tokens` can need. The memory planner measures it.

    The worst case: each token is counted as a prompt token and as a generated one, and resets its counts at position 0.
    """
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
    flops=1,
    placement=whole,
)
def count_tokens(
    token_counts: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    token_seqs: torch.Tensor,
    rows: torch.Tensor,
    prompt_ends: torch.Tensor,
) -> torch.Tensor:
    """Count the tokens of this step in the state `token_counts` i32[R, vocab], which penalties need, and return it.

    Sequence b has the row `rows[b]`. A token below position `prompt_ends[b]` is a prompt token and sets bit 0 of its
    entry. A token from there on was generated and adds 2 to its entry. A token at position 0 first clears the row, so
    that nothing counts twice if a sequence is recomputed. If `prompt_ends[b]` is -1, the sequence needs no counts and
    its row does not change.

    `ids`, `positions` and `token_seqs` [T] hold the id, position and sequence of each token. Sequence -1 is padding.
    """
    counts = token_counts.clone()
    _count(counts, ids, positions, token_seqs, rows, prompt_ends)
    return counts


@dataclass(frozen=True)
class Penalties:
    """The penalties, banned tokens and edits of L rows of logits.

    token_counts  the state i32[R, vocab] that counts the tokens of each running sequence: 1 for a token in the prompt,
                  plus 2 for each time that it was generated
    count_rows    i32[L], the row of `token_counts` that belongs to each row of logits; -1: no penalty
    repetition, frequency, presence
                  f32[L], the penalties of each row of logits
    banned        i32[L, K], ids of tokens that must not be chosen; -1: none
    edits         the state i32[R, words] with the edits of each running sequence, such as biases
                  (`ingot.ir.ops.logit_edits`)
    edit_rows     i32[L], the row of `edits` and of `last_token` that belongs to each row of logits; -1: no edits
    last_token    the state i32[R] with the last token of each running sequence
    """

    token_counts: torch.Tensor
    count_rows: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    banned: torch.Tensor
    edits: torch.Tensor
    edit_rows: torch.Tensor
    last_token: torch.Tensor

    @property
    def asked(self) -> bool:
        """Return whether any row of logits has a penalty, a banned token or edits. Reads the tensors' data."""
        return any(bool((one >= 0).any()) for one in (self.count_rows, self.banned, self.edit_rows))


NUM_PENALTIES = len(fields(Penalties))


def penalized(logits: torch.Tensor, asked: Penalties) -> torch.Tensor:
    """Apply edits, penalties and bans to logits [L, V], in float32 or wider, and return them.

    The order is that of vLLM. First biases are added. Then comes the repetition penalty (CTRL, arXiv 1909.05858,
    section 4.1). For tokens in prompt or output, it divides positive logits and multiplies negative ones. Then a token
    that was generated n > 0 times loses n * frequency and presence (OpenAI's API reference, "frequency and presence
    penalties"). Last, tokens that are banned or not allowed get -inf.
    """
    result = wide_copy(logits)
    edited = (asked.edit_rows >= 0).nonzero().flatten().tolist()
    for one in edited:
        add_biases(result[one], asked.edits[asked.edit_rows[one]])
    counted = (asked.count_rows >= 0).nonzero().flatten()
    for rows in counted.split(_ROWS_AT_ONCE) if counted.numel() else ():
        held = asked.token_counts[asked.count_rows[rows].long()]
        place, token = held.nonzero(as_tuple=True)  # a sequence contains few of the vocabulary's tokens
        _penalize(result, held, place, token, rows, asked)
    row, column = (asked.banned >= 0).nonzero(as_tuple=True)
    result[row, asked.banned[row, column].long()] = float("-inf")
    for one in edited:
        forbid(result[one], asked.edits[asked.edit_rows[one]], asked.last_token[asked.edit_rows[one]])
    return result


def penalized_most(logits: torch.Tensor, asked: Penalties) -> torch.Tensor:
    """Allocate the most memory that a call of `penalized` can need. The memory planner measures it.

    The worst case is that every sequence contains the whole vocabulary. No data is read. The result only has the right
    shape.
    """
    result = wide_copy(logits)
    rows = torch.arange(min(logits.shape[0], _ROWS_AT_ONCE), device=logits.device)
    held = asked.token_counts[asked.count_rows[rows].long()]
    place, token = (torch.empty(held.numel(), dtype=torch.int64, device=logits.device) for _ in range(2))
    _penalize(result, held, place, token, rows, asked)
    return result


def _penalize(
    result: torch.Tensor,
    held: torch.Tensor,
    place: torch.Tensor,
    token: torch.Tensor,
    rows: torch.Tensor,
    asked: Penalties,
) -> None:
    """Apply the penalties `asked` to logits in place, for tokens that sequences contain.

    `result` holds the logits. `rows` are the rows to change, and `held` holds their token counts. `place` and `token`
    list the tokens: token `token[i]` is in the sequence of row `rows[place[i]]`.
    """
    row, times = rows[place], held[place, token] // GENERATED
    chosen, factor = result[row, token], asked.repetition[row]
    repeated = torch.where(chosen > 0, chosen / factor, chosen * factor)
    result[row, token] = repeated - times * asked.frequency[row] - (times > 0) * asked.presence[row]
