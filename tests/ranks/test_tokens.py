"""The tokens of a mesh are those of one process: tensor parallelism, pipeline stages, and both."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from drawn import drawn
from thread_ranks import generated, thread_engine

from ingot import SamplingParams
from ingot.ir.artifact.plan import PlanFile

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in_file(3)]
MODELS = ("llama", "gemma3", "qwen3_moe", "deepseek_v2", "llama_mla", "qwen3_mla", "qwen3-int8")
CASES = list(itertools.product(MODELS, ("tp=2", "pp=2", "pp=2 tp=2")))
# Longer than a step, so that a prompt is cut; a shared prefix; more requests than a step has rows.
LONG = [(11 * place + 5) % 300 for place in range(52)]
PROMPTS = [LONG, [*LONG[:40], 7], [9], [5, 6, 7, 8], list(range(20, 41)), [301, 2]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=3, prompt_logprobs=1),
    SamplingParams(temperature=0.9, seed=3, max_tokens=15, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=4, top_k=20, max_tokens=12, presence_penalty=0.4, logit_bias={3: 4.0}),
    SamplingParams(temperature=1.0, seed=5, top_p=0.8, max_tokens=11, allowed_token_ids=list(range(50, 90))),
    SamplingParams(temperature=0.8, seed=6, min_p=0.05, max_tokens=13, min_tokens=13),
]


@pytest.mark.parametrize(("model", "mesh"), drawn(2, CASES), ids=str)
def test_tokens_are_those_of_one_process(model: str, mesh: str, artifact: Callable[[str, str], Path]) -> None:
    with thread_engine(artifact(model, ""), num_pages=30) as engine:
        wanted = generated(engine, PROMPTS, PARAMS)
    with thread_engine(artifact(model, mesh), num_pages=30) as engine:
        found = generated(engine, PROMPTS, PARAMS)
        again = generated(engine, PROMPTS, PARAMS)
        assert engine.prefix_cache_stats.hits > 0, "the second time, prompts come from cached pages"
    assert [list(one.token_ids) for one in found] == [list(one.token_ids) for one in wanted]
    assert [list(one.token_ids) for one in again] == [list(one.token_ids) for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(abs(mine[token].logprob - theirs[token].logprob) < 1e-3 for token in mine)


def test_preempted_requests_resume(artifact: Callable[[str, str], Path]) -> None:
    """Few pages: requests lose theirs and are computed again, with token counts that all ranks recompute."""
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=30, frequency_penalty=0.5) for seed in range(4)]
    prompts = [[seed + 3] * 9 for seed in range(4)]
    answers = []
    for mesh in ("", "pp=2 tp=2"):
        with thread_engine(artifact("llama", mesh), num_pages=6) as engine:
            answers.append([list(one.token_ids) for one in generated(engine, prompts, params)])
            assert engine.prefix_cache_stats.recomputed > 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize("mesh", ["pp=2", "pp=3"])
def test_steps_that_the_engine_gives_up(
    mesh: str, artifact: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error between steps leaves steps in flight whose tokens no caller reads: later steps get none of them."""
    with thread_engine(artifact("llama", ""), num_pages=30) as engine:
        wanted = [list(one.token_ids) for one in generated(engine, PROMPTS, PARAMS)]
    with thread_engine(artifact("llama", mesh), num_pages=30) as engine:
        for stop in (1, 2, 3, 7):
            for index in range(5):
                engine.add_request(f"{index}", {"prompt_token_ids": [index, 7]}, PARAMS[0])
            for _ in range(stop):
                engine.step()
            with monkeypatch.context() as patch:
                patch.setattr(type(engine._scheduler), "schedule", lambda self: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    engine.step()
            assert not engine.has_unfinished()
            engine.add_request("alone", {"prompt_token_ids": PROMPTS[3]}, PARAMS[3])
            engine.step()
            engine.abort("alone")
        assert [list(one.token_ids) for one in generated(engine, PROMPTS, PARAMS)] == wanted


def test_stages_send_what_the_others_receive(artifact: Callable[[str, str], Path]) -> None:
    """Each value that a stage receives, its source sends, in the same order; nothing else is sent."""
    file = PlanFile.model_validate_json((artifact("llama", "pp=2 tp=2") / "plan.json").read_text())
    assert file.ranks == ("stage 0", "stage 0", "stage 1", "stage 1")
    plans = [plans.plans["main"] for plans in file.positions.values()]
    for buckets in zip(*(plan.buckets for plan in plans), strict=True):
        shared = [bucket.transfers for bucket in buckets]
        for one, other in itertools.permutations(range(len(shared)), 2):
            assert shared[one] is not None and shared[other] is not None
            sent = [item.name for item in shared[one].sent if item.stage == other]
            assert sent == [item.name for item in shared[other].received if item.stage == one] != []
