"""The agent of a host besides rank 0's: starts the processes of its ranks, and relays orders and reports.

    python -m ingot.runtime.ranks.hosts.agent

reads an `AgentOrder` as a line of JSON from its input. Other programs call `run_agent`. The processes are those that
rank 0 starts on its own host, with memory, pipes and a folder of this host. Importing this imports no torch.
"""

import json
import os
import select
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ingot.ir.errors import IngotError
from ingot.ir.machine.gpus import GPU_VARIABLE, visible_gpus
from ingot.ir.mesh import STAGES, world_size
from ingot.runtime.ranks.child import LocalRank
from ingot.runtime.ranks.host import facts_here
from ingot.runtime.ranks.hosts.agent_order import AgentOrder, check_order
from ingot.runtime.ranks.hosts.frames import Kind, frame, named_parts, read_frame, read_named, read_order, set_options
from ingot.runtime.ranks.hosts.left_files import LeftFiles
from ingot.runtime.ranks.hosts.report_frame import RankReport
from ingot.runtime.ranks.processes import RankProcesses, start_processes
from ingot.runtime.ranks.report_layout import map_slots, slot_count
from ingot.runtime.ranks.reports import RankState, Reports

# How long the agent tries to reach rank 0, which listens before it starts agents.
_CONNECT_SECONDS = 10.0
# Between two looks at the reports while ranks run steps. Rank 0 goes ahead by three steps or more, and those of a small
# model take two milliseconds together. select(2) can wait for so short a time, and poll(2) cannot.
_BUSY_SECONDS = 0.0005
# The same while no step runs.
_IDLE_SECONDS = 0.02
# Between two looks at the processes.
_LOOK_SECONDS = 0.1


def run_agent(given: dict[str, Any]) -> None:
    """Start the processes of this host's ranks, and serve them until rank 0 closes the connection or it breaks.

    `given` is an `AgentOrder` as JSON. All processes have ended then. Raises OSError if rank 0 cannot be reached.
    """
    order = AgentOrder(**given)
    with socket.create_connection((order.address, order.port), _CONNECT_SECONDS) as connection:
        connection.settimeout(None)
        set_options(connection)
        connection.sendall(bytes.fromhex(order.token) + order.index.to_bytes(4, "little"))
        try:
            check_order(order)
            processes = _start(order)
        except IngotError as error:
            texts = {"what": error.what, "where": error.where, "expected": error.expected, "hint": error.hint}
            connection.sendall(frame(Kind.REFUSED, json.dumps({"kind": type(error).__name__, **texts}).encode()))
            return
        try:
            _Relay(order, processes, connection).run()
        except OSError:
            return  # the connection broke: rank 0 is gone, or does not answer
        finally:
            processes.end()


def _start(order: AgentOrder) -> RankProcesses:
    os.environ.update(order.variables)
    hosts = order.read_hosts()
    count = len(hosts[order.index].ranks)
    gpus = visible_gpus(count, os.environ.get(GPU_VARIABLE)) if order.device == "cuda" else []
    return start_processes(Path(order.artifact), order.mesh, order.device, gpus, hosts, order.index)


class _Relay:
    """Relays between the connection to rank 0 and the processes of this host."""

    def __init__(self, order: AgentOrder, processes: RankProcesses, connection: socket.socket) -> None:
        self._stages, self._processes, self._connection = order.mesh.get(STAGES, 1), processes, connection
        self._ranks = order.read_hosts()[order.index].ranks
        self._world = world_size(order.mesh)
        self._reports = Reports(self._world, processes.area_fd)
        self._left = LeftFiles(processes.meeting)
        self._sent: dict[int, RankReport] = {}
        self._alive: dict[int, tuple[bool, int | None]] = dict.fromkeys(self._ranks, (False, None))
        self._posted, self._next_look, self._loading = 0, 0.0, True
        self._slots: memoryview | None = None

    def run(self) -> None:
        """Relay until rank 0 closes the connection. Raises OSError if it breaks."""
        pids = {rank: child.pid for rank, child in self._processes.children.items()}
        joined = {"facts": asdict(facts_here()), "pids": pids, "clock": time.monotonic()}
        self._connection.sendall(frame(Kind.JOINED, json.dumps(joined).encode()))
        seconds = _IDLE_SECONDS
        while True:
            readable, _, _ = select.select([self._connection], [], [], seconds)
            if readable:
                if (found := read_frame(self._connection)) is None:
                    return
                self._take(*found)
            seconds = _BUSY_SECONDS if self._report() else _IDLE_SECONDS

    def _take(self, kind: Kind, content: bytes) -> None:
        """Do what a frame of rank 0 says."""
        if kind is Kind.LEFT:
            self._left.add(*read_named(content))
        elif kind is Kind.DECIDED:
            decided = json.loads(content)
            self._slot_bytes = 4 * decided["slot_words"]
            slots = map_slots(self._processes.area_fd, self._world, slot_count(self._stages), decided["slot_words"])
            self._slots = memoryview(slots)
            self._processes.leave(decided)
        else:
            self._order(kind, content)

    def _order(self, kind: Kind, content: bytes) -> None:
        assert self._slots is not None  # rank 0 decides before it posts
        place, pieces = read_order(content)
        for begin, words in pieces:
            at = place * self._slot_bytes + 4 * begin
            self._slots[at : at + len(words)] = words
        self._posted += kind is Kind.STEP
        for pipe in self._processes.pipes.values():
            try:
                os.write(pipe, kind.value)
            except BrokenPipeError:  # the rank has ended, which is reported
                continue

    def _report(self) -> bool:
        """Send what has changed, and return whether ranks run steps."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            for rank, child in self._processes.children.items():
                assert isinstance(child, LocalRank)
                self._alive[rank] = child.stopped(), child.poll()
        if self._loading:
            # Before the files: a rank may be ready just after it has left one that others need.
            self._loading = any(self._reports.state(rank) is RankState.LOADING for rank in self._ranks)
            for name, content in self._left.new():
                self._connection.sendall(frame(Kind.LEFT, *named_parts(name, content)))
        for rank in self._ranks:
            report = RankReport(rank, *self._alive[rank], self._reports.numbers(rank))
            if report != (sent := self._sent.get(rank)):
                text = b"" if sent is not None and report.state == sent.state else self._reports.text(rank)
                self._connection.sendall(frame(Kind.REPORT, report.packed(), text))
                self._sent[rank] = report
        return any(self._reports.done[rank] < self._posted for rank in self._ranks)


def main() -> None:
    """Run the agent with the order in this process's input."""
    run_agent(json.loads(sys.stdin.readline()))


if __name__ == "__main__":
    main()
