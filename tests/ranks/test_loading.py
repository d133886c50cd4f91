"""How a mesh starts: the processes begin first, ranks connect while they load, and a fault ends all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drawn import drawn
from thread_ranks import is_gone

from ingot import LLM
from ingot.ir.errors import OptionError, RankError
from ingot.ir.machine.load_context import Communicator
from ingot.ir.mesh import ranks
from ingot.runtime.loading.loader import _by_connection
from ingot.runtime.ranks import processes as processes_module
from ingot.runtime.ranks.connecting import Connecting
from ingot.runtime.ranks.leader import Leader
from ingot.runtime.ranks.processes import RankProcesses, begun_ranks, read_later

pytestmark = pytest.mark.xdist_group("ranks")
# In which all ranks end after a fault. A stopped process counts as gone after two; the rest is for a busy machine.
SECONDS = 15.0
RANK = ranks({"pp": 2, "tp": 2})[3]


class Made(Communicator):
    """A connection that notes when it is aborted."""

    def __init__(self) -> None:
        self.place, self.size, self.aborted = 0, 2, 0

    def abort(self) -> None:
        self.aborted += 1


class Meeting:
    """Connections that are made when `come` is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.come, self.error = threading.Event(), error
        self.made: Mapping[str, Made] = {"pp": Made(), "tp": Made()}

    def __call__(self) -> Mapping[str, Communicator]:
        self.come.wait(10)
        if self.error is not None:
            raise self.error
        return self.made


def test_connections_are_read_when_they_are_made() -> None:
    meeting = Meeting()
    found = Connecting(RANK, meeting)
    assert list(found) == ["pp", "tp"] and len(found) == 2, "their names are known before"
    assert found.get("dp") is None, "no rank is waited for, because there is no such axis"
    threading.Timer(0.1, meeting.come.set).start()
    assert found["tp"] is meeting.made["tp"] and list(found.values()) == [meeting.made["pp"], meeting.made["tp"]]
    found.abort()
    assert [one.aborted for one in meeting.made.values()] == [1, 1]


def test_connections_that_are_made_after_a_fault_are_aborted() -> None:
    meeting = Meeting()
    found = Connecting(RANK, meeting)
    found.abort()
    meeting.come.set()
    assert found["pp"] is meeting.made["pp"]
    end = time.monotonic() + 10
    while time.monotonic() < end and not all(one.aborted for one in meeting.made.values()):
        time.sleep(0.01)
    assert [one.aborted for one in meeting.made.values()] == [1, 1]


@pytest.mark.parametrize("error", [RankError("gone"), TimeoutError("late")])
def test_an_error_of_connecting_is_raised_by_what_reads(error: Exception) -> None:
    meeting = Meeting(error)
    meeting.come.set()
    found = Connecting(RANK, meeting)
    with pytest.raises(type(error), match=str(error)):
        found["tp"]
    found.abort()


def test_a_fault_ends_the_wait_for_connections() -> None:
    meeting = Meeting()

    def check() -> None:
        raise RankError("rank 1 ended")

    with pytest.raises(RankError, match="rank 1 ended"):
        Connecting(RANK, meeting, check)["pp"]
    meeting.come.set()


def test_executables_that_need_other_ranks_are_loaded_last() -> None:
    given = {name: SimpleNamespace(id=name, backend=backend) for name, backend in
             (("a", "peer"), ("b", "triton"), ("c", "peer"), ("d", "outside"))}  # fmt: skip
    plans: Any = SimpleNamespace(executables=given)
    alone, joined = _by_connection(plans)
    assert [one.id for one in alone] == ["b", "d"] and [one.id for one in joined] == ["a", "c"]


