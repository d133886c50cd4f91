"""A mesh of processes: its tokens, and that a rank which is killed, stopped or fails ends all ranks with its name."""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn
from killed_ranks import rank_0_killed
from run_seed import again, run_seed
from thread_ranks import generated, is_gone, thread_engine

from ingot import LLM, SamplingParams
from ingot.ir.errors import IngotError, RankError
from ingot.runtime.ranks.leader import Leader

pytestmark = pytest.mark.xdist_group("ranks")
# In which all ranks end after a fault: a stopped process counts as gone after two, a silent one only after thirty. The
# rest takes a second on an idle machine, and several on a busy one.
SECONDS = 15.0
MESHES = ("tp=2", "pp=2", "pp=2 tp=2")
PROMPTS = [[5, 6, 7, 8], [9], list(range(20, 70))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.2, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=4, logit_bias={3: 2.0}, max_tokens=12, ignore_eos=True),
]
FAULTS = ("kill", "stop", "raise")


@contextmanager
def opened(path: Path) -> Iterator[tuple[LLM, Leader, dict[int, int]]]:
    """An LLM on a mesh, its leader, and the process id of each other rank."""
    llm = LLM(path, num_kv_pages=30)
    leader = llm.loaded.leader
    assert leader is not None
    try:
        yield llm, leader, leader.process_ids
    finally:
        leader.close()


