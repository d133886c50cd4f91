"""The golden run's steps stay within all limits and reach whatever can be reached."""

import itertools
import random

import pytest

from ingot.compile.golden_schedule import golden_schedule
from ingot.ir.artifact.plan import FEW_TOKENS, BucketClass


def classes(*bounds: tuple[int, int]) -> list[BucketClass]:
    return [BucketClass(name=f"{lo}-{hi}", tokens=(lo, hi)) for lo, hi in bounds]


def served(buckets: list[BucketClass], schedule: list[list[tuple[int, int]]]) -> list[str]:
    """The bucket class of each step."""
    steps = [(sum(count for _, count in fed), max(count for _, count in fed)) for fed in schedule]
    return [next(bucket.name for bucket in buckets if bucket.holds(*step)) for step in steps]


def test_the_usual_limits() -> None:
    buckets = classes((1, FEW_TOKENS), (FEW_TOKENS + 1, 2048))
    schedule = golden_schedule(buckets, 4096, 64, 16)
    assert schedule == [
        [(0, 17), (1, 5)],  # across a page
        [(0, 14), (1, 1), (2, 1)],  # a later chunk up to the end of a page, a token decoded, a prompt of one token
        *[[(0, 1), (1, 1), (2, 1)]] * 3,
    ]
    assert served(buckets, schedule) == ["17-2048", "1-16", "1-16", "1-16", "1-16"]
    assert golden_schedule(classes((1, 2048)), 4096, 64, 16) == schedule


def test_a_class_of_many_sequences() -> None:
    one_each = BucketClass(name="one each", tokens=(9, 40), q_max=1)
    few, many = classes((1, 8), (9, 2048))
    buckets = [few, one_each, many]
    schedule = golden_schedule(buckets, 4096, 64, 16)
    names = served(buckets, schedule)
    assert set(names) == {"1-8", "one each", "9-2048"}
    assert sorted(schedule[names.index("one each")]) == [(index, 1) for index in range(9)]
    assert "one each" not in served(buckets, golden_schedule(buckets, 4096, 8, 16))  # there are not that many


@pytest.mark.parametrize("seed", range(4))
def test_any_limits(seed: int) -> None:
    for number in range(50):
        check(random.Random(50 * seed + number))


def check(draw: random.Random) -> None:
    max_batch = draw.choice([1, 1, 2, 3, 8, 64])
    max_tokens = max_batch + draw.choice([0, 1, 15, 16, 17, 100, 2000])
    max_seq_len = draw.choice([1, 2, 3, 5, 16, 17, 40, 500, 4096])
    bounds = sorted({1, max_tokens + 1, *(draw.randint(2, max_tokens + 1) for _ in range(draw.randint(0, 3)))})
    buckets = classes(*((lo, hi - 1) for lo, hi in itertools.pairwise(bounds)))
    schedule = golden_schedule(buckets, max_seq_len, max_batch, draw.choice([1, 8, 16, 32, 128]))
    names = served(buckets, schedule)  # every step has a class
    lengths: dict[int, int] = {}
    for fed in schedule:
        assert 1 <= len(fed) == len(dict(fed)) <= max_batch and all(count > 0 for _, count in fed)
        for index, count in fed:
            lengths[index] = lengths.get(index, 0) + count
    assert sorted(lengths) == list(range(len(lengths))) and max(lengths.values()) <= max_seq_len
    # Whatever a step can reach is reached: the largest class, and then those that there are tokens left for.
    reachable = [bucket for bucket in buckets if bucket.tokens[0] <= max_batch * max_seq_len]
    assert reachable[-1].name in names
    if max_batch * max_seq_len >= sum(bucket.tokens[0] for bucket in buckets) + 100 and max_seq_len >= 40:
        assert set(names) == {bucket.name for bucket in buckets}
        steps = buckets * 2 if len(buckets) == 1 else buckets
        assert sum(lengths.values()) <= sum(max(bucket.tokens[0], 32) for bucket in steps) + 9
