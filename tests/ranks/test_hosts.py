"""A mesh on several hosts, which are processes of this machine: its tokens, and faults that end all ranks."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from drawn import drawn
from killed_ranks import rank_0_killed
from local_hosts import LocalHosts
from run_seed import again, run_seed
from silence import silence
from thread_ranks import generated, is_gone, thread_engine

from ingot import LLM, SamplingParams
from ingot.ir.errors import RankError
from ingot.runtime.ranks.leader import Leader
from ingot.serve import executor_backend

pytestmark = pytest.mark.xdist_group("ranks")
# In which all ranks end after a fault. On an idle machine a fault takes a second, a silent connection three, and a
# stopped process two; the rest is for a busy one.
SECONDS = 15.0
PROMPTS = [[5, 6, 7, 8], [9], list(range(20, 70))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.2, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=4, logit_bias={3: 2.0}, max_tokens=12, ignore_eos=True),
]
# The mesh, and the ranks of each host.
MESHES = (("tp=2", (1, 1)), ("pp=2", (1, 1)))
LARGER = (("pp=2 tp=2", (2, 2)), ("pp=2 tp=2", (1, 2, 1)), ("pp=3", (1, 1, 1)))
FAULTS = ("agent", "rank", "cut", "silent", "stop")


@contextmanager
def opened(path: Path, hosts: LocalHosts, patch: pytest.MonkeyPatch) -> Iterator[tuple[LLM, Leader]]:
    """An LLM whose ranks are on hosts, and its leader."""
    patch.setattr(executor_backend, "place_of", lambda backend: hosts)
    llm = LLM(path, num_kv_pages=30, distributed_executor_backend="ray")
    leader = llm.loaded.leader
    assert leader is not None
    try:
        yield llm, leader
    finally:
        leader.close()


def strike(fault: str, rank: int, leader: Leader, hosts: LocalHosts) -> str:
    """Cause a fault, and return the pattern of the error that it must have."""
    (other,) = (one for one in leader._processes.others if rank in one.host.ranks)
    link: Any = other
    if fault in ("rank", "stop"):
        os.kill(leader.process_ids[rank], signal.SIGKILL if fault == "rank" else signal.SIGSTOP)
        return rf"rank {rank} \(.*\) on 127.0.0.1 " + ("ended: .*SIGKILL" if fault == "rank" else "is stopped")
    if fault == "agent":
        hosts.agents[next(i for i, one in enumerate(hosts.hosts) if rank in one.ranks)].kill()
    elif fault == "cut":
        link._connection.shutdown(socket.SHUT_RDWR)
    else:
        silence(link._connection)
    first = other.host.ranks[0]
    how = "broke: .*timed out" if fault == "silent" else "(has ended|broke)"
    return rf"rank {first} \(.*\) on 127.0.0.1 is lost: the connection to its host {how}"


def check(path: Path, counts: tuple[int, ...], fault: str, draw: random.Random, wanted: Any, folder: Path) -> None:
    """Tokens are those of one process; then a fault at a random step ends all ranks, and nothing is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        hosts = LocalHosts(*counts)
        with opened(path, hosts, patch) as (llm, leader):
            engine: Any = llm.llm_engine
            for _ in range(2):
                assert [list(one.token_ids) for one in generated(engine, PROMPTS, PARAMS)] == wanted
            assert all(leader.busy[rank] > 0 for rank in leader.busy), "every rank computed"
            check_timeline(llm)
            remote = [rank for host in hosts.hosts[1:] for rank in host.ranks]
            rank, at = draw.choice(remote), draw.randint(1, 25)
            engine.add_request("long", {"prompt_token_ids": [4, 5]}, SamplingParams(max_tokens=60, ignore_eos=True))
            for _ in range(at):
                engine.step()
            pids = [*leader.process_ids.values(), *(agent.pid for agent in hosts.agents.values())]
            begin = time.monotonic()
            pattern = strike(fault, rank, leader, hosts)
            with pytest.raises(RankError, match=pattern):
                while time.monotonic() - begin < SECONDS:
                    engine.step()
            seconds = time.monotonic() - begin
            assert seconds < SECONDS, again((fault, rank, at))
            while time.monotonic() - begin < SECONDS and not all(map(is_gone, pids)):
                time.sleep(0.02)
            assert all(map(is_gone, pids)), "no process is left"
            print(
                f"{path.name} {counts} {fault}: error after {seconds:.2f} s, end after {time.monotonic() - begin:.2f}"
            )
        assert hosts.released == 1 and not list(folder.iterdir()), "no folder is left"


def check_timeline(llm: LLM) -> None:
    """Phases of ranks on other hosts are reported by the clock of this one."""
    end = llm.timings["ready"]
    for spans in llm.timeline.values():
        assert {one.name for one in spans} >= {"connect", "weights", "bind"}
        assert all(-60 <= one.begin <= one.end <= end + 60 for one in spans)


def one_process(artifact: Callable[[str, str], Path]) -> list[list[int]]:
    with thread_engine(artifact("llama", ""), num_pages=30) as engine:
        return [list(one.token_ids) for one in generated(engine, PROMPTS, PARAMS)]


CASES = [
    *drawn(1, [(*mesh, fault) for mesh in MESHES for fault in FAULTS]),
    *[pytest.param(*mesh, fault, marks=pytest.mark.slow) for mesh in LARGER for fault in FAULTS],
]


@pytest.mark.parametrize(("mesh", "counts", "fault"), CASES, ids=str)
def test_tokens_and_a_fault(
    mesh: str, counts: tuple[int, ...], fault: str, artifact: Callable[[str, str], Path], tmp_path: Path
) -> None:
    draw = random.Random(f"{run_seed()} {mesh} {fault}")
    check(artifact("llama", mesh), counts, fault, draw, one_process(artifact), tmp_path)


@pytest.mark.slow
def test_a_rank_beside_rank_0_ends_those_of_other_hosts(
    artifact: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = LocalHosts(2, 2)
    with opened(artifact("llama", "pp=2 tp=2"), hosts, monkeypatch) as (llm, leader):
        pids = [*leader.process_ids.values(), hosts.agents[1].pid]
        begin = time.monotonic()
        os.kill(leader.process_ids[1], signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 1 \(pp=0 tp=1\) ended: .*SIGKILL"):
            while time.monotonic() - begin < SECONDS:
                llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=2))
        while time.monotonic() - begin < SECONDS and not all(map(is_gone, pids)):
            time.sleep(0.02)
        assert all(map(is_gone, pids))


@pytest.mark.slow
def test_hosts_end_with_rank_0(artifact: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Rank 0 is killed, and cannot tell the others."""
    script = (
        "import sys, time\nfrom local_hosts import LocalHosts\nfrom ingot.serve import executor_backend\n"
        "hosts = LocalHosts(2, 2)\nexecutor_backend.place_of = lambda backend: hosts\nfrom ingot import LLM\n"
        "llm = LLM(sys.argv[1], num_kv_pages=30, distributed_executor_backend='ray')\n"
        "print(*llm.loaded.leader.process_ids.values(), hosts.agents[1].pid, flush=True)\ntime.sleep(100)\n"
    )
    command = [sys.executable, "-c", script, str(artifact("llama", "pp=2 tp=2"))]
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    with rank_0_killed(command, env, 4, SECONDS):
        assert not list(tmp_path.iterdir()), "no folder is left"
