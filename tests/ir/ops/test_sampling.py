"""Random numbers by known answers; filters against transformers'; draws by their distribution."""

import itertools
import math
from typing import Any

import pytest
import torch
from drawn import drawn
from drawn_edits import drawn_edits
from op_values import BF16, F16, F32, F64, generator, ints, no_penalties
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ingot.ir.ops import OPS
from ingot.ir.ops.sampling import keep_mask, philox, typical_mask, uniform

NO_FILTER = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


def draw(
    logits: torch.Tensor, *, temperature: float = 1.0, seeds: Any = 0, positions: Any = 0, **options: Any
) -> torch.Tensor:
    """`sample` with one setting for all rows."""
    count = logits.shape[0]
    settings = {**NO_FILTER, **options}
    tokens: torch.Tensor = OPS["sample"].reference(
        logits,
        torch.full((count,), temperature),
        torch.full((count,), settings["top_k"], dtype=torch.int32),
        torch.full((count,), settings["top_p"]),
        torch.full((count,), settings["min_p"]),
        torch.full((count,), settings["typical_p"]),
        torch.zeros(count, dtype=torch.int64) + seeds,
        torch.zeros(count, dtype=torch.int32) + positions,
        *no_penalties(*logits.shape),
    )
    return tokens


# Random123's kat_vectors, the lines "philox4x32 10".
PHILOX_VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX_VECTORS)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    first, second = torch.tensor([key[0]]), torch.tensor([key[1]])
    assert tuple(int(word) for word in philox(tuple(torch.tensor([c]) for c in counter), (first, second))) == words


