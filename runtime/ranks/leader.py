"""Rank 0's side of a mesh: it starts the processes of the other ranks, posts steps to them, and watches them.

A fault of any rank ends all of them. The thread that watches records the first cause and kills the other processes.
That breaks the connections, so a collective in which rank 0 waits ends too, and the engine raises the recorded error.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from ingot.ir.artifact.plan import Plans
from ingot.ir.errors import BackendError, IngotError, RankError
from ingot.ir.machine.load_context import Communicator
from ingot.ir.mesh import STAGES, Mesh, Rank, ranks
from ingot.runtime.cuda.graphs.choice import Capture
from ingot.runtime.loading.room import Room
from ingot.runtime.ranks.posted_steps import PostedSteps
from ingot.runtime.ranks.seat import Seat, connections, rank_text, room_json
from ingot.runtime.ranks.shared_area import RankState, SharedArea
from ingot.runtime.ranks.step_slots import StepSlots
from ingot.runtime.ranks.watch import RankWatch
from ingot.runtime.steps.step import StepInputs

# How long rank 0 waits for the cause of a broken connection. Watching finds one within some tenths of a second, a
# stopped process within two seconds.
_CAUSE_SECONDS = 4.0
# Processes whose pipes are closed get this long, before they are killed.
_END_SECONDS = 2.0
_POLL_SECONDS = 0.02


@dataclass
class _Processes:
    """The processes of the other ranks, with the pipes of orders to them, by the index of the rank."""

    children: dict[int, "subprocess.Popen[bytes]"]
    pipes: dict[int, int]
    folder: Path
    watch: RankWatch | None = None

    def end(self, seconds: float = _END_SECONDS) -> None:
        """End all processes: close their pipes, and kill those that still run after `seconds`."""
        if self.watch is not None:
            self.watch.stop()
        for pipe in self.pipes.values():
            with contextlib.suppress(OSError):
                os.close(pipe)
        self.pipes.clear()
        deadline = time.monotonic() + seconds
        for child in self.children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
            child.kill()  # no effect if it has ended
            child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class _OnFault:
    """The calls of the thread that watches, when it has found a fault.

    call        the call of the engine, which then raises the fault
    connected   the connections of rank 0, by mesh axis. On GPUs, kernels wait in them until they are aborted
    """

    call: Callable[[], None] = lambda: None
    connected: Mapping[str, Communicator] = field(default_factory=dict)

    def __call__(self) -> None:
        self.call()
        for communicator in self.connected.values():
            communicator.abort()


class Leader:
    """Rank 0 of a mesh. The constructor starts the processes of the other ranks, which load their parts at once.

    artifact   the artifact's folder
    mesh       the mesh
    backend    the backend that connects the ranks
    room       the pages and slots that every rank allocates
    slots      how steps are written to shared memory
    plans      (attribute) the plans of all ranks together, for the scheduler
    threads    the number of threads that each rank computes with
    capture    when every rank captures CUDA graphs
    variables  the environment variables of each rank's process, such as its GPU
    """

    def __init__(
        self,
        artifact: Path,
        mesh: Mesh,
        backend: str,
        room: Room,
        slots: StepSlots,
        plans: Plans,
        threads: int,
        capture: Capture,
        variables: Sequence[Mapping[str, str]],
    ) -> None:
        self._all, self.plans = ranks(mesh), plans
        self._area = SharedArea(len(self._all), slots.words, stages=mesh.get(STAGES, 1))
        folder = Path(tempfile.mkdtemp(prefix="ingot-ranks-"))  # only this user can read it
        spec = {
            "artifact": str(artifact.absolute()),
            "mesh": dict(mesh),
            "ranks": len(self._all),
            "backend": backend,
            "room": room_json(room),
            "slot_words": slots.words,
            "threads": threads,
            "capture": capture,
            "folder": str(folder),
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        self._processes = _Processes({}, {}, folder)
        self._steps = PostedSteps(self._area, slots, self._processes.pipes)
        self.close = weakref.finalize(self, self._processes.end)
        try:
            for rank in self._all[1:]:
                own = {"OMP_NUM_THREADS": str(threads), **variables[rank.index]}
                self._start(rank, folder / "spec.json", own)
        except OSError as error:
            self.close()
            raise RankError(f"a process of the mesh does not start: {error}") from error
        finally:
            os.close(self._area.fd)  # the others have it
        self._watch = RankWatch(self._area, self._all, self._processes.children)
        self._faulted = self._watch.on_fault = _OnFault()
        self._processes.watch = self._watch
        self._given = folder, backend, mesh, room, threads

    def seat(self) -> Seat:
        """Return the seat of rank 0."""
        folder, backend, mesh, room, threads = self._given
        return Seat(self._all[0], mesh, room, lambda: self._connect(folder, backend, mesh), threads)

    @property
    def busy(self) -> dict[int, int]:
        """The nanoseconds that each other rank has computed, by its index. They grow when a step ends there."""
        return {rank.index: int(self._area.busy[rank.index]) for rank in self._all[1:]}

    @property
    def process_ids(self) -> dict[int, int]:
        """The process id of each other rank, by its index."""
        return {rank: child.pid for rank, child in self._processes.children.items()}

    def _start(self, rank: Rank, spec: Path, variables: Mapping[str, str]) -> None:
        read, write = os.pipe()
        command = [sys.executable, "-m", "ingot.runtime.ranks.worker"]
        arguments = [str(spec), str(rank.index), str(self._area.fd), str(read)]
        self._processes.pipes[rank.index] = write
        try:
            self._processes.children[rank.index] = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(self._area.fd, read),
                env={**os.environ, **variables},
                start_new_session=True,  # Ctrl-C reaches only rank 0
            )
        finally:
            os.close(read)

    def _connect(self, folder: Path, backend: str, mesh: Mesh) -> Mapping[str, Communicator]:
        """Connect with the other ranks. If one of them ends first, the connecting thread goes on alone."""
        connected: Future[Mapping[str, Communicator]] = Future()

        def connect() -> None:
            try:
                connected.set_result(connections(folder, backend, mesh, self._all[0]))
            except BaseException as error:
                connected.set_exception(error)

        # A daemon: the process must be able to exit while the thread waits for a rank that is gone.
        threading.Thread(target=connect, name="connect", daemon=True).start()
        self._wait_until(connected.done)
        self._faulted.connected = connected.result()
        return self._faulted.connected

    def wait_until_ready(self) -> None:
        """Wait until all ranks have loaded their parts. Raises RankError if one of them fails."""
        others = self._all[1:]
        self._wait_until(lambda: all(self._area.state(rank.index) is RankState.READY for rank in others))

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self.check()
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raise RankError if a rank has ended, stopped or failed."""
        if self._watch.fault is not None:
            raise self._watch.fault

    def on_fault(self, call: Callable[[], None]) -> None:
        """Let the thread that watches call `call` when it has found a fault."""
        self._faulted.call = call
        if self._watch.fault is not None:
            call()

    def post(self, inputs: StepInputs) -> None:
        """Write a step to the shared memory, and order the other ranks to run it. Raises RankError."""
        self._wait_until(self._steps.has_room)
        self.check()
        try:
            self._steps.post(inputs)
        except BrokenPipeError as error:
            raise self._cause(error) from error

    def post_late(self, inputs: StepInputs) -> None:
        """Write the late inputs of the last step, and order the other ranks to run its ending. Raises RankError."""
        self.check()
        try:
            self._steps.post_late(inputs)
        except BrokenPipeError as error:
            raise self._cause(error) from error

    def post_ending(self) -> None:
        """Order the other ranks to run the ending of the oldest step that has not run it. Raises RankError."""
        self.check()
        try:
            self._steps.post_ending()
        except BrokenPipeError as error:
            raise self._cause(error) from error

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run rank 0's part of a step in the `with` block. An error there ends the other ranks.

        If another rank is the cause, RankError is raised in its place.
        """
        try:
            yield
        except BaseException as error:
            if (cause := self._cause(error)) is error:
                raise
            raise cause from error

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the fault of another rank that has made loading fail here with `error`, or `error` itself."""
        if isinstance(error, RankError | BackendError | RuntimeError):  # RuntimeError: of CUDA, through torch
            self._watch.wait(_CAUSE_SECONDS)
        return error if self._watch.fault is None else self._watch.fault

    def _cause(self, error: BaseException) -> BaseException:
        """Return the fault of another rank that has caused `error`, or `error` itself. All ranks have ended then."""
        if isinstance(error, IngotError | OSError | RuntimeError):  # RuntimeError: of CUDA, through torch
            self._watch.wait(_CAUSE_SECONDS)
        if self._watch.fault is not None:
            return self._watch.fault
        text = f"{type(error).__name__}: {error.what if isinstance(error, IngotError) else error}"
        self._watch.end_all(RankError(f"{rank_text(self._all[0])} failed in a step before: {text}"))
        return error
