"""The steps on which instructions are judged: every kind of step occurs, and each token is fed once and in order."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ingot.debug.bisect.execution.steps import pages_needed, recorded_steps
from ingot.ir.artifact.plan import Plan, PlanFile

MAX_SEQ_LEN = 512


@pytest.fixture
def plan(artifact: Callable[..., Path]) -> Plan:
    text = (artifact("llama-biased", backend="reference") / "plan.json").read_text()
    return PlanFile.model_validate_json(text).of(0).plans["main"]


@pytest.mark.parametrize("pages", [4, 24, 80])
@pytest.mark.parametrize("lengths", [[1], [5, 40, 150], [3] * 12], ids=str)
def test_requests_are_fed_whole_in_every_kind_of_step(lengths: list[int], pages: int, plan: Plan) -> None:
    requests = [[(7 * seed + place) % 300 for place in range(length)] for seed, length in enumerate(lengths)]
    steps = recorded_steps(plan, requests, max_seq_len=MAX_SEQ_LEN, page_size=16, pages=pages)
    fed: dict[int, int] = {}
    slots: set[tuple[int, int]] = set()
    for step in steps:
        assert set(step) == set(plan.inputs)
        for sequence, row in enumerate(step["rows"].tolist()):
            place, count = fed.get(row, 0), int(step["q_lens"][sequence])
            assert int(step["starts"][sequence]) == (0 if place == 0 else -1)
            first = int(step["q_starts"][sequence])
            tokens = step["tokens"][first : first + count].tolist()
            wanted = [requests[row][at % len(requests[row])] for at in range(place, place + count)]
            assert tokens == wanted or tokens == [-1]
            for at in range(place, place + count):
                slot = int(step["page_table"][sequence, at // 16]), at % 16
                assert slot not in slots and slot[0] < pages, "pages are not shared, and of the pool"
                slots.add(slot)
            fed[row] = place + count
    sizes = [len(step["tokens"]) for step in steps]
    served = min(len(lengths), 8, pages)
    assert len(fed) == served
    if pages >= 80:
        decoded = {1, served} if max(lengths) > 54 else set(range(1, served + 1))
        assert decoded <= set(sizes) and max(sizes) >= 19 * served, "decode of every size, prefill"
        assert any(bool((step["q_lens"] == 1).any()) and bool((step["q_lens"] > 1).any()) for step in steps[1:]) or (
            served == 1
        )


def test_every_other_step_asks_for_all_there_is(plan: Plan) -> None:
    steps = recorded_steps(plan, [[1, 2, 3], [4, 5]], max_seq_len=MAX_SEQ_LEN, page_size=16, pages=20)
    for number, step in enumerate(steps):
        asks = bool((step["temperature"] > 0).any()) or bool((step["num_logprobs"] >= 0).any())
        assert not asks or number % 2 == 1
    everything = {name: torch.cat([step[name].flatten() for step in steps]) for name in plan.inputs}
    assert (everything["temperature"] > 0).any() and (everything["num_logprobs"] == 5).any()
    assert (everything["count_rows"] == 1).any() and (everything["banned"] > 0).any()
    assert (everything["tokens"] == -1).any() and (everything["prompt_ends"] > 0).any()
    again = recorded_steps(plan, [[1, 2, 3], [4, 5]], max_seq_len=MAX_SEQ_LEN, page_size=16, pages=20)
    assert all(torch.equal(one[name], other[name]) for one, other in zip(steps, again, strict=True) for name in one)


@pytest.mark.parametrize("lengths", [[1], [1, 17, 35, 23], [600] * 9], ids=str)
def test_the_pages_that_are_needed_hold_every_request_at_its_length(lengths: list[int], plan: Plan) -> None:
    requests = [[place % 300 for place in range(length)] for length in lengths]
    pages = pages_needed(requests, 16)
    fed = [
        sum(
            len(step["tokens"])
            for step in recorded_steps(plan, requests, max_seq_len=MAX_SEQ_LEN, page_size=16, pages=number)
        )
        for number in (pages, 10 * pages)
    ]
    assert fed[0] == fed[1] and pages <= 8 * 512 // 16 + 1


def test_no_request_outgrows_what_was_compiled_for(plan: Plan) -> None:
    steps = recorded_steps(plan, [[1], [2] * 40], max_seq_len=30, page_size=16, pages=20)
    fed = sum(
        torch.zeros(2, dtype=torch.int64).index_add(0, step["rows"].long(), step["q_lens"].long()) for step in steps
    )
    assert fed.tolist() == [30, 30]
