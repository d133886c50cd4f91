"""The relay between rank 0 and another host, without a model: frames, files, reports, the token, and refusals."""

from __future__ import annotations

import json
import os
import random
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_hosts import LocalHosts, ThreadHosts
from run_seed import again, run_seed
from silence import silence
from thread_ranks import is_gone

from ingot.backends.gloo.load import GlooCommunicator
from ingot.ir.errors import ArtifactError, IngotError, RankError, TargetError
from ingot.ir.machine.meeting import MeetingPlace
from ingot.ir.mesh import ranks
from ingot.runtime.ranks.child import LocalRank
from ingot.runtime.ranks.host import Host
from ingot.runtime.ranks.hosts import link as link_module
from ingot.runtime.ranks.hosts.agent import _Relay
from ingot.runtime.ranks.hosts.agent_order import make_order
from ingot.runtime.ranks.hosts.begin import begun_on_hosts
from ingot.runtime.ranks.hosts.frames import (
    TOKEN_BYTES,
    Kind,
    frame,
    named_parts,
    order_parts,
    read_frame,
    read_named,
    read_order,
    set_options,
)
from ingot.runtime.ranks.hosts.left_files import LeftFiles
from ingot.runtime.ranks.hosts.link import HostLink
from ingot.runtime.ranks.hosts.listener import Listener
from ingot.runtime.ranks.hosts.report_frame import RankReport, read_report
from ingot.runtime.ranks.processes import RankProcesses, read_later
from ingot.runtime.ranks.reports import RankState, Reports
from ingot.runtime.ranks.shared_area import SharedArea
from ingot.runtime.ranks.watch import RankWatch

MESH = {"tp": 2}
HOSTS = (Host("127.0.0.1", (0,)), Host("127.0.0.1", (1,)))
WORDS = 50


