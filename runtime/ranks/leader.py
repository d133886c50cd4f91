"""Rank 0's side of a mesh: it tells the processes of the other ranks what to load, posts steps, and watches them.

A fault of any rank ends all of them. The thread that watches records the first cause and kills the other processes.
That breaks the connections, so a collective in which rank 0 waits ends too, and the engine raises the recorded error.
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.ir.artifact.plan import Plans
from ingot.ir.errors import BackendError, IngotError, RankError
from ingot.ir.machine.load_context import Communicator
from ingot.ir.mesh import STAGES, ranks
from ingot.runtime.cuda.graphs.choice import Capture
from ingot.runtime.loading.phases import Phases, Span
from ingot.runtime.loading.room import Room
from ingot.runtime.ranks.connecting import Connecting
from ingot.runtime.ranks.host import HostFacts
from ingot.runtime.ranks.measuring.rank_measurement import RankMeasurement
from ingot.runtime.ranks.measuring.schedule import MeasuringSchedule
from ingot.runtime.ranks.posted_steps import PostedSteps
from ingot.runtime.ranks.processes import RankProcesses
from ingot.runtime.ranks.reports import RankState
from ingot.runtime.ranks.seat import Seat, connections, rank_text, room_json
from ingot.runtime.ranks.shared_area import SharedArea
from ingot.runtime.ranks.step_slots import StepSlots
from ingot.runtime.ranks.watch import RankWatch
from ingot.runtime.steps.step import StepInputs

# How long rank 0 waits for the cause of a broken connection. Watching finds one within some tenths of a second, a
# stopped process within two seconds.
_CAUSE_SECONDS = 4.0
# Between two looks at the reports of other ranks.
_POLL_SECONDS = 0.005


@dataclass
class _OnFault:
    """The calls of the thread that watches, when it has found a fault.

    call        the call of the engine, which then raises the fault
    connected   the connections of rank 0; None before they are begun. On GPUs, kernels wait in them until they are
                aborted
    """

    call: Callable[[], None] = lambda: None
    connected: Connecting | None = None

    def __call__(self) -> None:
        self.call()
        if self.connected is not None:
            self.connected.abort()


class Leader:
    """Rank 0 of a mesh: it reaches the processes of the other ranks, which load their parts.

    processes   the processes. They wait for what `decide` tells them
    plans       (attribute) the plans of all ranks together, for the scheduler; set by `decide`
    measurement (attribute) measures rank 0's part of steps; None: the ranks are not measured
    """

    plans: Plans
    measurement: RankMeasurement | None = None

    def __init__(self, processes: RankProcesses) -> None:
        self._processes, self._all = processes, ranks(processes.mesh)
        self._area = SharedArea(len(self._all), processes.area_fd)
        self.close = weakref.finalize(self, processes.end)
        self._watch = RankWatch(self._area, self._all, processes.children)
        self._faulted = self._watch.on_fault = _OnFault()
        processes.watch = self._watch

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Load rank 0's part in the `with` block. An error there ends the other ranks.

        If another rank is the cause, RankError is raised in its place.
        """
        try:
            yield
        except BaseException as error:
            cause = self.cause_of(error)
            self._processes.end(0)
            self.close()
            if cause is error:
                raise
            raise cause from error

    def meet_hosts(self) -> Sequence[tuple[int, HostFacts]]:
        """Wait until the processes of other hosts have started. Return the number of ranks and the facts of each such
        host. Raises IngotError if they cannot start."""
        for other in self._processes.others:
            other.wait_until_joined()
        return [(len(other.host.ranks), other.facts) for other in self._processes.others]

    def free_memory(self) -> int:
        """Wait for the contexts of all other GPUs, and return the fewest bytes that are free on one. Raises
        RankError."""
        others = self._all[1:]
        self._wait_until(lambda: all(self._area.free(rank.index) for rank in others))
        return min(self._area.free(rank.index) for rank in others)

    def connect(self, backend: str, phases: Phases) -> None:
        """Begin to connect with the other ranks, through a backend. The seat of rank 0 has the connections."""
        own, folder, mesh = self._all[0], self._processes.meeting, self._processes.mesh

        def connected() -> Mapping[str, Communicator]:
            with phases.phase("connect"):
                return connections(folder, backend, mesh, own, self._processes.hosts)

        self._faulted.connected = Connecting(own, connected, self.check)

    def decide(
        self,
        room: Room,
        slots: StepSlots,
        plans: Plans,
        threads: int,
        capture: Capture,
        *,
        clock: bool = False,
        measuring: MeasuringSchedule | None = None,
    ) -> None:
        """Tell the other ranks what rank 0 has decided, with which they load their parts.

        room      the pages and slots that every rank allocates
        slots     how steps are written to shared memory
        plans     the plans of all ranks together
        threads   the number of threads that each rank computes with
        capture   when every rank captures CUDA graphs
        clock     measure how long the GPU of each pipeline stage computes
        measuring which steps the ranks measure; None: none
        """
        self.plans, self._room, self._threads = plans, room, threads
        if measuring is not None:
            self.measurement = RankMeasurement(0, self._processes.meeting, measuring)
        self._area.add_slots(slots.words, self._processes.mesh.get(STAGES, 1))
        self._processes.close_area()  # the others have it
        self._steps = PostedSteps(self._area, slots, self._processes.pipes, self._processes.others)
        with self._reached():
            self._processes.leave(
                {
                    "room": room_json(room),
                    "slot_words": slots.words,
                    "threads": threads,
                    "capture": capture,
                    "clock": clock,
                    "measuring": None if measuring is None else measuring.to_json(),
                }
            )

    def seat(self) -> Seat:
        """Return the seat of rank 0. Call it after `connect` and `decide`."""
        connected = self._faulted.connected
        assert connected is not None

        def recorded() -> Mapping[str, Communicator]:
            return connected if self.measurement is None else self.measurement.connections(connected)

        return Seat(self._all[0], self._processes.mesh, self._room, recorded, self._threads)

    def find_left(self, name: str) -> Path:
        """Wait for a file that a rank leaves for the others, and return its path. The file is removed with the
        processes. Raises RankError."""
        file = self._processes.meeting / name
        self._wait_until(file.exists)
        return file

    @property
    def busy(self) -> dict[int, int]:
        """The nanoseconds that each other rank has computed, by its index. They grow when a step ends there."""
        return {rank.index: int(self._area.busy[rank.index]) for rank in self._all[1:]}

    @property
    def process_ids(self) -> dict[int, int]:
        """The process id of each other rank on its host, by its index."""
        return {rank: child.pid for rank, child in self._processes.children.items()}

    def wait_until_ready(self) -> Mapping[int, Sequence[Span]]:
        """Wait until all ranks have loaded their parts. Return the phases of each other rank, by its index.

        Raises RankError if one of them fails.
        """
        others = self._all[1:]
        self._wait_until(lambda: all(self._area.state(rank.index) is RankState.READY for rank in others))
        return {rank.index: self._spans(rank.index) for rank in others}

    def _spans(self, rank: int) -> Sequence[Span]:
        """Return the phases of a rank by the clock of this host."""
        ahead = self._processes.children[rank].ahead
        return [Span(one.name, one.begin - ahead, one.end - ahead) for one in self._area.spans(rank)]

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
        with self._reached():
            self._steps.post(inputs)

    def post_late(self, inputs: StepInputs) -> None:
        """Write the late inputs of the last step, and order the other ranks to run its ending. Raises RankError."""
        self.check()
        with self._reached():
            self._steps.post_late(inputs)

    def post_ending(self) -> None:
        """Order the other ranks to run the ending of the oldest step that has not run it. Raises RankError."""
        self.check()
        with self._reached():
            self._steps.post_ending()

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Reach the other ranks in the `with` block. If one is gone, its fault is raised."""
        try:
            yield
        except ConnectionError as error:
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
