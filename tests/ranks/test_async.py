"""A mesh behind the server's engine process: tokens, and a rank that is killed while no request runs."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from thread_ranks import generated, is_gone, thread_engine

from ingot import AsyncLLM, SamplingParams

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, detokenize=False)


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_server_starts_its_ranks_again(artifact: Callable[[str, str], Path]) -> None:
    with thread_engine(artifact("llama", "")) as engine:
        (wanted,) = generated(engine, [[5, 6, 7]], [GREEDY])

    others = children_of(os.getpid())  # of other tests of this worker, such as the server that they share

    async def serve() -> None:
        async with AsyncLLM(artifact("llama", "tp=2"), num_kv_pages=30, pipeline_parallel_size=1) as llm:

            async def tokens() -> list[int]:
                return [
                    list(one.outputs[0].token_ids)
                    async for one in llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)
                ][-1]

            assert await tokens() == list(wanted.token_ids)
            (engine,) = (one for one in children_of(os.getpid()) if one not in others)
            (rank,) = children_of(engine)
            begin = time.monotonic()
            os.kill(rank, signal.SIGKILL)
            while not is_gone(engine):
                assert time.monotonic() - begin < 20, "the engine ends, though no request runs"
                await asyncio.sleep(0.05)
            while llm.engine.state != "ready":
                assert time.monotonic() - begin < 60
                await asyncio.sleep(0.1)
            assert await tokens() == list(wanted.token_ids)

    asyncio.run(serve())
