"""Pages that sequences share on a GPU, written by kernels of prompts and read by captured graphs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_model import LIMITS, MODEL

from ingot import LLM, RequestOutput, SamplingParams, compile_model
from ingot.ir.numerics.tolerances import compare

pytestmark = pytest.mark.gpu
# Layers of a float32 model amplify rounding: the table's tolerance is for one op.
DEPTH_FACTOR = 10.0
PLAIN = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
PARAMS = [PLAIN, replace(PLAIN, repetition_penalty=1.2)] * 13


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    compile_model(MODEL.write(folder / "checkpoint"), folder / "a.ingot", target="cuda", **LIMITS)
    return folder / "a.ingot"


def prompts() -> list[Any]:
    """Prompts that begin alike for up to six pages, one of them wholly there before, in waves."""
    draw = random.Random(4)
    trunk = [draw.randrange(512) for _ in range(100)]
    tails = [[draw.randrange(512) for _ in range(draw.randrange(30))] for _ in range(24)]
    return [trunk, trunk[:96], *([*trunk[: draw.choice([15, 16, 40, 96, 97])], *tail, 7] for tail in tails)]


def chosen(output: RequestOutput) -> torch.Tensor:
    """The log-probability of each token."""
    (sequence,) = output.outputs
    assert sequence.logprobs is not None
    return torch.tensor(
        [entry[token].logprob for entry, token in zip(sequence.logprobs, sequence.token_ids, strict=True)]
    )


@pytest.mark.parametrize("num_pages", [400, 24], ids=["ample", "small"])
def test_shared_pages_give_what_pages_of_their_own_give(made: Path, num_pages: int) -> None:
    alone = LLM(made, num_kv_pages=400, enable_prefix_caching=False).generate(prompts(), PARAMS)
    llm = LLM(made, num_kv_pages=num_pages, max_num_seqs=6)
    shared = llm.generate(prompts(), PARAMS)
    stats = llm.prefix_cache_stats
    print(stats, llm._engine._scheduler.num_preemptions)
    assert stats.hits >= 500 and shared[1].num_cached_tokens in (80, 0)
    assert (llm._engine._scheduler.num_preemptions > 0) == (num_pages == 24)
    agree(shared, alone)


@pytest.mark.parametrize("graphs", ["idle", "none"])
@pytest.mark.parametrize("sequences", [12, 90])
def test_prefixes_that_are_read_once_give_what_each_sequence_reads(made: Path, sequences: int, graphs: Any) -> None:
    """Of prompts without penalties, however little it saves."""
    asked = (prompts() * 4)[:sequences]
    alone = LLM(made, num_kv_pages=1600, disable_cascade_attn=True).generate(asked, PLAIN)
    llm = LLM(made, num_kv_pages=1600, cuda_graphs=graphs)
    llm._engine._scheduler._least_shared = 1
    agree(llm.generate(asked, PLAIN), alone)
    captured = llm.loaded.executor.captured.shared
    assert bool(captured) == (graphs == "idle"), captured


def agree(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """The same log-probabilities as long as the tokens are the same, and they are for most of the way."""
    compared = 0
    for one, other in zip(found, expected, strict=True):
        ids = one.outputs[0].token_ids, other.outputs[0].token_ids
        same = next((place for place in range(len(ids[1])) if ids[0][place] != ids[1][place]), len(ids[1]))
        problem = compare(chosen(one)[:same], chosen(other)[:same], torch.float32, factor=DEPTH_FACTOR)
        assert problem is None, f"request {one.request_id}: {problem}"
        compared += same
    assert compared >= len(found) * 40 * 3 // 4, f"only {compared} steps had the same tokens before them"
