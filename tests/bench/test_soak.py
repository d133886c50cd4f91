"""A soak: what it asks, that an engine stands it, and that it sees what an engine loses."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ingot import SamplingParams
from ingot.bench.engine import plain_tokens
from ingot.bench.holdings import take_holdings
from ingot.bench.soak import Soak, output_fault, run_soak
from ingot.bench.soak_load import (
    CANCELLED,
    NEAR_LIMIT,
    REFUSED,
    SHARED,
    STOPPED,
    STREAMED,
    VERY_SHORT,
    Cancel,
    SoakRequest,
    Vocabulary,
    probe_requests,
    soak_requests,
    spread_in,
)
from ingot.ir.errors import RequestError
from ingot.runtime.engines.outputs import CompletionOutput, RequestOutput
from ingot.runtime.loading.limits import Limits
from ingot.runtime.loading.loader import load_artifact
from ingot.runtime.scheduling.occupancy import Occupancy
from ingot.serve.set_up import make_engine

# With the tests whose artifact this is.
pytestmark = pytest.mark.xdist_group("stress")

LIMITS = Limits(vocab_size=4096, max_seq_len=2048, max_batch=8, max_tokens=128, page_size=16)
WORDS = Vocabulary(range(10, 4096), lambda token: f" {token}")


# --- what is asked --------------------------------------------------------------------------------------------------


def test_shares_of_what_is_asked() -> None:
    count = 1500
    found = soak_requests(count, 5.0, LIMITS, WORDS, 1)
    assert found == soak_requests(count, 5.0, LIMITS, WORDS, 1) != soak_requests(count, 5.0, LIMITS, WORDS, 2)
    assert found[-1].arrival == pytest.approx(count / 5.0) and found == sorted(found, key=lambda one: one.arrival)
    fine = [one for one in found if not one.refused]
    beginnings = Counter(one.tokens[:3] for one in fine if len(one.tokens) > 3)
    stops = sum(bool(one.params.stop or one.params.stop_token_ids) for one in fine)
    shares = {
        REFUSED: count - len(fine),
        NEAR_LIMIT: sum(len(one.tokens) >= LIMITS.max_seq_len - 16 for one in fine),
        VERY_SHORT: sum(len(one.tokens) < 4 for one in fine),  # none of ShareGPT's is as short
        SHARED: sum(number for number in beginnings.values() if number > 1),
        STREAMED: sum(one.stream for one in fine),
        STOPPED: stops,
        CANCELLED: sum(one.cancel is not None for one in fine),
    }
    for share, number in shares.items():
        # Four deviations of so many drawn; a very short prompt may be too short to share anything.
        assert number / count == pytest.approx(share, abs=4 * math.sqrt(share / count) + 0.05 * (share == SHARED))
    for one in found:
        fits = len(one.tokens) < LIMITS.max_seq_len and max(one.tokens) < LIMITS.vocab_size
        assert fits != one.refused
    leaving = [one.cancel for one in found if one.cancel is not None]
    assert {one.twice for one in leaving} == {True, False} and min(one.steps for one in leaving) == 0
    assert any(one.params.stop for one in found) and any(one.params.min_tokens for one in found)
    assert {one.cache_salt for one in found} == {None, "a", "b"} and {one.priority for one in found} == {-1, 0, 1}
    without = soak_requests(200, math.inf, LIMITS, Vocabulary(WORDS.tokens), 1)
    assert not any(one.params.stop or one.arrival for one in without)


def test_probes_are_spread_over_the_time() -> None:
    probes = probe_requests(5, LIMITS, WORDS.tokens, 1)
    assert all(one.params.greedy and one.params.ignore_eos for one in probes)
    assert len({one.tokens[:4] for one in probes}) == 5
    load = spread_in(soak_requests(40, 4.0, LIMITS, WORDS, 1), probes, 10.0)
    assert load == sorted(load, key=lambda one: one.arrival) and len(load) == 45
    assert [one.arrival for one in load if one.probe is not None] == [1.0, 3.0, 5.0, 7.0, 9.0]


# --- an engine stands it --------------------------------------------------------------------------------------------


def test_nothing_is_lost_and_everything_comes_back(artifact: Callable[..., Path]) -> None:
    """Everything at once, with pages for few: bitwise what each probe gets alone."""
    path = artifact("qwen3-biased", backend="reference", deterministic=True)
    loaded = load_artifact(path, num_pages=8)
    limits = replace(loaded.limits, max_seq_len=48)  # short ones are served soon
    engine = make_engine(
        replace(loaded, limits=limits),
        max_num_seqs=None,
        max_num_batched_tokens=None,
        max_num_mixed_tokens=None,
        chunked_prefill=True,
        prefix_caching=None,
        cascade=True,
        policy="priority",
        seed=0,
    )
    vocabulary = Vocabulary(plain_tokens(loaded))
    probes = probe_requests(2, limits, vocabulary.tokens, 3)

    def run(requests: Sequence[SoakRequest]) -> Soak:
        return run_soak(engine, requests, longest=limits.max_seq_len)

    alone = [run([one]).outcomes[0].token_ids for one in probes]
    run(soak_requests(3, math.inf, limits, vocabulary, "before"))
    drawn = soak_requests(300, math.inf, limits, vocabulary, 3)
    refused, leaving = [one for one in drawn if one.refused], [one for one in drawn if one.cancel is not None]
    load = [*drawn[:20], *refused[:2], *leaving[:4], *probes]
    before = take_holdings(engine)
    soak = run(load)
    after = take_holdings(engine)
    assert [one.fault for one in soak.outcomes if one.fault] == []
    ends = Counter(one.ended for one in soak.outcomes)
    assert ends.keys() >= {"length", "abort", "refused"} and ends[""] == ends["error"] == 0
    assert [one.token_ids for one in soak.outcomes[-2:]] == alone and all(alone)
    print(ends, after)
    left = after.occupancy
    assert left.preemptions > before.occupancy.preemptions and soak.most_waiting > 12
    assert (left.waiting, left.running, left.steps, left.pages_held, left.pages_releasing) == (0, 0, 0, 0, 0)
    assert left.free_rows == limits.max_batch and left.pages == 8 >= left.pages_kept > 0
    assert (after.objects, after.fds) == (before.objects, before.fds)
    assert engine.reset_prefix_cache() and engine.occupancy.pages_kept == 0
    engine.add_request("one more", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=9))
    engine.step()
    held = take_holdings(engine)
    assert held.objects > after.objects and held.occupancy.running == held.occupancy.pages_held == 1  # it is seen


# --- what an engine may lose ----------------------------------------------------------------------------------------


@dataclass
class Careless:
    """An engine that serves everybody a token a step, but for what it is told to get wrong."""

    fault: str = ""
    open: dict[str, Any] = field(default_factory=dict)

    def add_requests(self, requests: Sequence[Any]) -> None:
        (request,) = requests
        ids = request.prompt["prompt_token_ids"]
        if (max(ids) >= LIMITS.vocab_size) != (self.fault == "takes and refuses the wrong ones"):
            raise RequestError("a bad token")
        self.open[request.request_id] = request, []

    @property
    def occupancy(self) -> Occupancy:
        return Occupancy(0, len(self.open), 0, 8, 0, 0, 0, 9, 0)

    def has_unfinished(self) -> bool:
        return bool(self.open)

    def idle(self) -> bool:
        return False

    def abort(self, request_id: str) -> RequestOutput | None:
        known = self.open.get(request_id)
        if self.fault != "goes on":
            self.open.pop(request_id, None)
        return None if known is None else self._output(*known, "abort")

    def step(self) -> list[RequestOutput]:
        outputs = []
        for name, (request, made) in list(self.open.items()):
            if self.fault == "forgets" and name == "0":
                continue
            made.append(7)
            ends = len(made) == request.params.max_tokens - (self.fault == "stops early")
            if ends:
                del self.open[name]
            reason = ("error" if self.fault == "breaks" else "length") if ends else None
            outputs.append(self._output(request, made, reason))
        return outputs

    def _output(self, request: Any, made: list[int], reason: Any) -> RequestOutput:
        sequence = CompletionOutput(0, "", list(made), finish_reason=reason)
        prompt = request.prompt["prompt_token_ids"]
        return RequestOutput(request.request_id, None, prompt, [sequence], reason is not None)


def found_with(fault: str, *requests: SoakRequest) -> list[tuple[str, str]]:
    """How each request ended, and what is said of it; a look at the clock takes a second."""
    ticks = iter(range(10**9))
    engine: Any = Careless(fault)
    soak = run_soak(engine, requests, longest=LIMITS.max_seq_len, clock=lambda: float(next(ticks)), sleep=print)
    return [(one.ended, one.fault) for one in soak.outcomes]


FOUR = SamplingParams(max_tokens=4)
PLAIN = SoakRequest((1, 2), FOUR)
BAD = SoakRequest((1, LIMITS.vocab_size), FOUR, refused=True)
LEAVES = SoakRequest((1, 2), FOUR, cancel=Cancel(2, twice=False))
TWICE = SoakRequest((1, 2), FOUR, cancel=Cancel(0, twice=True))


def test_an_engine_without_a_fault() -> None:
    assert found_with("", PLAIN, BAD, LEAVES, TWICE) == [("length", ""), ("refused", ""), ("abort", ""), ("abort", "")]


def test_whoever_leaves_too_late_is_no_fault() -> None:
    late = SoakRequest((1, 2), SamplingParams(max_tokens=1), cancel=Cancel(3, twice=True))
    assert found_with("", late, PLAIN) == [("length", ""), ("length", "")]


@pytest.mark.parametrize(
    ("fault", "request_", "ended", "said"),
    [
        ("forgets", PLAIN, "", ""),
        ("breaks", PLAIN, "error", "ended by 'error'"),
        ("stops early", PLAIN, "length", "ended with 3 tokens by its length, which is 4"),
        ("takes and refuses the wrong ones", PLAIN, "refused", "was refused: "),
        ("takes and refuses the wrong ones", BAD, "length", "was not refused"),
        ("goes on", LEAVES, "abort", "was reported after its end by 'abort'"),
        ("goes on", TWICE, "abort", "could be cancelled twice"),
    ],
)
def test_a_fault_is_seen(fault: str, request_: SoakRequest, ended: str, said: str) -> None:
    (found,) = found_with(fault, request_)
    assert found[0] == ended and said in found[1] and bool(said) == bool(found[1])


@pytest.mark.parametrize(
    ("fields", "changes", "said"),
    [
        ({}, {"prompt_token_ids": [1, 3]}, "of another one"),
        ({"n": 2}, {}, "the number of sequences of another one"),
        ({"prompt_logprobs": 1}, {}, "0 log-probabilities for 2 tokens of a prompt"),
        ({"logprobs": 1}, {}, "0 log-probabilities for 4 tokens"),
        ({}, {}, ""),
    ],
)
def test_an_output_that_is_not_what_was_asked_for(fields: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    output = RequestOutput("0", None, [1, 2], [CompletionOutput(0, "", [7] * 4, finish_reason="length")], True)
    found = output_fault(replace(PLAIN, params=SamplingParams(max_tokens=4, **fields)), replace(output, **changes), 99)
    assert said in found and bool(said) == bool(found)
    short = replace(output, outputs=[CompletionOutput(0, "", [7], finish_reason="stop")])
    assert "stopped with 1 tokens, of 2 to 4" in output_fault(
        replace(PLAIN, params=SamplingParams(max_tokens=4, min_tokens=2)), short, 99
    )
