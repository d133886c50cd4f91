"""Penalties, bans, counts and log-probabilities against transformers, torch and plain Python."""

import math
from collections import Counter

import pytest
import torch
from drawn_edits import draw_edit, edited_by_hand, packed
from op_values import no_penalties
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor

from ingot.ir.logprob_limits import MAX_LOGPROBS
from ingot.ir.ops import OPS
from ingot.ir.ops.penalties import MAX_BANNED, Penalties, penalized

VOCAB = 53


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_tokens(g: torch.Generator, most: int) -> list[int]:
    """Few different ones, so that many repeat."""
    count = int(torch.randint(0, most, (1,), generator=g))
    return torch.randint(0, 20, (count,), generator=g).tolist()


def counts_of(prompt: list[int], generated: list[int]) -> torch.Tensor:
    """A row of `token_counts`, by its documented layout."""
    row = torch.zeros(VOCAB, dtype=torch.int32)
    for token in set(prompt):
        row[token] += 1
    for token, count in Counter(generated).items():
        row[token] += 2 * count
    return row


# --- count_tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_the_sequences_however_they_are_fed(seed: int) -> None:
    """Sequences in pieces of any size, in rows used before; one starts again from 0; one is not counted."""
    g = generator(seed)
    sequences = [(some_tokens(g, 12) or [1], some_tokens(g, 12)) for _ in range(4)]
    rows, order = torch.randperm(6, generator=g)[:4].tolist(), torch.randperm(4, generator=g).tolist()
    counts = torch.randint(0, 9, (6, VOCAB), generator=g, dtype=torch.int32)
    before = counts.clone()
    done, again = [0] * 4, [order[0]]
    while any(done[b] < len(prompt + generated) for b, (prompt, generated) in enumerate(sequences)):
        ids, positions, seqs = [0], [0], [-1]  # padding
        for place, b in enumerate(order):
            whole = sequences[b][0] + sequences[b][1]
            length = min(int(torch.randint(0, 5, (1,), generator=g)), len(whole) - done[b])
            if b in again and done[b] > 2:  # preempted once
                again.remove(b)
                done[b], length = 0, 1
            ids += whole[done[b] : done[b] + length]
            positions += range(done[b], done[b] + length)
            seqs += [place] * length
            done[b] += length
        ends = ints(*(len(sequences[b][0]) if b != order[3] else -1 for b in order), -1)
        step = (ints(*ids), ints(*positions), ints(*seqs), ints(*(rows[b] for b in order), -1), ends)
        counts = OPS["count_tokens"].reference(counts, *step)
    for b, (prompt, generated) in enumerate(sequences):
        expected = before[rows[b]] if b == order[3] else counts_of(prompt, generated)
        assert torch.equal(counts[rows[b]], expected)
    others = [row for row in range(6) if row not in rows]
    assert torch.equal(counts[others], before[others])


def test_rows_without_counts_count_nothing() -> None:
    counts = torch.full((2, 3), 7, dtype=torch.int32)
    in_place = OPS["count_tokens"].in_place
    assert in_place is not None
    in_place(counts, ints(0, 1), ints(0, 1), ints(0, 0), ints(1), ints(-1))
    assert counts.tolist() == [[7, 7, 7], [7, 7, 7]]


# --- penalized -------------------------------------------------------------------------------------------------------


def penalized_by_hand(
    logits: torch.Tensor, prompt: list[int], generated: list[int], knobs: tuple[float, float, float], banned: list[int]
) -> torch.Tensor:
    repetition, frequency, presence = knobs
    scores = logits.clone()
    if prompt or generated:
        scores = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([prompt + generated]), scores[None])[0]
    for token, count in Counter(generated).items():
        scores[token] -= count * frequency + presence
    if banned:
        scores = SuppressTokensLogitsProcessor(banned)(torch.tensor([[0]]), scores[None])[0]
    return scores


@pytest.mark.parametrize("seed", range(10))
def test_penalties_are_transformers_and_openais(seed: int) -> None:
    g = generator(seed)
    rows = 7
    logits = torch.randn(rows, VOCAB, generator=g) * 4
    held = [(some_tokens(g, 15), some_tokens(g, 15)) for _ in range(rows)]
    counts = torch.stack([counts_of(*one) for one in held])
    knobs = torch.stack(
        [
            torch.rand(rows, generator=g) + 0.5,
            torch.rand(rows, generator=g) * 4 - 2,
            torch.rand(rows, generator=g) * 4 - 2,
        ]
    )
    knobs[:, 1] = torch.tensor([1.4, 0.0, 0.0])
    knobs[:, 2] = torch.tensor([1.0, 0.7, 0.0])
    knobs[:, 3] = torch.tensor([1.0, 0.0, -1.1])
    banned = torch.full((rows, MAX_BANNED), -1, dtype=torch.int32)
    for row in (0, 3, 5):
        banned[row, :row] = torch.randperm(VOCAB, generator=g)[:row].int()
    places = torch.randperm(rows, generator=g).int()  # which row of counts belongs to which row of logits
    places[5] = -1
    unedited = no_penalties(rows, VOCAB)[6:]
    found = penalized(logits, Penalties(counts, places, knobs[0], knobs[1], knobs[2], banned, *unedited))
    for row in range(rows):
        prompt, generated = held[places[row]] if row != 5 else ([], [])
        one = [float(knob[row]) for knob in knobs]
        expected = penalized_by_hand(
            logits[row],
            prompt,
            generated,
            (one[0], one[1], one[2]),
            [token for token in banned[row].tolist() if token >= 0],
        )
        # OpenAI's two penalties are taken one after the other here, and their sum there.
        assert torch.allclose(found[row], expected, rtol=1e-6, atol=1e-5), row