def test_the_processes_begin_without_torch() -> None:
    script = (
        "import sys\nimport ingot.runtime.ranks.worker\nfrom ingot.runtime.ranks.processes import begun_ranks\n"
        "print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.parametrize("variable", [None, "4,2", "4"])
def test_what_each_process_is_given(variable: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each sees its own GPU alone, and a part of the threads; with too few GPUs, none begins."""
    started: list[dict[str, str]] = []

    class Child:
        def __init__(self, command: list[str], *, env: dict[str, str], **options: Any) -> None:
            started.append(env)

        def wait(self, seconds: float = 0.0) -> int:
            return 0

        def kill(self) -> None:
            return

    monkeypatch.setattr(processes_module, "LocalRank", Child)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    (tmp_path / "manifest.json").write_text('{"target": {"device": "cuda"}, "model": {"mesh": "tp=2"}}')
    with pytest.raises(OptionError), begun_ranks(tmp_path) as processes:
        assert (processes is None) is (variable == "4")
        if processes is not None:
            assert processes.mesh == {"tp": 2} and set(processes.pipes) == {1}
            processes.leave({"slots": 3})
            assert read_later(processes.folder) == {"slots": 3}
        raise OptionError("loading fails")
    wanted = {None: [("1", "3")], "4,2": [("2", "3")], "4": []}[variable]
    assert [(env["CUDA_VISIBLE_DEVICES"], env["OMP_NUM_THREADS"]) for env in started] == wanted
    if processes is not None:
        assert not processes.folder.exists() and not processes.pipes and processes.area_fd == -1


def test_one_device_and_an_unreadable_manifest_begin_nothing(tmp_path: Path) -> None:
    for text in (
        '{"target": {"device": "cpu"}, "model": {}}',
        '{"target": {"device": "cpu"}, "model": {"mesh": "x"}}',
        "{",
    ):
        (tmp_path / "manifest.json").write_text(text)
        with begun_ranks(tmp_path) as processes:
            assert processes is None


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[RankProcesses]:
    """The processes that begin in a test."""
    found: list[RankProcesses] = []
    start = processes_module.start_processes

    def noted(*given: Any) -> RankProcesses:
        found.append(start(*given))
        return found[-1]

    monkeypatch.setattr(processes_module, "start_processes", noted)
    return found


def check_gone(begun: list[RankProcesses], since: float) -> None:
    (processes,) = begun
    pids = [child.pid for child in processes.children.values()]
    while time.monotonic() - since < SECONDS and not all(map(is_gone, pids)):
        time.sleep(0.02)
    assert pids and all(map(is_gone, pids)) and not processes.folder.exists()


# Before rank 0 connects, when the others wait for what it decides, and when all load their parts.
MOMENTS = ("connect", "decide", "seat")


@pytest.mark.parametrize(("moment", "fault"), drawn(1, [(one, other) for one in MOMENTS for other in ("kill", "stop")]))
def test_a_fault_while_loading_ends_all_ranks(
    moment: str,
    fault: str,
    artifact: Callable[[str, str], Path],
    begun: list[RankProcesses],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, struck = artifact("llama", "tp=2"), list[float]()
    method = getattr(Leader, moment)

    def strike(self: Leader, *given: Any, **named: Any) -> Any:
        os.kill(self.process_ids[1], signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        struck.append(time.monotonic())
        return method(self, *given, **named)

    monkeypatch.setattr(Leader, moment, strike)
    with pytest.raises(RankError) as caught:
        LLM(path, num_kv_pages=30)
    assert time.monotonic() - struck[0] < SECONDS
    wanted = "ended: it was killed by signal 9" if fault == "kill" else "is stopped (SIGSTOP)"
    assert caught.value.what.startswith(f"rank 1 (tp=1) {wanted}"), caught.value.what
    check_gone(begun, struck[0])


def test_an_error_of_rank_0_ends_all_ranks(artifact: Callable[[str, str], Path], begun: list[RankProcesses]) -> None:
    path = artifact("llama", "tp=2")
    with pytest.raises(OptionError, match="KV pages"):
        LLM(path, num_kv_pages=10**9)
    check_gone(begun, time.monotonic())
