"""All ranks of a mesh in one process, for tools that repeat steps and compare all that they return, bit by bit.

Each rank has a thread of its own, and one thread computes at a time. The next one goes on when a rank waits for another
one. So kernels of several ranks never run at once, and sums do not depend on which rank is faster. Collectives are
those of processes: the same functions, over other connections.
"""

import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from ingot.ir.errors import InternalError, RankError, TargetError
from ingot.ir.machine.load_context import Communicator
from ingot.ir.mesh import Mesh, Rank, groups, ranks
from ingot.runtime.loading.artifact import Artifact
from ingot.runtime.loading.load_context import mesh_of
from ingot.runtime.loading.loader import Loaded, bind
from ingot.runtime.ranks.rank_process import lost_rank
from ingot.runtime.ranks.seat import Seat, rank_text
from ingot.runtime.ranks.start import room_of_ranks
from ingot.runtime.steps.binding import step_sizes
from ingot.runtime.steps.bucket import Watch
from ingot.runtime.steps.executor import NOTHING_CAPTURED, Captured, Executor, StepHandle
from ingot.runtime.steps.step import StepSizes

# Results depend on the number of threads, and it is one value for all threads of a process.
THREADS = 1
_LOOK_SECONDS = 0.05


def bind_ranks(artifact: Artifact, *, verify: bool = True) -> Loaded:
    """Load all ranks of an artifact for a mesh of CPU processes into this process.

    Each executor of the result runs steps of all ranks, and returns what the first rank of the last stage returns. The
    other values are those of that rank.

    Raises ArtifactError for a damaged artifact, TargetError for a mesh of GPUs, and OptionError if the plans do not fit
    into memory.
    """
    mesh = mesh_of(artifact.manifest)
    if (device := artifact.manifest.target.get("device")) != "cpu":
        raise TargetError(
            f"all ranks of a mesh of devices '{device!s:.40}' in one process",
            expected="a mesh of CPU processes",
            hint="serve the artifact with LLM or `ingot serve`",
        )
    _, _, room = room_of_ranks(artifact, mesh, None, None, keep_states=True)
    meeting, all_ranks = _Meeting(mesh), ranks(mesh)
    loaded = [
        bind(artifact, verify=verify, seat=Seat(rank, mesh, room, lambda rank=rank: meeting.connections(rank), THREADS))  # type: ignore[misc]
        for rank in all_ranks
    ]
    last = next(place for place, rank in enumerate(all_ranks) if rank.stage == all_ranks[-1].stage)
    executors: dict[str, Executor] = {}
    for entry in loaded[last].executors:
        each = [one.executors[entry] for one in loaded]
        executors[entry] = RanksExecutor(each, all_ranks, last, meeting)
    return replace(loaded[last], executors=executors)


@dataclass
class _Meeting:
    """The place in which the ranks of a mesh exchange values: a mailbox for each mesh axis, sender and receiver.

    turn    held by the rank that computes
    broken  set when a rank has failed: the others stop waiting
    """

    mesh: Mesh
    turn: threading.Lock = field(default_factory=threading.Lock)
    broken: threading.Event = field(default_factory=threading.Event)
    boxes: dict[tuple[str, int, int], "queue.SimpleQueue[torch.Tensor]"] = field(default_factory=dict)

    def connections(self, rank: Rank) -> Mapping[str, Communicator]:
        """Return the connections of a rank, by mesh axis."""
        found: dict[str, Communicator] = {}
        for axis, place, _ in rank.axes:
            members = next(members for members in groups(self.mesh, axis) if rank.index in members)
            found[axis] = _Connection(self, axis, members, place)
        return found

    def box(self, axis: str, sender: int, receiver: int) -> "queue.SimpleQueue[torch.Tensor]":
        return self.boxes.setdefault((axis, sender, receiver), queue.SimpleQueue())


