"""Scratch pages beside the backends and graphs that an artifact has by default: the bits of a pool that is ample.

`tests/stress/test_scratch_pages.py` compares deterministic artifacts with caches that keep everything.
"""

import gc
from pathlib import Path

import pytest
import torch
from tiny import TINY
from window_artifacts import poison

from ingot import LLM, SamplingParams, compile_model
from ingot.ir.cache.groups import CacheGroup
from ingot.runtime.cuda.graphs.choice import Capture

pytestmark = pytest.mark.gpu
WINDOW = 40
GROUP = CacheGroup.named(f"window_{WINDOW}")
BETWEEN = GROUP.pages_between_steps(500, 16)
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
# What kernels of a GPU take: heads of 64 in bfloat16.
CONFIG = {"sliding_window": WINDOW, "max_position_embeddings": 512, "head_dim": 64, "torch_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    checkpoint = TINY["gemma3_text-new"].write(folder / "checkpoint", **CONFIG)
    limits = {"max_batch": 8, "max_tokens": 256, "max_seq_len": 500}
    compile_model(checkpoint, folder / "a.ingot", target="cuda", **limits)
    return folder / "a.ingot"


def served(artifact: Path, pages: int | None, graphs: Capture) -> tuple[list[list[int]], list[float], int]:
    """Tokens of prompts that are served one after the other, their log-probabilities, and scratch pages taken."""
    llm = LLM(artifact, enable_prefix_caching=False, cuda_graphs=graphs)
    poison(llm)
    (pool,) = (pool for _, group, pool in llm._engine._scheduler.pages.windows if group == GROUP)
    if pages is not None:
        pool.allocate(pool.num_free - pages)
    taken, take = [], pool.take_scratch
    pool.take_scratch = lambda count: taken.append(count) or take(count)  # type: ignore[method-assign,func-returns-value]
    generator = torch.Generator().manual_seed(3)
    found: list[list[int]] = []
    logprobs: list[float] = []
    for length in (480, 256, 61, 400):
        prompt = torch.randint(0, 60, (length,), generator=generator).tolist()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], PARAMS)
        (sequence,) = output.outputs
        found.append(sequence.token_ids)
        assert sequence.logprobs is not None
        logprobs += [entry[one].logprob for entry, one in zip(sequence.logprobs, sequence.token_ids, strict=True)]
    del llm
    gc.collect()
    return found, logprobs, sum(taken)


@pytest.mark.parametrize("graphs", ["none", "all"])
def test_a_small_pool_gives_the_bits_of_an_ample_one(made: Path, graphs: Capture) -> None:
    ample, small = served(made, None, graphs), served(made, 2 * BETWEEN, graphs)
    assert ample[2] == 0 and small[2] > 30
    assert small[:2] == ample[:2]
