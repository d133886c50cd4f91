"""Driving an engine by the clock, against times by hand; and what runs come to, against numpy."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from ingot.bench.drive import Progress, Record, Run, drive
from ingot.bench.metrics import detail, latency_metrics, serve_metrics, throughput_metrics
from ingot.bench.workload import BenchRequest

STEP = 0.25


@dataclass
class FakeEngine:
    """With a clock of its own: a step takes a quarter of a second and makes a token for each of `places` requests."""

    places: int = 2
    interrupt_at: float = float("inf")
    now: float = 100.0
    slept: list[float] = field(default_factory=list)
    made: dict[int, int] = field(default_factory=dict)
    asked: dict[int, BenchRequest] = field(default_factory=dict)

    def add(self, index: int, request: BenchRequest) -> None:
        self.asked[index], self.made[index] = request, 0

    def has_unfinished(self) -> bool:
        return bool(self.made)

    def step(self) -> Iterator[Progress]:
        assert self.made, "there was nothing to do"
        self.now += STEP
        if self.now >= 100 + self.interrupt_at:
            raise KeyboardInterrupt
        for index in sorted(self.made)[: self.places]:
            self.made[index] += 1
            count, last = self.made[index], self.asked[index].output_len
            if count == last:
                del self.made[index]
            yield Progress(index, count, count == last, "broke" if index == 7 else "")

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds

    def clock(self) -> float:
        self.now += 2**-14  # time passes while it is looked at
        return self.now

    def drive(self, *requests: tuple[float, int], max_concurrency: int | None = None) -> Run:
        asked = [BenchRequest((1,) * 3, output, arrival) for arrival, output in requests]
        return drive(self, asked, max_concurrency=max_concurrency, clock=self.clock, sleep=self.sleep)


def times_of(run: Run) -> list[tuple[float, list[float]]]:
    """Starts and token times, without what looking at the clock takes."""
    return [(round(one.started, 2), [round(time, 2) for time in one.token_times]) for one in run.records]


def test_requests_are_given_when_they_arrive() -> None:
    engine = FakeEngine()
    run = engine.drive((0.0, 2), (0.3, 2), (2.0, 1))
    # The second one arrives in the second step and waits for its end; the third after a pause.
    assert times_of(run) == [(0.0, [0.25, 0.5]), (0.3, [0.75, 1.0]), (2.0, [2.25])]
    assert [one.completed for one in run.records] == [True] * 3 and not run.interrupted
    assert run.duration == pytest.approx(2.25, abs=0.1)
    assert len(engine.slept) == 1 and engine.slept[0] == pytest.approx(2.0 - 1.0, abs=0.1)


def test_no_more_are_let_in_than_may_be() -> None:
    run = FakeEngine(places=8).drive((0.0, 2), (0.1, 2), (0.1, 1), (1.3, 1), max_concurrency=1)
    assert times_of(run) == [
        (0.0, [0.25, 0.5]),
        (0.5, [0.75, 1.0]),
        (1.0, [1.25]),
        (1.3, [1.55]),
    ]
    free = FakeEngine(places=8).drive((0.0, 2), (0.1, 2), (0.1, 1), (1.3, 1))
    assert [one.started for one in free.records] == [0.0, 0.1, 0.1, 1.3]


def test_an_interrupt_leaves_what_was_measured() -> None:
    finished: list[int] = []
    engine = FakeEngine(interrupt_at=0.8)
    asked = [BenchRequest((1,), output) for output in (1, 9, 9)]
    run = drive(engine, asked, on_finished=finished.append, clock=engine.clock, sleep=engine.sleep)
    assert run.interrupted and finished == [1] and len(run.completed) == 1
    assert [len(one.token_times) for one in run.records] == [1, 3, 2]
    assert run.duration == pytest.approx(1.0, abs=0.01)


def test_what_ends_as_an_error_is_not_completed() -> None:
    asked = [(0.0, 2)] * 8
    run = FakeEngine(places=8).drive(*asked)
    assert [one.error for one in run.records] == [""] * 7 + ["broke"]
    metrics = serve_metrics(run)
    assert (metrics["completed"], metrics["failed"], metrics["total_output_tokens"]) == (7, 1, 14)
    assert detail(run)["output_lens"] == [2] * 7 + [0]


def random_run(seed: int) -> Run:
    rng = random.Random(seed)
    records = []
    for _ in range(40):
        started = rng.uniform(0, 20)
        gaps = [rng.expovariate(20) for _ in range(rng.randint(1, 30))]
        request = BenchRequest((1,) * rng.randint(1, 99), len(gaps), started)
        records.append(Record(request, started, list(started + np.cumsum(gaps)), finished=rng.random() < 0.9))
    return Run(tuple(records), 25.0)


@pytest.mark.parametrize("seed", range(3))
def test_metrics_are_those_of_numpy(seed: int) -> None:
    run = random_run(seed)
    done = [one for one in run.records if one.finished]
    assert 0 < len(done) < 40
    found = serve_metrics(run, goodput={"ttft": 60, "tpot": 55, "e2el": 900}, percentiles=(50, 90, 99.9))
    ends = np.array([one.token_times[-1] for one in done])
    starts = np.array([one.started for one in done])
    ttft = np.array([one.token_times[0] for one in done]) - starts
    counts = np.array([len(one.token_times) for one in done])
    tpot = (ends - starts - ttft) / np.maximum(counts - 1, 1)
    itl = np.concatenate([np.diff(one.token_times) for one in done])
    for name, values in {"ttft": ttft, "tpot": tpot[counts > 1], "itl": itl, "e2el": ends - starts}.items():
        milliseconds = 1e3 * values
        assert found[f"mean_{name}_ms"] == pytest.approx(milliseconds.mean())
        assert found[f"median_{name}_ms"] == pytest.approx(np.median(milliseconds))
        assert found[f"std_{name}_ms"] == pytest.approx(milliseconds.std())
        for percent in ("50", "90", "99.9"):
            assert found[f"p{percent}_{name}_ms"] == pytest.approx(np.percentile(milliseconds, float(percent)))
    good = np.sum((ttft <= 0.06) & (tpot <= 0.055) & (ends - starts <= 0.9))
    assert 0 < good < len(done) and found["request_goodput"] == good / 25
    prompts = sum(len(one.request.prompt) for one in done)
    assert found["request_throughput"] == len(done) / 25 and found["output_throughput"] == counts.sum() / 25
    assert found["total_token_throughput"] == (counts.sum() + prompts) / 25
    tokens = np.concatenate([one.token_times for one in done]) - starts.min()
    assert found["max_output_tokens_per_s"] == np.bincount(tokens.astype(int)).max()
    at_once = [np.sum((starts <= moment) & (moment < ends)) for moment in starts]
    assert found["max_concurrent_requests"] == max(at_once)
    offline = throughput_metrics(run)
    assert offline["tokens_per_second"] == found["total_token_throughput"] and offline["num_requests"] == len(done)
    assert detail(run)["itls"][0] == pytest.approx(np.diff(run.records[0].token_times))


def test_nothing_measured_is_no_fault() -> None:
    found = serve_metrics(Run((), 1.0), goodput={"ttft": 1})
    assert (
        found["completed"] == found["p99_ttft_ms"] == found["request_goodput"] == found["max_concurrent_requests"] == 0
    )


def test_latencies() -> None:
    drawn = list(np.random.default_rng(0).exponential(size=57))
    found = latency_metrics(drawn)
    assert found["latencies"] == drawn and found["avg_latency"] == pytest.approx(np.mean(drawn))
    assert found["std_latency"] == pytest.approx(np.std(drawn))
    assert list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert list(found["percentiles"].values()) == pytest.approx(np.percentile(drawn, [10, 25, 50, 75, 90, 99]))
