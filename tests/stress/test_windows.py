"""Caches that give back what their windows no longer read: tokens are those of caches that keep everything, bitwise."""

from pathlib import Path

import pytest
import torch
from drawn import drawn
from window_artifacts import poison as poison_all

from ingot import LLM, SamplingParams
from ingot.ir.cache.groups import CacheGroup
from ingot.runtime.loading.loader import load_artifact

pytestmark = [pytest.mark.xdist_group("windows"), pytest.mark.one_in_file(3)]

# Pages in which four sequences do not fit side by side: of up to 10 each, or of 3 where all layers have the window.
SMALL = {"gemma3_text-new": 14, "mistral-window": 8}
LIMITS = {"max_batch": 4, "max_tokens": 24, "max_seq_len": 160, "deterministic": True}
WINDOW = 20


def prompts() -> list[list[int]]:
    """Longer than a step, than the window and than a page; some begin alike."""
    generator = torch.Generator().manual_seed(5)
    ones = [torch.randint(0, 60, (length,), generator=generator).tolist() for length in (90, 3, 41, 70, 17, 110)]
    return [*ones, [*ones[0], 7, 8], [*ones[0][:64], 9], ones[5][:100]]


def tokens(artifact: Path, pages: int | None, *, poison: bool = False, caching: bool = True) -> list[list[int]]:
    llm = LLM(artifact, num_kv_pages=pages, enable_prefix_caching=caching)
    scheduler = llm._engine._scheduler
    if poison:
        poison_all(llm)
    params = [
        SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=40, ignore_eos=True)
        for index in range(len(prompts()))
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], params)
    assert (scheduler.num_preemptions > 0) == (pages is not None)
    assert scheduler.pages.num_held == 0
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("caching", drawn(1, [True, False]), ids=["cached", "uncached"])
def test_tokens_are_those_of_whole_caches(model: str, both: tuple[Path, Path], caching: bool) -> None:
    windows, whole = both
    small = SMALL[model]
    expected = tokens(whole, None, caching=False)
    assert tokens(windows, None, poison=True, caching=caching) == expected
    assert tokens(windows, small, poison=True, caching=caching) == expected


def test_groups_are_in_the_plan(both: tuple[Path, Path]) -> None:
    windows, whole = (load_artifact(one) for one in both)
    assert set(whole.plan.memory.groups) == {"full"}
    found = windows.plan.memory.groups
    assert set(found) == {state.group for state in windows.plan.states.values() if state.kind == "paged_kv"}
    window = found[f"window_{WINDOW}"]
    assert window.pages_per_sequence == CacheGroup.named(f"window_{WINDOW}").pages_between_steps(160, 16) == 3
    assert windows.pages[f"window_{WINDOW}"] == 4 * 3 + window.pages_per_step + 1


def test_a_second_turn_finds_its_prefix(both: tuple[Path, Path]) -> None:
    llm = LLM(both[0])
    first = [3 * place % 60 for place in range(96)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": first}], params)
    second = [*first, *answer.outputs[0].token_ids, 1, 2, 3]
    (answer,) = llm.generate([{"prompt_token_ids": second}], params)
    assert answer.num_cached_tokens == 96, "of 112 tokens the last was never fed"
