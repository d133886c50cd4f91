"""What is asked of an engine: lengths, arrivals and prompts, by seed."""

import itertools
import math
import random
import statistics

import pytest

from ingot.bench.workload import (
    SHAREGPT_OUTPUT,
    SHAREGPT_PROMPT,
    Lengths,
    LogNormal,
    arrival_times,
    make_workload,
    sharegpt_lengths,
)


@pytest.mark.parametrize("one", [SHAREGPT_PROMPT, SHAREGPT_OUTPUT, LogNormal(10, 1)])
def test_a_distribution_has_its_mean_and_deviation(one: LogNormal) -> None:
    rng = random.Random(1)
    drawn = [one.draw(rng) for _ in range(200_000)]
    assert statistics.fmean(drawn) == pytest.approx(one.mean, rel=0.02)
    # The deviation of so long a tail comes slowly; its median is another function of the same parameters.
    assert statistics.median(drawn) == pytest.approx(
        one.mean / math.sqrt(1 + (one.deviation / one.mean) ** 2), rel=0.02
    )


def test_lengths_keep_within_bounds() -> None:
    found = sharegpt_lengths(2000, 3, 10_000)
    assert found == sharegpt_lengths(2000, 3, 10_000) != sharegpt_lengths(2000, 4, 10_000)
    assert all(4 <= one.prompt <= 1024 and one.output >= 4 and one.prompt + one.output <= 2048 for one in found)
    prompts = [one.prompt for one in found]
    assert min(prompts) == 4 and max(prompts) == 1024 and len({one.output for one in found}) > 500
    assert all(one.prompt + one.output <= 64 for one in sharegpt_lengths(100, 3, 64))
    assert sharegpt_lengths(2, 3, 8) == [Lengths(4, 4)] * 2


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_arrivals_come_at_their_rate_and_spread(burstiness: float) -> None:
    times = arrival_times(20_000, 8.0, burstiness, 5)
    assert times[-1] == pytest.approx(20_000 / 8.0) and times == sorted(times)
    gaps = [times[0], *(later - earlier for earlier, later in itertools.pairwise(times))]
    assert statistics.pstdev(gaps) * 8.0 == pytest.approx(burstiness**-0.5, rel=0.05)
    assert times != arrival_times(20_000, 8.0, burstiness, 6)


def test_all_arrive_at_once_at_an_infinite_rate() -> None:
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0] * 3


def test_prompts_are_drawn_from_the_tokens_that_are_given() -> None:
    lengths, tokens = [Lengths(50, 3), Lengths(20, 4)], [5, 7, 11]
    found = make_workload(lengths, tokens, 1, arrivals=[0.5, 1.5], shared_prefix=15)
    assert [(len(one.prompt), one.output_len, one.arrival) for one in found] == [(50, 3, 0.5), (20, 4, 1.5)]
    assert set(found[0].prompt[:15]) == set(found[0].prompt[15:]) == set(tokens)
    assert found[0].prompt[:15] == found[1].prompt[:15]
    assert found[0].prompt[15:20] != found[1].prompt[15:]
    assert found != make_workload(lengths, tokens, 2, arrivals=[0.5, 1.5], shared_prefix=15)