@pytest.mark.parametrize("seed", range(5))
def test_edits_are_those_of_plain_code(seed: int) -> None:
    """A bias comes before the penalties, which scale it; what is banned or not allowed has no value at all."""
    g = generator(seed)
    vocab, states, rows = 31 + seed, 3, ints(2, -1, 0, 1)
    logits = torch.randn(4, vocab, generator=g) * 4
    drawn = [draw_edit(g, vocab) for _ in range(states)]
    edits, last = torch.stack([packed(one, vocab) for one in drawn]), ints(0, 1, 0)
    nothing = no_penalties(4, vocab)
    counts = torch.full((4, vocab), 1, dtype=torch.int32)  # every token is in the prompt
    counted, repetition = ints(-1, -1, 1, 1), torch.tensor([9.0, 9.0, 1.7, 1.7])
    asked = Penalties(counts, counted, repetition, *nothing[3:6], edits, rows, last)
    found = penalized(logits, asked)
    assert asked.asked and torch.equal(found[1], logits[1])
    for row, state in enumerate(rows.tolist()):
        if state >= 0:
            expected = torch.tensor(edited_by_hand(logits[row], drawn[state], int(last[state])), dtype=torch.float64)
            if row >= 2:
                expected = torch.where(expected > 0, expected / 1.7, expected * 1.7)
            assert torch.allclose(found[row].double(), expected, rtol=1e-6, atol=1e-5), row


def test_who_asks_for_nothing_keeps_its_logits() -> None:
    logits, no_row = torch.randn(2, VOCAB, generator=generator(1)), ints(-1, -1)
    counts, off = torch.full((2, VOCAB), 9, dtype=torch.int32), torch.full((2,), 1.5)
    unedited = no_penalties(2, VOCAB)[6:]
    assert not Penalties(counts, no_row, off, off, off, no_row[:, None], *unedited).asked
    for rows, banned in ((ints(-1, 1), no_row), (no_row, ints(-1, 3))):
        asked = Penalties(counts, rows, off, off, off, banned[:, None], *unedited)
        found = penalized(logits, asked)
        assert asked.asked and torch.equal(found[0], logits[0]) and not torch.equal(found[1], logits[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_penalties_are_computed_in_float32_or_wider(dtype: torch.dtype) -> None:
    g = generator(2)
    logits, rows = torch.randn(3, VOCAB, generator=g).to(dtype), ints(0, -1, 1)
    counts = torch.randint(0, 9, (2, VOCAB), generator=g, dtype=torch.int32)
    knobs, unedited = torch.rand(3, 3, generator=g), no_penalties(3, VOCAB)[6:]
    asked = Penalties(counts, rows, *knobs, ints(3, -1, 4)[:, None], *unedited)
    found, wide = penalized(logits, asked), torch.float64 if dtype == torch.float64 else torch.float32
    assert found.dtype == wide and torch.equal(found, penalized(logits.to(wide), asked))


@pytest.mark.parametrize("repetition", [1e-30, 1e30])
def test_extreme_penalties_stay_finite(repetition: float) -> None:
    logits = torch.tensor([[80.0, -80.0, 0.0, 1e4]])
    off = torch.zeros(2, 1)
    counts = torch.full((1, 4), 3, dtype=torch.int32)
    unedited = no_penalties(1, 4)[6:]
    asked = Penalties(counts, ints(0), torch.tensor([repetition]), off[0], off[1], ints(-1)[:, None], *unedited)
    found = penalized(logits, asked)
    assert bool(found.isfinite().all())


# --- top_logprobs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 7, 20, VOCAB, 5003])
@pytest.mark.parametrize("tied", [False, True])
def test_logprobs_are_log_softmax_sorted(vocab: int, tied: bool) -> None:
    g = generator(vocab)
    rows = 12
    logits = torch.randn(rows, vocab, generator=g) * 5
    logits = logits.round() if tied else logits
    logits[:, ::3] *= -0.0 if tied else 1.0
    sampled, targets = (torch.randint(0, vocab, (rows,), generator=g, dtype=torch.int32) for _ in range(2))
    targets[::2] = -1
    sampled[4] = -1  # a row that was not finite
    wanted = torch.randint(0, MAX_LOGPROBS + 1, (rows,), generator=g, dtype=torch.int32)
    wanted[[1, 6]] = -1
    ids, logprobs, ranks = OPS["top_logprobs"].reference(logits, sampled, targets, wanted)
    for row in range(rows):
        token, count = int(targets[row] if row % 2 else sampled[row]), min(int(wanted[row]), vocab)
        if count < 0 or token < 0:
            listed: list[int] = []
            assert int(ranks[row]) == 0
        else:
            order = sorted(range(vocab), key=lambda one: (-float(logits[row, one]), one))
            listed = [token, *order[:count]]
            assert int(ranks[row]) == 1 + sum(float(logits[row, one]) > float(logits[row, token]) for one in order)
        assert ids[row].tolist() == listed + [-1] * (1 + MAX_LOGPROBS - len(listed))
        exact = logits[row].double().log_softmax(-1)[listed]
        assert torch.allclose(logprobs[row, : len(listed)].double(), exact, rtol=1e-5, atol=1e-5)
        assert logprobs[row, len(listed) :].tolist() == [-math.inf] * (1 + MAX_LOGPROBS - len(listed))
