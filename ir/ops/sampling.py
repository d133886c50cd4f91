"""The op that samples the next token from logits, with random numbers keyed by (seed, position)."""

import torch

from ingot.ir.ops.logit_edits import ANY_TOKEN, EditParts
from ingot.ir.ops.penalties import NUM_PENALTIES, Penalties, penalized, penalized_most
from ingot.ir.ops.registry import Effect, Sample, define, wide
from ingot.ir.placements import whole

# Philox 4x32-10: multipliers and key increments of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11).
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = 0xFFFFFFFF


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return four random words per counter, by Philox 4x32-10.

    `counter` has four words and `key` has two. Each word is an int64 tensor of unsigned 32-bit numbers.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = (
            c0 * _MULTIPLIERS[0],
            c2 * _MULTIPLIERS[1],
        )  # wraps in int64; the bits are those of the unsigned product
        c0, c1, c2, c3 = (p1 >> 32) & _LOW ^ c1 ^ k0, p1 & _LOW, (p0 >> 32) & _LOW ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniform(seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """Return random numbers f32[L, count] between 0 and 1, both excluded.

    Row i depends only on `seeds[i]` and `positions[i]`. Number j of the row is word j % 4 of Philox with the counter (j
    // 4, position, 0, 0). Its key is (low half of the seed, high half of the seed).
    """
    blocks = torch.arange(-(-count // 4), device=seeds.device)[None, :]
    position = positions.long()[:, None]
    zero = torch.zeros_like(blocks)
    key = (seeds[:, None] & _LOW, (seeds[:, None] >> 32) & _LOW)
    words = torch.stack(philox((blocks + zero * position, position + zero, zero, zero), key), -1)
    # 23 bits plus a half fill float32's 24. One more bit would round the largest word to 1, with infinite noise.
    return ((words.flatten(1)[:, :count] >> 9).float() + 0.5) * 2.0**-23


def keep_mask(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return bool[L, V]: the tokens that min-p, then top-k, then top-p keep. The order is that of vLLM.

    `logits` [L, V] are already divided by the temperature. `top_k` 0 and `top_p` 1 keep all tokens. Tokens with the
    k-th largest logit are all kept. Of equal logits at the edge of top-p, the lowest ids are kept. The most likely
    token is always kept.
    """
    vocab = logits.shape[-1]
    probs = logits.softmax(-1)
    keep = probs >= min_p[:, None] * probs.amax(-1, keepdim=True)
    ordered = logits.masked_fill(~keep, float("-inf")).sort(stable=True, dim=-1, descending=True)
    last = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long() - 1
    kth = ordered.values.gather(-1, last[:, None])
    ranked = ordered.values.masked_fill(ordered.values < kth, float("-inf"))
    ranked_probs = ranked.softmax(-1)
    before = ranked_probs.cumsum(-1) - ranked_probs
    # top_p 1 keeps all: the sum of a long row's probabilities may round to 1 before its end.
    ranked_keep = ((before < top_p[:, None]) | (top_p[:, None] >= 1)) & ranked.isfinite()
    ranked_keep[:, 0] = True
    return torch.zeros_like(keep).scatter(-1, ordered.indices, ranked_keep)


def typical_mask(logits: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Return bool[L, V]: which tokens typical sampling keeps, on logits [L, V] after temperature and other cuts.

    The kept tokens are those whose negative log-probability is nearest to the entropy, as many as have `typical_p` of
    the probability (Meister et al., "Locally typical sampling", arXiv 2202.00666). As in transformers, ties with the
    last one are kept. 1 is off. Dropped tokens have logits of -inf.
    """
    scores = logits.log_softmax(-1)
    probs = scores.exp()
    entropy = -torch.where(probs > 0, probs * scores, 0.0).sum(-1, keepdim=True)
    ordered = (-scores - entropy).abs().sort(dim=-1)
    before = probs.gather(-1, ordered.indices).cumsum(-1) < typical_p[:, None]
    last = before.sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return ((-scores - entropy).abs() <= ordered.values.gather(-1, last)) | (typical_p[:, None] >= 1)


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    logits = torch.randn(4, 64, generator=g) * 3
    columns = (
        torch.tensor([0.0, 1.0, 0.7, 1.5]),
        torch.tensor([0, 5, 0, 8], dtype=torch.int32),
        torch.tensor([1.0, 0.9, 0.5, 1.0]),
        torch.tensor([0.0, 0.0, 0.1, 0.05]),
        torch.tensor([1.0, 0.7, 1.0, 0.4]),
        torch.tensor([0, 7, 2**40 + 1, 3]),
        torch.tensor([0, 3, 9, 1000], dtype=torch.int32),
    )
    penalties = (
        torch.randint(0, 7, (5, 64), generator=g, dtype=torch.int32),
        torch.tensor([2, -1, 0, 4], dtype=torch.int32),
        torch.tensor([1.3, 1.0, 0.7, 1.0]),
        torch.tensor([0.5, 0.0, 0.0, -1.0]),
        torch.tensor([0.0, 0.0, -2.0, 1.5]),
        torch.tensor([[3, 5], [-1, -1], [-1, -1], [12, -1]], dtype=torch.int32),
        _sample_edits(64, torch.randint(0, 2**31 - 1, (3, 2), generator=g, dtype=torch.int32)),
        torch.tensor([-1, 2, 0, -1], dtype=torch.int32),
        torch.tensor([7, 8, 9], dtype=torch.int32),
    )
    none = torch.full((4,), -1, dtype=torch.int32)
    nothing = (penalties[0], none, *penalties[2:5], torch.full_like(penalties[5], -1), penalties[6], none, penalties[8])
    return [Sample((logits, *columns, *nothing)), Sample((logits.to(dtype), *columns, *penalties))]


def _sample_edits(vocab: int, allowed: torch.Tensor) -> torch.Tensor:
    """Return a state `edits` for tests, with a row for each row of `allowed`, the words of allowed tokens. Every row
    has the same biases, and bans a token after any token and another one after token 9."""
    parts = EditParts(vocab)
    edits = torch.full((allowed.shape[0], parts.words), -1, dtype=torch.int32)
    edits[:, : parts.allowed_words] = allowed
    edits[:, parts.biased : parts.biased + 2] = torch.tensor([5, 40])
    edits[:, parts.biases : parts.biases + 2] = torch.tensor([4.5, -2.0]).view(torch.int32)
    edits[:, parts.after : parts.after + 2] = torch.tensor([ANY_TOKEN, 9])
    edits[:, parts.banned : parts.banned + 2] = torch.tensor([11, 5])
    return edits


# Rows drawn at once. A draw takes some hundred bytes per token of the vocabulary, so 16 rows of 128 k take 200 MB. One
# row at a time would be as fast on a CPU, but slower on a GPU.
_ROWS_AT_ONCE = 16


def _draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    typical_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    typical: bool,
) -> torch.Tensor:
    """Draw a random token for each row of logits, and return the ids i64[L]. All temperatures must be above 0.

    `typical` is false if no `typical_p` is below 1.
    """
    logits = wide(logits)
    # Subtract the row's maximum, so that no temperature makes it overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    kept = scaled.masked_fill(~keep_mask(scaled, top_k, top_p, min_p), float("-inf"))
    if typical:
        kept = kept.masked_fill(~typical_mask(kept, typical_p), float("-inf"))
    noise = -torch.log(-torch.log(uniform(seeds, positions, logits.shape[-1])))
    return (kept + noise).argmax(-1)


def _choose(
    logits: torch.Tensor, columns: tuple[torch.Tensor, ...], drawn: torch.Tensor, *, typical: bool
) -> torch.Tensor:
    """Return a token i32[L] for each row of logits [L, V], after penalties.

    `drawn` i64[n] lists the rows whose token is drawn at random. Other rows get their most likely token. `columns`
    holds the parameters of drawing, with a value per row: temperature, top_k, top_p, min_p, typical_p, seeds and
    positions. `typical` is false if no `typical_p` is below 1. A row whose largest logit is not finite gets -1.
    """
    tokens = logits.argmax(-1)
    for rows in drawn.split(_ROWS_AT_ONCE) if drawn.numel() else ():  # greedy requests need no random numbers
        tokens[rows] = _draw(logits[rows], *(column[rows] for column in columns), typical=typical)
    return torch.where(logits.amax(-1).isfinite(), tokens, -1).int()


def _choose_most(logits: torch.Tensor, *asked: torch.Tensor) -> torch.Tensor:
    logits = penalized_most(logits, Penalties(*asked[-NUM_PENALTIES:]))
    rows = torch.arange(min(logits.shape[0], _ROWS_AT_ONCE), device=logits.device)
    return _choose(logits, asked[:-NUM_PENALTIES], rows, typical=True)


@define(
    samples=_samples,
    rows=(
        "logits",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "seeds",
        "positions",
        "count_rows",
        "repetition",
        "frequency",
        "presence",
        "banned",
        "edit_rows",
    ),
    fake=lambda logits, *_: torch.empty(logits.shape[:1], dtype=torch.int32, device=logits.device),
    costliest=_choose_most,
    flops=lambda logits, *_: logits.numel(),  # one comparison per logit
    # Without a request for a penalty or edits, the states are not read.
    traffic=lambda *_: dict.fromkeys(("token_counts", "edits", "last_token"), 0),
    effect=Effect.READS_STATE,
    fusible=False,
    legal="cached",
    placement=whole,
)
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    typical_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    token_counts: torch.Tensor,
    count_rows: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    banned: torch.Tensor,
    edits: torch.Tensor,
    edit_rows: torch.Tensor,
    last_token: torch.Tensor,
) -> torch.Tensor:
    """Choose a token for each row of logits [L, V], greedily or at random, and return the ids i32[L].

    First, edits, penalties and bans change the logits. The edits of row i are in row `edit_rows[i]` of the state
    `edits` i32[R, words]; -1: none. They are biases, allowed tokens, and tokens that must not follow the token in the
    same row of the state `last_token` i32[R] (`ingot.ir.ops.logit_edits`). `repetition`, `frequency` and `presence` [L]
    are the penalties. They apply to the tokens counted in row `count_rows[i]` of the state `token_counts` i32[R, V];
    -1: no penalty. The ids in `banned` i32[L, K] are not chosen; -1: none.

    At temperature 0, the most likely token is chosen, with the lowest id among equals. Otherwise a token is drawn from
    `softmax(logits / temperature)`, restricted by `min_p`, `top_k`, `top_p` and `typical_p`. The draw uses the
    Gumbel-max method. Its noise depends only on `seeds[i]` (i64) and `positions[i]` (i32). All computation is in
    float32.

    A row with NaN or +inf, or without any finite logit, gets -1.
    """
    asked = Penalties(token_counts, count_rows, repetition, frequency, presence, banned, edits, edit_rows, last_token)
    logits = penalized(logits, asked) if asked.asked else logits
    drawn = (temperature > 0).nonzero().flatten()
    columns = (temperature, top_k, top_p, min_p, typical_p, seeds, positions)
    return _choose(logits, columns, drawn, typical=bool((typical_p < 1).any()))
