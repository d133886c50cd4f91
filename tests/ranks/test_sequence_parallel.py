"""Ranks that split the rows of long steps return the bits of ranks that do not: tokens and log-probabilities."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drawn import drawn, drawn_in_one_of
from thread_ranks import answered, thread_engine
from tiny import TINY

from ingot import LLM, SamplingParams, compile_model
from ingot.ir.artifact.plan import PlanFile

pytestmark = pytest.mark.xdist_group("ranks")
# Ops of Ingot's references compile for one bucket class, which has short steps too.
PASSES = "default,sequence-parallel{steps=all}"
# Steps of odd numbers of tokens: 37 at most, then the rest of a prompt, and single tokens.
PROMPTS = [[(11 * place + 5) % 300 for place in range(51)], [9], list(range(20, 41)), [301, 2, 7]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=0.9, seed=3, max_tokens=7, repetition_penalty=1.2, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=11, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.7, seed=4, top_k=20, max_tokens=8, presence_penalty=0.4, prompt_logprobs=1),
]
MODELS = ("llama", "gemma3", "qwen3_moe", "deepseek_v2", "qwen3-int8")


def answers(engine: Any) -> list[Any]:
    """Tokens, and the log-probabilities of tokens and of prompts, with all bits."""
    found = []
    for output in answered(engine, PROMPTS, PARAMS):
        completion = output.outputs[0]
        found.append((list(completion.token_ids), list(completion.logprobs or ()), list(output.prompt_logprobs or ())))
    assert [len(prompt) for *_, prompt in found] == [51, 0, 0, 3] and [len(one) for _, one, _ in found] == [9, 7, 11, 0]
    return found


def by_threads(path: Path) -> list[Any]:
    with thread_engine(path, num_pages=30) as engine:
        return answers(engine)


def by_processes(path: Path) -> list[Any]:
    llm = LLM(path, num_kv_pages=30)
    assert llm.loaded.leader is not None
    try:
        return answers(llm.llm_engine)
    finally:
        llm.loaded.leader.close()


@pytest.mark.parametrize(("model", "mesh"), drawn(1, itertools.product(MODELS, ("tp=2", "pp=2 tp=2"))), ids=str)
def test_bits_are_those_of_all_reduces(model: str, mesh: str, artifact: Callable[..., Path]) -> None:
    split = artifact(model, mesh, PASSES)
    assert "ingot.reduce_scatter" in (split / "plan.json").read_text(), "the pass ran"
    assert by_threads(split) == by_threads(artifact(model, mesh))


@pytest.mark.parametrize("model", drawn_in_one_of(2, ["llama", "gemma3", "qwen3_moe"]))
def test_two_processes(model: str, artifact: Callable[..., Path]) -> None:
    """Over gloo."""
    assert by_processes(artifact(model, "tp=2", PASSES)) == by_threads(artifact(model, "tp=2"))


def test_stages_send_rows_of_a_rank(artifact: Callable[..., Path]) -> None:
    """Between stages, a rank sends its rows of the residual stream to the rank that has the same ones."""
    file = PlanFile.model_validate_json((artifact("llama", "pp=2 tp=2", PASSES) / "plan.json").read_text())
    (bucket,) = file.positions["stage 1"].plans["main"].buckets
    assert bucket.transfers is not None
    types = [bucket.values[one.name].type for one in bucket.transfers.received]
    assert any(one.startswith("f32[T_tp,") for one in types) and not any(one.startswith("f32[T,") for one in types)


@pytest.mark.slow
def test_long_steps_alone(tmp_path: Path) -> None:
    """With kernels for few tokens, there are two bucket classes: prompts split rows, and decode adds up all of them."""
    limits = {"max_batch": 5, "max_tokens": 37, "max_seq_len": 80}
    options: dict[str, Any] = {**limits, "mesh": {"tp": 2}, "trace": "none"}
    TINY["llama-scaled"].write(tmp_path / "checkpoint", num_hidden_layers=2, intermediate_size=106, vocab_size=366)
    paths = [tmp_path / "plain.ingot", tmp_path / "split.ingot"]
    for path, passes in zip(paths, ("default", "default,sequence-parallel"), strict=True):
        compile_model(tmp_path / "checkpoint", path, passes=passes, **options)
    plan = PlanFile.model_validate_json((paths[1] / "plan.json").read_text()).of(0).plans["main"]
    split = {one.bucket.name: any("reduce_scatter" in call.target for call in one.instructions) for one in plan.buckets}
    assert split == {"decode": False, "extend": True}
    assert by_processes(paths[1]) == by_processes(paths[0])
