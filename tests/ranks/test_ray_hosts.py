"""A mesh on two nodes of a Ray cluster, both on this machine: tokens, faults, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from killed_ranks import rank_0_killed
from thread_ranks import generated, is_gone, thread_engine

from ingot import LLM, AsyncLLM, SamplingParams
from ingot.ir.errors import RankError, TargetError

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]
SECONDS = 15.0  # for a fault on a busy machine
PROMPTS = [[5, 6, 7, 8], [9], list(range(20, 70))]
PARAMS = [SamplingParams(temperature=0.8, seed=seed, max_tokens=12, ignore_eos=True) for seed in range(3)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with a CPU each, which this process has joined."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    made.wait_for_nodes()
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def reserved() -> list[str]:
    """The states of placement groups that are not removed."""
    from ray.util import placement_group_table

    states = [one["state"] for one in placement_group_table().values()]
    return [state for state in states if state != "REMOVED"]


def free_cpus() -> float:
    import ray

    return float(ray.available_resources().get("CPU", 0))


def check_nothing_is_left(pids: list[int]) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and (reserved() or free_cpus() < 2 or not all(map(is_gone, pids))):
        time.sleep(0.05)
    assert not reserved() and free_cpus() == 2 and all(map(is_gone, pids))


def wanted(artifact: Callable[[str, str], Path]) -> list[list[int]]:
    with thread_engine(artifact("llama", ""), num_pages=30) as engine:
        return [list(one.token_ids) for one in generated(engine, PROMPTS, PARAMS)]


@pytest.mark.parametrize(("mesh", "fault"), [("tp=2", "rank"), ("pp=2", "actor"), ("pp=2", "close")])
def test_tokens_and_an_end(mesh: str, fault: str, artifact: Callable[[str, str], Path], cluster: Any) -> None:
    import ray
    from ray.util import placement_group_table

    llm = LLM(artifact("llama", mesh), num_kv_pages=30, distributed_executor_backend="ray")
    leader: Any = llm.loaded.leader
    try:
        assert reserved() == ["CREATED"] and len(leader._processes.hosts) == 2
        (nodes,) = (one["bundles_to_node_id"] for one in placement_group_table().values() if one["state"] == "CREATED")
        assert nodes[0] == ray.get_runtime_context().get_node_id() != nodes[1], "rank 0's bundle is on its node"
        pids = list(leader.process_ids.values())
        engine: Any = llm.llm_engine
        assert [list(one.token_ids) for one in generated(engine, PROMPTS, PARAMS)] == wanted(artifact)
        if fault != "close":
            begin = time.monotonic()
            if fault == "rank":
                os.kill(pids[0], signal.SIGKILL)
            else:
                ray.kill(leader._processes.release.args[1]._agents[0])
            with pytest.raises(RankError, match=rf"rank 1 \({mesh[:2]}=1\) on \d+\.\d+\.\d+\.\d+ (ended|is lost): "):
                while time.monotonic() - begin < SECONDS:
                    llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=2))
            print(f"{fault}: the error came after {time.monotonic() - begin:.2f} s")
    finally:
        leader.close()
    check_nothing_is_left(pids)


def test_rank_0_is_killed(artifact: Callable[[str, str], Path], cluster: Any) -> None:
    """It cannot give anything back."""
    script = (
        "import sys, time\nfrom ingot import LLM\n"
        "llm = LLM(sys.argv[1], num_kv_pages=30, distributed_executor_backend='ray')\n"
        "print(*llm.loaded.leader.process_ids.values(), flush=True)\ntime.sleep(100)\n"
    )
    command = [sys.executable, "-c", script, str(artifact("llama", "tp=2"))]
    env = {**os.environ, "RAY_ADDRESS": cluster.address}
    with rank_0_killed(command, env, 1, SECONDS, lambda: reserved() == ["CREATED"]) as pids:
        check_nothing_is_left(pids)


def test_a_cluster_that_is_too_small(artifact: Callable[[str, str], Path], cluster: Any) -> None:
    begin = time.monotonic()
    with pytest.raises(TargetError, match="the mesh pp=2 tp=2 needs 4 CPUs, and the Ray cluster has 2 free") as caught:
        LLM(artifact("llama", "pp=2 tp=2"), num_kv_pages=30, distributed_executor_backend="ray")
    assert time.monotonic() - begin < 5, "it does not wait"
    assert caught.value.where.count("has 1 free of 1") == 2
    check_nothing_is_left([])


def test_an_engine_process(artifact: Callable[[str, str], Path], cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `ingot serve` runs it: the process of the engine joins the cluster, and leaves it."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)

    async def run() -> list[int]:
        options: Any = {"num_kv_pages": 30, "distributed_executor_backend": "ray"}
        async with AsyncLLM(artifact("llama", "tp=2"), **options) as llm:
            async for output in llm.generate({"prompt_token_ids": PROMPTS[0]}, PARAMS[0]):
                last = output
            assert reserved() == ["CREATED"]
        return list(last.outputs[0].token_ids)

    assert asyncio.run(run()) == wanted(artifact)[0]
    check_nothing_is_left([])


def test_no_cluster(artifact: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def init(**options: Any) -> None:
        assert options["address"] == "auto"
        raise ConnectionError("Could not find any running Ray instance.\nMore.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(TargetError, match="no Ray cluster runs on this host: Could not find any") as caught:
        LLM(artifact("llama", "tp=2"), distributed_executor_backend="ray")
    assert "ray start --head" in caught.value.hint
