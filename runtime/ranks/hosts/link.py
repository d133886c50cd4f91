"""Rank 0's connection to the agent of another host, and the ranks of that host."""

import contextlib
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.ir import errors
from ingot.ir.errors import IngotError, RankError
from ingot.runtime.ranks.child import status_text
from ingot.runtime.ranks.host import Host, HostFacts
from ingot.runtime.ranks.hosts.frames import Kind, frame, named_parts, order_parts, read_frame, read_named
from ingot.runtime.ranks.hosts.left_files import LeftFiles
from ingot.runtime.ranks.hosts.report_frame import read_report
from ingot.runtime.ranks.reports import RankState, Reports

log = logging.getLogger("ingot.ranks")

# How long the agent of a host may take to connect: it starts a Python process, which imports no torch.
JOIN_SECONDS = 60.0
# The last frame of an agent, sent before its end, arrives at once.
_LAST_WORDS_SECONDS = 1.0
# Between two looks for an agent, and for files that ranks leave.
_LOOK_SECONDS = 0.02
# The same when all ranks are ready.
_READY_LOOK_SECONDS = 0.5
# How long an agent may take to end its processes: they get two seconds, and are killed then.
_CLOSE_SECONDS = 5.0


class RemoteRank:
    """The process of a rank on another host. `child.py` describes the attributes and methods."""

    def __init__(self, link: "HostLink", rank: int) -> None:
        self.pid, self.where, self.ahead = 0, f" on {link.host.address}", 0.0
        self.status: int | None = None
        self.is_stopped = False
        self._link, self._rank = link, rank

    def ended(self) -> str | None:
        if self.status is not None:
            return status_text(self.status)
        return None if self._link.broken is None else f"is lost: {self._link.broken}"

    def stopped(self) -> bool:
        return self.is_stopped

    def kill(self) -> None:
        """End all ranks of the host: the agent ends them when its connection is closed."""
        self._link.close()


class HostLink:
    """Reaches the ranks of another host through its agent. `OtherHost` describes most methods.

    host      the host
    reports   the reports of all ranks on rank 0's host, where those of this host are copied to
    meeting   the folder in which ranks meet on rank 0's host
    failed    returns why the agent has ended; None while it runs

    broken    (attribute) what ended the connection; None while it is good, or if it was closed here
    """

    facts: HostFacts

    def __init__(self, host: Host, reports: Reports, meeting: Path, failed: Callable[[], str | None]) -> None:
        self.host = host
        self.broken: str | None = None
        self.children = {rank: RemoteRank(self, rank) for rank in host.ranks}
        self._reports, self._left, self._failed = reports, LeftFiles(meeting), failed
        self._connection: socket.socket | None = None
        self._joined, self._ended = threading.Event(), threading.Event()
        self._refused: IngotError | None = None
        self._closing = False
        self._lock = threading.Lock()  # of sending

    def connect(self, connection: socket.socket) -> None:
        """Take the connection of the agent, which has shown the token."""
        self._connection = connection
        threading.Thread(target=self._run, name=f"host {self.host.address}", daemon=True).start()
        if self._closing:  # before the agent came
            self.close()

    def wait_until_joined(self) -> None:
        end = time.monotonic() + JOIN_SECONDS
        while not self._joined.wait(_LOOK_SECONDS):
            if self._refused is not None:
                raise self._refused
            why = self.broken or self._failed()
            if why is None and time.monotonic() > end:
                why = f"it does not connect in {JOIN_SECONDS:.0f} seconds"
            if why is not None:
                self._ended.wait(_LAST_WORDS_SECONDS)
                if self._refused is not None:
                    raise self._refused
                raise RankError(
                    f"the agent of host {self.host.address} does not start: {why}",
                    expected="the same Ingot on each host, and a network on which hosts reach all ports of each other",
                    hint="the log of the agent on that host says more",
                )

    def order(self, order: bytes, place: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
        self._send(frame(order, *order_parts(place, pieces)))

    def leave(self, decided: Mapping[str, Any]) -> None:
        self._send(frame(Kind.DECIDED, json.dumps(decided).encode()))

    def close(self) -> None:
        self._closing = True
        if self._connection is None:
            self._ended.set()
        else:
            with contextlib.suppress(OSError):  # it is broken
                self._connection.shutdown(socket.SHUT_WR)  # a thread that sends gets BrokenPipeError

    def wait_until_closed(self) -> None:
        self._ended.wait(_CLOSE_SECONDS)

    def _send(self, content: bytes) -> None:
        assert self._connection is not None  # `wait_until_joined` came first
        with self._lock:
            try:
                self._connection.sendall(content)
            except ConnectionError:
                raise
            except OSError as error:  # a time-out is no ConnectionError in Python
                raise ConnectionAbortedError(str(error)) from error

    def _run(self) -> None:
        """Read what the agent sends until the connection ends."""
        assert self._connection is not None
        try:
            why = self._read(self._connection)
        except Exception as error:
            why = f"the connection to its host broke: {error}"
            if not isinstance(error, OSError):
                log.exception("a frame of host %s cannot be taken", self.host.address)
        if not self._closing:
            self.broken = why
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._ended.set()

    def _read(self, connection: socket.socket) -> str:
        """Take frames until the connection ends, and return that it has."""
        loading = True
        poll = select.poll()  # select(2) takes no descriptor above 1023, and this process may serve many clients
        poll.register(connection, select.POLLIN)
        while True:
            if poll.poll(1000 * (_LOOK_SECONDS if loading else _READY_LOOK_SECONDS)):
                if (found := read_frame(connection)) is None:
                    return "the connection to its host has ended"
                self._take(*found)
            if self._joined.is_set() and loading and not self._closing:
                loading = any(self._reports.state(rank) is RankState.LOADING for rank in self.host.ranks)
                for name, content in self._left.new():
                    self._send(frame(Kind.LEFT, *named_parts(name, content)))

    def _take(self, kind: Kind, content: bytes) -> None:
        if kind is Kind.REPORT:
            report, text = read_report(content)
            child = self.children[report.rank]
            child.is_stopped, child.status = report.stopped, report.status
            self._reports.copy(report.rank, report.numbers, text)
        elif kind is Kind.LEFT:
            self._left.add(*read_named(content))
        elif kind is Kind.JOINED:
            joined = json.loads(content)
            self.facts = HostFacts(**joined["facts"])
            ahead = joined["clock"] - time.monotonic()
            for rank, pid in joined["pids"].items():
                self.children[int(rank)].pid, self.children[int(rank)].ahead = pid, ahead
            self._joined.set()
        elif kind is Kind.REFUSED:
            texts = json.loads(content)
            self._refused = getattr(errors, texts.pop("kind"))(texts.pop("what"), **texts)
