"""How decode and serving are measured, by a clock and an engine of our own."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest

from ingot.bench.drive import Progress


def test_a_step_is_timed_by_what_longer_outputs_take_more(benchmarks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of our own: a request costs 5 s and a token a quarter, and the first of each length is slow."""
    method = importlib.import_module("decode_method")
    now = 0.0
    asked: list[tuple[int, int]] = []

    def generate(prompts: list[list[int]], count: int) -> None:
        nonlocal now
        assert all(len(prompt) == 128 and all(0 <= token < 50 for token in prompt) for prompt in prompts)
        now += 5 + count / 4 + (3 if (len(prompts), count) not in asked else 0)
        asked.append((len(prompts), count))

    monkeypatch.setattr(method.time, "perf_counter", lambda: now)
    lengths = method.Lengths(long=40, short=20, tries=2)
    decoded = method.measure_decode(generate, 50, 3, lengths)
    assert decoded.step == 0.25 and decoded.short == (13.0, 10.0)
    assert asked == [(3, 40), (3, 20), (3, 20), (3, 40), (3, 40)]
    # The token n of an output is made by a step that sees the prompt and the n - 1 tokens in front of it.
    seen = [128 + n - 1 for n in range(20 + 1, 40 + 1)]
    assert lengths.context == sum(seen) / len(seen) and lengths.tokens == 168


def test_what_a_busy_machine_gives_is_no_step(benchmarks: None) -> None:
    method = importlib.import_module("decode_method")
    with pytest.raises(SystemExit, match="too busy"):
        slow_first = iter([0, 0.1, 0])
        method.measure_decode(lambda *_: time.sleep(next(slow_first)), 50, 1, method.Lengths(long=2, short=1, tries=1))


def test_no_two_prompts_begin_alike_where_they_need_not(benchmarks: None) -> None:
    """Or a cache of prefixes would answer for the engine."""
    method = importlib.import_module("serve_method")
    asked: list[tuple[int, ...]] = []

    class Engine:
        def __init__(self) -> None:
            self.open: list[tuple[int, int]] = []

        def add(self, index: int, request: Any) -> None:
            self.open.append((index, request.output_len))
            asked.append(request.prompt)

        def has_unfinished(self) -> bool:
            return bool(self.open)

        def step(self) -> list[Progress]:
            done, self.open = self.open, []
            return [Progress(index, count, True) for index, count in done]

    load = method.Load(prompt=(300, 700), requests=4, arrivals=5, rate=(1e4, 2e4), spread=3, sharing=2, prefix=90)
    engine = Engine()
    method.measure_serving(engine, engine, 1000, load)
    # Four of each long prompt, and each of the other parts after as many that warm up.
    assert len(asked) == 2 * 4 + 2 * (4 + 3 + 5 + 5 + 2)
    sharing = asked[-4:]
    assert sharing[0][:90] == sharing[1][:90] != sharing[2][:90] == sharing[3][:90]
    beginnings = [prompt[:4] for prompt in asked[:-4]] + [sharing[0][:4], sharing[2][:4]]
    assert len(set(beginnings)) == len(beginnings)