def strike(fault: str, rank: int, leader: Leader, pids: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a rank fail now, or in the next step that is posted."""
    if fault == "raise":
        write = leader._steps._slots.write

        def spoiled(slot: Any, inputs: Any) -> slice:
            written = write(slot, inputs)
            slot[0] = 10**6  # a step with more tokens than its buffer
            return written

        monkeypatch.setattr(leader._steps._slots, "write", spoiled)
    else:
        os.kill(pids[rank], signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


def check_fault(path: Path, fault: str, draw: random.Random, monkeypatch: pytest.MonkeyPatch, wanted: Any) -> None:
    with opened(path) as (llm, leader, pids):
        check_timeline(llm)
        found = generated(llm.llm_engine, PROMPTS, PARAMS)
        assert [list(one.token_ids) for one in found] == wanted
        rank, at = draw.choice(sorted(pids)), draw.randint(1, 25)
        engine: Any = llm.llm_engine
        engine.add_request("long", {"prompt_token_ids": [4, 5]}, SamplingParams(max_tokens=60, ignore_eos=True))
        for _ in range(at):
            engine.step()
        begin = time.monotonic()
        strike(fault, rank, leader, pids, monkeypatch)
        with pytest.raises(RankError) as caught:
            while True:
                engine.step()
        assert time.monotonic() - begin < SECONDS, again((fault, rank, at))
        named = [f"rank {other}" for other in (sorted(pids) if fault == "raise" else [rank])]
        assert caught.value.what.startswith(tuple(named)), caught.value.what
        monkeypatch.undo()
        with pytest.raises(RankError) as later:
            llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=2))
        assert later.value.what == caught.value.what
        while time.monotonic() - begin < SECONDS and not all(map(is_gone, pids.values())):
            time.sleep(0.02)
        assert all(map(is_gone, pids.values())), "no process is left"


def check_timeline(llm: LLM) -> None:
    """Each rank says when it had each phase, and the others began before rank 0 read the artifact."""
    timeline = {rank: {one.name: one for one in spans} for rank, spans in llm.timeline.items()}
    manifest = timeline[0]["manifest"]
    for rank, spans in timeline.items():
        assert all(0 <= one.begin <= one.end for one in spans.values())
        assert spans.keys() >= {"connect", "plan", "weights", "connections", "bind", "manifest"}
        if rank:
            assert spans["start"].begin < manifest.begin and spans.keys() >= {"engine", "rank 0"}
            seconds = llm.timings[f"rank {rank} engine"]
            assert seconds == pytest.approx(spans["engine"].end - spans["engine"].begin)


def one_process(artifact: Callable[[str, str], Path]) -> list[list[int]]:
    with thread_engine(artifact("llama", ""), num_pages=30) as engine:
        return [list(one.token_ids) for one in generated(engine, PROMPTS, PARAMS)]


# One of two ranks in each run; each process takes seconds to import torch.
CASES = [
    *drawn(1, [(mesh, fault) for mesh in MESHES[:2] for fault in FAULTS]),
    *[pytest.param(MESHES[2], fault, marks=pytest.mark.slow) for fault in FAULTS],
]


@pytest.mark.parametrize(("mesh", "fault"), CASES, ids=str)
def test_a_fault_ends_all_ranks(
    mesh: str, fault: str, artifact: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the tokens of one process; then the fault, at a random step."""
    draw = random.Random(f"{run_seed()} {mesh} {fault}")
    check_fault(artifact("llama", mesh), fault, draw, monkeypatch, one_process(artifact))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_eight_ranks(artifact: Callable[[str, str], Path]) -> None:
    """Eight processes give the tokens of one: four stages with steps of their own, each of two ranks."""
    prompts, params = PROMPTS * 4, PARAMS * 4
    with thread_engine(artifact("llama-4-layers", ""), num_pages=60) as engine:
        wanted = [list(one.token_ids) for one in generated(engine, prompts, params)]
    with opened(artifact("llama-4-layers", "pp=4 tp=2")) as (llm, leader, pids):
        assert len(pids) == 7
        for _ in range(2):
            assert [list(one.token_ids) for one in generated(llm.llm_engine, prompts, params)] == wanted
        assert all(leader.busy.values()), "every rank computed"


@pytest.mark.slow
def test_rank_0_keeps_its_threads(artifact: Callable[[str, str], Path]) -> None:
    """Each rank computes with its part of the threads, and the process of rank 0 has as many as before for the rest."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with opened(artifact("llama", "tp=2")) as (llm, _, _):
            assert torch.get_num_threads() == 4
            seen: list[int] = []
            recorded(llm, seen)
            llm.generate({"prompt_token_ids": list(range(30))}, SamplingParams(max_tokens=2, ignore_eos=True))
            assert seen and set(seen) == {2}
            assert torch.get_num_threads() == 4
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def recorded(llm: LLM, seen: list[int]) -> None:
    """Record the number of torch's threads at each forward pass of rank 0."""
    executor: Any = llm.loaded.executor
    for bucket in (one for lane in executor._lanes for one in lane):
        begin = bucket.begin
        bucket.begin = lambda *given, begin=begin: (seen.append(torch.get_num_threads()), begin(*given))[1]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_faults(artifact: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(run_seed())
    wanted = one_process(artifact)
    for _ in range(int(os.environ.get("INGOT_RANK_FAULTS", "200"))):
        mesh, fault = draw.choice(MESHES), draw.choice(FAULTS)
        with monkeypatch.context() as patch:
            check_fault(artifact("llama", mesh), fault, draw, patch, wanted)


@pytest.mark.slow
def test_ranks_end_with_rank_0(artifact: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Rank 0 is killed, and cannot tell the others."""
    script = (
        "import sys, time\nfrom ingot import LLM\nllm = LLM(sys.argv[1], num_kv_pages=30)\n"
        "print(*llm.loaded.leader.process_ids.values(), flush=True)\ntime.sleep(100)\n"
    )
    command = [sys.executable, "-c", script, str(artifact("llama", "pp=2 tp=2"))]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with rank_0_killed(command, env, 3, SECONDS):
        assert not list(tmp_path.iterdir()), "no folder is left"


@pytest.mark.slow
def test_a_rank_that_cannot_load_is_named(artifact: Callable[[str, str], Path], tmp_path: Path) -> None:
    """A file that rank 1 alone reads is damaged: rank 0 loads its own part, and says what ended the other."""
    folder = tmp_path / "damaged.ingot"
    shutil.copytree(artifact("llama", "tp=2"), folder)
    (file,) = (folder / "weights" / "rank1").iterdir()
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(IngotError, match=r"rank 1 \(tp=1\) failed: the artifact is damaged") as caught:
        LLM(folder)
    assert "weights/rank1/00000.safetensors" in caught.value.what


@pytest.mark.slow
def test_an_interrupted_step_ends_the_mesh(
    artifact: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in rank 0's part of a step leaves the others in a collective: nothing can resume that."""
    from ingot.runtime.scheduling.round import Round

    with opened(artifact("llama", "tp=2")) as (llm, _, pids):

        def interrupted(self: Round, inputs: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Round, "launch", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=2))
        with pytest.raises(RankError, match=r"rank 0 \(tp=0\) failed in a step before: KeyboardInterrupt"):
            llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=2))
        begin = time.monotonic()
        while time.monotonic() - begin < SECONDS and not all(map(is_gone, pids.values())):
            time.sleep(0.02)
        assert all(map(is_gone, pids.values()))