class _Connection(Communicator):
    """Connects a rank with the others of a mesh axis. `members` are the ranks of the axis, and `place` is its own."""

    def __init__(self, meeting: _Meeting, axis: str, members: Sequence[int], place: int) -> None:
        self.place, self.size = place, len(members)
        self._meeting, self._axis, self._members = meeting, axis, members

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        for other in range(self.size):
            self.send(x, other)
        return [self._take(other) for other in range(self.size)]

    def exchange(self, parts: torch.Tensor) -> list[torch.Tensor]:
        for other, part in enumerate(parts):
            self.send(part, other)
        return [self._take(other) for other in range(self.size)]

    def send(self, x: torch.Tensor, place: int) -> None:
        box = self._meeting.box(self._axis, self._members[self.place], self._members[place])
        box.put(x.clone(memory_format=torch.contiguous_format))

    def receive(self, into: torch.Tensor, place: int) -> None:
        into.copy_(self._take(place))

    def _take(self, place: int) -> torch.Tensor:
        """Return the next value of another rank. While it is not there, other ranks have their turn."""
        box = self._meeting.box(self._axis, self._members[place], self._members[self.place])
        self._meeting.turn.release()
        try:
            while not self._meeting.broken.is_set():
                try:
                    return box.get(timeout=_LOOK_SECONDS)
                except queue.Empty:
                    continue
        finally:
            self._meeting.turn.acquire()
        raise RankError("another rank has failed")


class RanksExecutor(Executor):
    """Runs the steps of all ranks of a mesh, in this process.

    executors   the executor of each rank
    ranks       the ranks
    last        the index of the rank whose results are returned
    meeting     connects the ranks
    """

    captured: Captured = NOTHING_CAPTURED
    replays = False

    def __init__(self, executors: Sequence[Executor], all_ranks: Sequence[Rank], last: int, meeting: _Meeting) -> None:
        self._executors, self._ranks, self._last, self._meeting = executors, all_ranks, last, meeting
        self.plan, self.params, self.states = executors[last].plan, executors[last].params, executors[last].states
        self.inputs = {name: kind for executor in executors for name, kind in executor.inputs.items()}
        self.sizes = {name: size for executor in executors for name, size in executor.sizes.items()}

    def launch(self, inputs: Mapping[str, torch.Tensor], watch: Watch | None = None) -> StepHandle:
        """Run a step on all ranks, and return the handle of the first rank of the last stage.

        Raises InternalError if ranks of that stage return different logits. A step cannot be watched: its instructions
        are those of several plans.
        """
        if watch is not None:
            raise InternalError("a step of several ranks is watched", expected="a plan of one device")
        sizes = step_sizes(self.inputs, inputs, self.sizes)
        sized = _SizedInputs(inputs, StepSizes(*(sizes.get(name, 1) for name in ("T", "B", "L", "P", "G"))))
        with ThreadPoolExecutor(len(self._executors), "rank") as pool:
            steps = [pool.submit(self._run, executor, sized) for executor in self._executors]
        errors = [error for step in steps if (error := step.exception()) is not None]
        if errors:
            raise next((error for error in errors if not lost_rank(error)), errors[0])
        handles = [step.result() for step in steps]
        found = handles[self._last]
        for rank, handle in zip(self._ranks, handles, strict=True):
            same = rank.stage != self._ranks[-1].stage or "logits" not in found.outputs
            if not (same or _equal(handle.outputs["logits"], found.outputs["logits"])):
                raise InternalError(
                    f"{rank_text(rank)} returns other logits than {rank_text(self._ranks[self._last])}",
                    expected="equal bits on all ranks of a stage",
                )
        return found

    def _run(self, executor: Executor, inputs: "_SizedInputs") -> StepHandle:
        with self._meeting.turn:
            try:
                handle = executor.launch(inputs)
                handle.finish()
            except BaseException:
                self._meeting.broken.set()
                raise
        return handle

    def warm_up(self) -> None:
        """Do nothing: on a CPU there is nothing to prepare before the first step."""

    def capture(self, rows: int) -> None:
        """Do nothing: there are no CUDA graphs on a CPU."""

    def capture_all(self) -> None:
        """Do nothing: there are no CUDA graphs on a CPU."""

    def prepare(self, seconds: float = 0.0) -> bool:
        """Do nothing and return False: on a CPU there is no work to do in advance."""
        return False

    def synchronize(self) -> None:
        """Do nothing: a step is complete when `launch` returns."""


class _SizedInputs(dict[str, torch.Tensor]):
    """The inputs of a step by name, and its sizes: a stage may lack the inputs that show them."""

    def __init__(self, inputs: Mapping[str, torch.Tensor], sizes: StepSizes) -> None:
        super().__init__(inputs)
        self.sizes = sizes


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