def test_uniform_is_words_of_philox() -> None:
    """Word j of a row is word j % 4 of counter (j // 4, position, 0, 0) under the two halves of the seed."""
    seeds, positions = torch.tensor([-1, 2**40 + 7, 0]), ints(3, 2**31 - 1, 0)
    found = uniform(seeds, positions, 11)
    assert found.shape == (3, 11) and found.dtype == F32
    for row in range(3):
        key = (seeds[row : row + 1] & 0xFFFFFFFF, (seeds[row : row + 1] >> 32) & 0xFFFFFFFF)
        for j in range(11):
            zero = torch.tensor([0])
            words = philox((torch.tensor([j // 4]), positions[row : row + 1].long(), zero, zero), key)
            assert abs(float(found[row, j]) - int(words[j % 4]) / 2**32) <= 2**-23


def test_uniform_stays_inside_the_open_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest word once rounded to 1: the noise was infinite and overruled every filter."""
    import sys

    def extremes(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.full_like(counter[0], word) for word in (0, 0xFFFFFFFF, 0xFFFFFFFE, 1))

    monkeypatch.setattr(sys.modules["ingot.ir.ops.sampling"], "philox", extremes)
    found = uniform(torch.tensor([0]), ints(0), 4)
    assert bool((found > 0).all()) and bool((found < 1).all())
    assert int(draw(torch.tensor([[9.0, 1.0, 2.0, 0.0]]), top_k=1)) == 0


def test_keep_mask_is_transformers() -> None:
    """MinP, then TopK, then TopP of transformers, in float64 so that no threshold falls between two roundings."""
    g = generator(8)
    unused: Any = None  # the ids so far
    for row in range(200):
        vocab = int(torch.randint(1, 70, (1,), generator=g))
        logits = torch.randn(1, vocab, generator=g, dtype=F64) * 4
        top_k = [0, 1, 3, 20, 1000][row % 5]
        top_p, min_p = [1.0, 0.95, 0.5, 0.01][row % 4], [0.0, 0.02, 0.3, 1.0][row // 5 % 4]
        if row % 7 == 0:
            logits[0, ::3] = -math.inf
            logits[0, 0] = 0.0
        scores = MinPLogitsWarper(min_p)(unused, logits)
        if top_k:
            scores = TopKLogitsWarper(top_k)(unused, scores)
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(unused, scores)
        columns = (torch.tensor([top_p], dtype=F64), torch.tensor([min_p], dtype=F64))
        found = keep_mask(logits, ints(top_k), *columns)
        assert torch.equal(found, scores.isfinite()), (row, vocab, top_k, top_p, min_p)


def test_typical_mask_is_transformers() -> None:
    g = generator(14)
    unused: Any = None
    for row in range(100):
        vocab = int(torch.randint(1, 70, (1,), generator=g))
        logits = torch.randn(1, vocab, generator=g, dtype=F64) * [0.3, 1, 4][row % 3]
        if row % 5 == 0:
            logits[0, 1::2] = -math.inf  # what other cuts have dropped
        mass = [0.01, 0.3, 0.9, 0.999][row % 4]
        expected = TypicalLogitsWarper(mass)(unused, logits).isfinite()
        found = typical_mask(logits, torch.tensor([mass], dtype=F64)) & logits.isfinite()
        assert torch.equal(found, expected) and bool(found.any()), (row, vocab, mass)
        assert bool(typical_mask(logits, torch.tensor([1.0])).all())
    peaked = torch.tensor([[9.0, 0.0, 0.0, 0.1]])  # the likeliest token is the expected one
    assert typical_mask(peaked, torch.tensor([0.2])).tolist() == [[True, False, False, False]]


def test_keep_mask_at_ties_and_edges() -> None:
    def kept(logits: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
        mask = keep_mask(torch.tensor([logits]), ints(top_k), torch.tensor([top_p]), torch.tensor([min_p]))
        return mask[0].nonzero().flatten().tolist()

    assert kept([1.0, 2.0, 2.0, 2.0, 0.0], top_k=2) == [1, 2, 3]  # ties with the k-th survive
    assert kept([0.0, 0.0, 0.0, 0.0], top_p=0.3) == [0, 1]  # of ties at the edge, the lowest ids
    assert kept([1.0, 2.0, 3.0], top_p=0.0) == [2]  # the most likely one always does
    assert kept([1.0, 2.0, 3.0], min_p=1.0) == [2]
    assert kept([1.0, 1.0, 1.0], top_k=1, top_p=0.0, min_p=1.0) == [0]
    assert kept([0.0] * 2000, top_p=0.0101) == list(range(21))
    assert kept([30.0, 0.0, 1.0]) == [0, 1, 2]  # off means off, though in float32 the first has all the probability


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """How many standard deviations Pearson's statistic lies above its mean."""
    expected = probs * counts.sum()
    used = expected > 0
    assert int(counts[~used].sum()) == 0
    statistic = float(((counts - expected)[used] ** 2 / expected[used]).sum())
    freedom = int(used.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


CUTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"typical_p": 0.5},
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("options", "by"), drawn(4, itertools.product(CUTS, ("seeds", "positions"))))
def test_draws_follow_the_distribution(options: dict[str, Any], by: str) -> None:
    count, vocab = 20_000, 15
    logits = torch.randn(1, vocab, generator=generator(9)) * 1.5
    scaled = logits.double() / options.get("temperature", 1.0)
    settings = {**NO_FILTER, **options}
    mask = keep_mask(
        scaled, ints(settings["top_k"]), torch.tensor([settings["top_p"]]), torch.tensor([settings["min_p"]])
    )
    kept = scaled.masked_fill(~mask, -math.inf)
    kept = kept.masked_fill(~typical_mask(kept, torch.tensor([settings["typical_p"]])), -math.inf)
    probs = kept.softmax(-1)[0]
    keys: dict[str, Any] = {by: torch.arange(count, dtype=torch.int64 if by == "seeds" else torch.int32)}
    tokens = draw(logits.expand(count, vocab), **options, **keys)
    assert tokens.dtype == torch.int32
    assert chi_square(torch.bincount(tokens.long(), minlength=vocab), probs) < 4


def test_consecutive_draws_are_independent() -> None:
    count = 20_000
    logits = torch.tensor([[0.0, 0.5, 1.0, -0.5]])
    first, second = (draw(logits.expand(count, 4), seeds=torch.arange(count) << 20, positions=p).long() for p in (6, 7))
    probs = logits.double().softmax(-1)[0]
    assert chi_square(torch.bincount(first * 4 + second, minlength=16), torch.outer(probs, probs).flatten()) < 4


@pytest.mark.parametrize("vocab", [1, 37, 1001])
def test_a_draw_depends_on_its_row_alone(vocab: int) -> None:
    g = generator(10)
    rows = 23
    args = (
        torch.randn(rows, vocab, generator=g) * 3,
        torch.tensor([0.0, 0.7, 1.0, 2.0])[torch.arange(rows) % 4],
        torch.tensor([0, 1, 7], dtype=torch.int32)[torch.arange(rows) % 3],
        torch.tensor([1.0, 0.9])[torch.arange(rows) % 2],
        torch.tensor([0.0, 0.05])[torch.arange(rows) // 2 % 2],
        torch.tensor([1.0, 0.6])[torch.arange(rows) // 3 % 2],
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g),
        torch.randint(0, 2**31 - 1, (rows,), generator=g, dtype=torch.int32),
    )
    counts = torch.randint(0, 5, (3, vocab), generator=g, dtype=torch.int32)
    penalties = (
        torch.randint(-1, 3, (rows,), generator=g, dtype=torch.int32),
        *(torch.rand(3, rows, generator=g) + 0.5),
        torch.randint(-1, vocab, (rows, 2), generator=g, dtype=torch.int32),
        torch.randint(-1, 3, (rows,), generator=g, dtype=torch.int32),
    )
    args, drawn = (*args, *penalties), len(args)
    edits, last_token = drawn_edits(g, vocab, [0, 1, 0])

    def sample(*asked: torch.Tensor) -> torch.Tensor:
        *asked, edit_rows = asked
        given = (*asked[:drawn], counts, *asked[drawn:], edits, edit_rows, last_token)
        tokens: torch.Tensor = OPS["sample"].reference(*given)
        return tokens

    whole = sample(*args)
    order = torch.randperm(rows, generator=g)
    assert torch.equal(sample(*(arg[order] for arg in args)), whole[order])
    assert torch.equal(sample(*(arg[:5] for arg in args)), whole[:5])
    for row in range(rows):
        assert torch.equal(sample(*(arg[row : row + 1] for arg in args)), whole[row : row + 1])


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("asks", [False, True])
def test_logits_of_half_the_bits_are_taken_as_if_cast(dtype: torch.dtype, asks: bool) -> None:
    g = generator(12)
    rows, vocab = 9, 301
    logits = (torch.randn(rows, vocab, generator=g) * 3).to(dtype)
    columns = (
        torch.tensor([0.0, 0.9, 1.4] * 3),
        ints(0, 7, 0).repeat(3),
        torch.tensor([1.0, 0.8, 1.0]).repeat(3),
        torch.full((rows,), 0.01),
        torch.tensor([1.0, 1.0, 0.8]).repeat(3),
        torch.arange(rows),
        torch.arange(rows, dtype=torch.int32),
    )
    penalties = list(no_penalties(rows, vocab))
    if asks:
        penalties[1][::2] = 1
        penalties[5][1, 0] = int(logits[1].argmax())
    sample = OPS["sample"].reference
    assert torch.equal(sample(logits, *columns, *penalties), sample(logits.float(), *columns, *penalties))


def test_penalties_come_before_the_choice() -> None:
    """What was said is not said again; what is banned is not said at all, and spoils nothing."""
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0], [1.0, math.nan, 2.0]])
    columns = (torch.zeros(3), torch.zeros(3, dtype=torch.int32), torch.ones(3), torch.zeros(3), torch.ones(3))
    keys = (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32))
    counts, off = torch.tensor([[0, 2, 0]], dtype=torch.int32), torch.zeros(3)
    penalties = (ints(0, -1, -1), torch.ones(3), off, off + 1.5, ints(-1, -1, 1)[:, None], *no_penalties(3, 3)[6:])
    assert OPS["sample"].reference(logits, *columns, *keys, counts, *penalties).tolist() == [2, 1, 2]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_cannot_be_sampled_give_minus_one(temperature: float) -> None:
    logits = torch.randn(6, 9, generator=generator(11))
    good = draw(logits, temperature=temperature)
    logits[1, 4], logits[2, 0] = math.nan, math.inf
    logits[3] = -math.inf
    logits[4, 1:] = -math.inf
    found = draw(logits, temperature=temperature)
    assert found.tolist() == [int(good[0]), -1, -1, -1, 0, int(good[5])]


def test_greedy_takes_the_lowest_of_the_most_likely() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-1.0, -2.0, -1.0, -1.0]])
    assert draw(logits, temperature=0.0, top_k=2, seeds=5).tolist() == [1, 0, 0]
    long = torch.zeros(2, 40_003)
    long[:, 7::5000] = 1.0
    assert draw(long, temperature=0.0).tolist() == [7, 7]


@pytest.mark.parametrize("temperature", [1e-3, 1e-38, 1e-45])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """Logits over a tiny temperature overflowed once, and token 0 came out."""
    logits = torch.tensor([[-80.0, 5.0, 80.0, 79.0], [-9.0, -3.0, -8.0, -7.0]])
    assert draw(logits, temperature=temperature, top_p=0.9).tolist() == [2, 1]