def test_variables_that_hosts_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No secret is among them, and no name of an interface."""
    (tmp_path / "manifest.json").write_text("{}")
    for name in ("NCCL_NVLS_ENABLE", "NCCL_SOCKET_IFNAME", "INGOT_API_KEY", "INGOT_DEBUG", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    order = make_order(HOSTS, 1, 5, b"t" * TOKEN_BYTES, tmp_path, MESH, "cpu")
    found = {name for name in order.variables if not name.startswith("NCCL_") or os.environ[name] == "1"}
    assert found == {"NCCL_NVLS_ENABLE", "INGOT_DEBUG", "OMP_NUM_THREADS"}
    assert (order.port, order.address, order.read_hosts()) == (5, "127.0.0.1", HOSTS)


def test_a_frame_that_is_none_ends_the_connection(linked: tuple[Agent, HostLink, Reports, Path]) -> None:
    agent, link, _, _ = linked
    agent.connection.sendall(b"?" + bytes(4))
    until(lambda: link.broken)
    assert link.broken is not None and link.broken.startswith("the connection to its host broke: ")


def until(found: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Wait until `found` returns something true, and return it."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.005)
    return value


def test_frames_are_read_as_written() -> None:
    draw = random.Random(run_seed())
    one, other = socket.socketpair()
    with one, other:
        for step in range(50):
            pieces = [
                (draw.randrange(1 << 20), memoryview(draw.randbytes(4 * draw.randrange(500))))
                for _ in range(draw.randrange(4))
            ]
            one.sendall(frame(Kind.STEP, *order_parts(step, pieces)))
            kind, content = read_frame(other) or (None, b"")
            assert kind is Kind.STEP and read_order(content) == (step, pieces), again(step)
            name, text = f"tp-{step}.ü", draw.randbytes(draw.randrange(100))
            one.sendall(frame(Kind.LEFT, *named_parts(name, text)))
            kind, content = read_frame(other) or (None, b"")
            assert kind is Kind.LEFT and read_named(content) == (name, text), again(step)
            report = RankReport(step, draw.random() < 0.5, draw.choice((None, 0, 3, -9)), draw.randbytes(40))
            assert read_report(report.packed() + text) == (report, text), again(step)
        one.sendall(frame(Kind.STEP, b"abc")[:-1])
        one.close()
        assert read_frame(other) is None, "cut in the middle"


def test_files_go_to_other_hosts_once(tmp_path: Path) -> None:
    left = LeftFiles(tmp_path)
    place = MeetingPlace(tmp_path)
    place.leave("a", b"1")
    (tmp_path / "b.new").write_bytes(b"half")
    assert list(left.new()) == [("a", b"1")] and list(left.new()) == []
    left.add("c", b"3")
    assert list(left.new()) == [] and place.find("c", lambda: None, 1) == b"3", "it came from there"
    with pytest.raises(RankError, match=r"leaves a file with the name '\.\./d'"):
        left.add("../d", b"")


class Agent:
    """The agent of rank 1 in a thread, without processes of ranks: this test plays them, and rank 0."""

    def __init__(self, folder: Path, connection: socket.socket, artifact: Path) -> None:
        (folder / "meeting").mkdir()
        self.connection = connection
        self.area = SharedArea(2)
        read, write = os.pipe()
        self.orders = read
        self.child = LocalRank(["sleep", "60"])
        children: dict[int, Any] = {1: self.child}
        self.processes = RankProcesses(MESH, HOSTS, folder, os.dup(self.area.fd), children, {1: write})
        order = make_order(HOSTS, 1, 0, b"t" * TOKEN_BYTES, artifact, MESH, "cpu")
        self.thread = threading.Thread(target=_Relay(order, self.processes, connection).run, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.processes.end(0)
        os.close(self.orders)


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[tuple[Agent, HostLink, Reports, Path]]:
    """An agent, rank 0's link to it, the reports of rank 0's host, and the folder where ranks meet there."""
    (tmp_path / "manifest.json").write_text("{}")
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    mine, theirs = socket.socketpair()
    reports = Reports(2)
    link = HostLink(HOSTS[1], reports, folders[0], lambda: None)
    agent = Agent(folders[1], theirs, tmp_path)
    link.connect(mine)
    link.wait_until_joined()
    yield agent, link, reports, folders[0]
    link.close()
    agent.end()
    theirs.close()
    link.wait_until_closed()
    mine.close()


def test_orders_and_reports_are_relayed(linked: tuple[Agent, HostLink, Reports, Path]) -> None:
    agent, link, reports, _ = linked
    assert link.children[1].pid == agent.child.pid and link.facts.cores > 0 and link.facts.memory > 1 << 20
    link.leave({"slot_words": WORDS, "other": 1})
    assert until(lambda: (agent.processes.folder / "later.json").exists())
    assert read_later(agent.processes.folder) == {"slot_words": WORDS, "other": 1}
    agent.area.add_slots(WORDS, 1)
    for step in range(9):
        words = np.arange(step, step + 7, dtype=np.int32)
        link.order(b"S", step % 4, [(3, words[:3].data.cast("B")), (40, words[3:].data.cast("B"))])
        assert os.read(agent.orders, 1) == b"S"
        slot = agent.area.slot(step)
        assert slot[3:6].tolist() + slot[40:44].tolist() == words.tolist()
        agent.area.done[1], agent.area.busy[1] = step + 1, 1000 * step
        until(lambda step=step: reports.done[1] == step + 1)
        assert reports.busy[1] == 1000 * step
    link.order(b"E", 0, ())
    assert os.read(agent.orders, 1) == b"E"
    agent.area.tell_free(1, 1 << 40)
    assert until(lambda: reports.free(1)) == 1 << 40
    agent.area.fail(1, RankState.FAILED, {"what": "no memory", "where": "", "expected": "", "hint": ""})
    until(lambda: reports.state(1) is RankState.FAILED)
    assert reports.failure(1)["what"] == "no memory"


def test_a_file_that_is_left_just_before_a_rank_is_ready(linked: tuple[Agent, HostLink, Reports, Path]) -> None:
    """No rank of the host waits for anything then, but ranks of other hosts wait for the file."""
    agent, _, reports, meeting = linked
    MeetingPlace(agent.processes.meeting).leave("tp-0", b"address")
    agent.area.ready(1, ())
    until(lambda: reports.state(1) is RankState.READY)
    assert until(lambda: (meeting / "tp-0").exists()) and (meeting / "tp-0").read_bytes() == b"address"


def test_what_a_watch_sees_of_another_host(linked: tuple[Agent, HostLink, Reports, Path]) -> None:
    agent, link, reports, _ = linked
    watch = RankWatch(reports, ranks(MESH), link.children)
    agent.child.terminate()
    watch.wait(5)
    assert watch.fault is not None
    assert watch.fault.what == "rank 1 (tp=1) on 127.0.0.1 ended: it was killed by signal 15 (SIGTERM)"
    agent.thread.join(5)
    assert not agent.thread.is_alive(), "the connection is closed, which ends the agent"


def test_a_broken_connection_is_a_fault(linked: tuple[Agent, HostLink, Reports, Path]) -> None:
    _, link, reports, _ = linked
    watch = RankWatch(reports, ranks(MESH), link.children)
    time.sleep(0.3)
    assert watch.fault is None
    link._connection.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    watch.wait(5)
    assert watch.fault is not None
    assert watch.fault.what == "rank 1 (tp=1) on 127.0.0.1 is lost: the connection to its host has ended"
    with pytest.raises(ConnectionError):
        link.order(b"S", 0, ())


def test_an_agent_that_comes_after_the_end(tmp_path: Path) -> None:
    link = HostLink(HOSTS[1], Reports(2), tmp_path, lambda: None)
    link.close()
    mine, agent = socket.socketpair()
    with mine, agent:
        link.connect(mine)
        agent.settimeout(5)
        assert agent.recv(1) == b"", "the connection is closed"
        agent.close()
        until(lambda: not any(one.name == "host 127.0.0.1" for one in threading.enumerate()))


def test_only_the_token_lets_an_agent_join() -> None:
    token, came = os.urandom(TOKEN_BYTES), list[socket.socket]()
    listener = Listener("127.0.0.1", token)
    listener.accept({1: came.append})

    def shown(content: bytes) -> bytes:
        """The answer of the listener: b"" if it closes the connection."""
        with socket.create_connection(("127.0.0.1", listener.port), 5) as agent:
            agent.sendall(content)
            agent.settimeout(0.3)
            try:
                return agent.recv(1)
            except TimeoutError:
                return b"open"
            except ConnectionResetError:  # closed with bytes that were not read
                return b""

    one = (1).to_bytes(4, "little")
    for wrong in (os.urandom(TOKEN_BYTES) + one, token + (2).to_bytes(4, "little"), b"GET / HTTP/1.1\r\n\r\n" * 3):
        assert shown(wrong) == b"" and not came
    assert shown(token + one) == b"open" and len(came) == 1
    assert came[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "orders are sent at once"
    with pytest.raises(ConnectionRefusedError):
        until(lambda: socket.create_connection(("127.0.0.1", listener.port), 5).close())
    came[0].close()


def other_torch(order: dict[str, Any]) -> Mapping[str, Any]:
    return {**order, "packages": {**order["packages"], "torch": "1.0"}}


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Mapping[str, Any]], type[IngotError], str, str]] = {
    "no artifact": (
        lambda order: {**order, "artifact": "/none/pico.ingot"},
        ArtifactError,
        "the artifact /none/pico.ingot cannot be read on another host: No such file",
        "copy the artifact",
    ),
    "another artifact": (
        lambda order: {**order, "build": "1" * 64},
        ArtifactError,
        "the artifact on the host 127.0.0.1 differs from that of rank 0",
        "copy the artifact to that host again",
    ),
    "another torch": (
        other_torch,
        TargetError,
        "hosts of the mesh differ: rank 0 has torch 1.0, and the host 127.0.0.1 has ",
        "pip install 'torch==1.0'",
    ),
    "an agent that fails": (
        lambda order: {**order, "unknown": 1},
        RankError,
        "the agent of host 127.0.0.1 does not start: it exited with status 1",
        "log of the agent",
    ),
    "a wrong token": (
        lambda order: {**order, "token": "00" * TOKEN_BYTES},
        RankError,
        "the agent of host 127.0.0.1 does not start: it ",
        "log of the agent",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_hosts_that_cannot_join(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    change, kind, what, hint = REFUSED[case]
    artifact, folder = tmp_path / "a.ingot", tmp_path / "t"
    for made in (artifact, folder):
        made.mkdir()
    manifest = {"model": {"mesh": "tp=2"}, "target": {"device": "cpu"}}
    (artifact / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(link_module, "_LAST_WORDS_SECONDS", 0.2)
    hosts = LocalHosts(1, 1, change=change)
    with pytest.raises(kind) as caught, begun_on_hosts(artifact, hosts) as processes:
        assert processes is not None
        processes.others[0].wait_until_joined()
    assert caught.value.what.startswith(what), caught.value.what
    assert hint in caught.value.hint
    assert hosts.released == 1 and not list(folder.iterdir())
    assert all(is_gone(agent.pid) for agent in hosts.agents.values())


def test_an_agent_ends_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its connection is closed, also if its own process goes on."""
    (tmp_path / "manifest.json").write_text(json.dumps({"model": {"mesh": "tp=2"}, "target": {"device": "cpu"}}))
    pids: list[int] = []
    with pytest.raises(ZeroDivisionError), begun_on_hosts(tmp_path, ThreadHosts(1, 1)) as processes:
        assert processes is not None
        processes.others[0].wait_until_joined()
        pids += [child.pid for child in processes.children.values()]
        assert len(pids) == 1 and not is_gone(pids[0])
        1 / 0  # noqa: B018
    assert is_gone(pids[0])


def test_a_silent_connection_ends_at_both_ends() -> None:
    """While neither end has anything to send; `test_hosts.py` cuts one with steps on their way."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
    with one, other:
        for end in (one, other):
            set_options(end)
        silence(one)
        begin = time.monotonic()
        for end in (one, other):
            end.settimeout(10)
            with pytest.raises(TimeoutError, match="Connection timed out"):  # the kernel's, not that of `settimeout`
                read_frame(end)
        assert time.monotonic() - begin < 4.5, "with the second in which processes end, less than five"


def test_a_connection_of_gloo_can_be_aborted(tmp_path: Path) -> None:
    """As when another host is cut off: no end of a connection comes from there."""
    made: dict[int, GlooCommunicator] = {}
    meeting = MeetingPlace(tmp_path)

    def make(place: int) -> None:
        made[place] = GlooCommunicator(meeting, "tp/0", place, 2)

    threads = [threading.Thread(target=make, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            made[0].gather(torch.ones(3))
        except RankError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive() and not select.select([], [], [], 0)[0]
    made[0].abort()
    waiting.join(5)
    assert not waiting.is_alive() and len(errors) == 1
