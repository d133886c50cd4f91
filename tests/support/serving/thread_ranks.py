"""All ranks of a mesh as threads of one process: their plans, step slots and executors are those of processes.

Starting a process takes seconds of importing. What processes add (shared memory between them, gloo, faults) is tested
with few of them.
"""

import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ingot.ir.errors import RankError
from ingot.ir.machine.load_context import Communicator
from ingot.ir.mesh import STAGES, Rank, groups, ranks
from ingot.runtime.loading.artifact import Artifact, open_artifact
from ingot.runtime.loading.check_target import this_machine
from ingot.runtime.loading.limits import read_limits
from ingot.runtime.loading.load_context import mesh_of
from ingot.runtime.loading.loader import Loaded, bind
from ingot.runtime.loading.plan_file import read_plan_file
from ingot.runtime.loading.room import find_room, serving_memory
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.ranks.posted_steps import PostedSteps, run_posted
from ingot.runtime.ranks.seat import Seat
from ingot.runtime.ranks.shared_area import SharedArea
from ingot.runtime.ranks.step_slots import StepSlots
from ingot.runtime.ranks.whole_plans import whole_plans
from ingot.runtime.steps.step import StepInputs
from ingot.serve.set_up import make_engine

SECONDS = 60.0  # longer than any tiny step


@dataclass
class _Group:
    """Ranks that communicate: a mailbox for each (sender, receiver)."""

    size: int
    boxes: dict[tuple[int, int], "queue.Queue[torch.Tensor]"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        places = range(self.size)
        self.boxes = {(one, other): queue.Queue() for one in places for other in places}


class ThreadCommunicator(Communicator):
    def __init__(self, group: _Group, place: int, broken: threading.Event) -> None:
        self.place, self.size = place, group.size
        self._group, self._broken = group, broken

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        for other in range(self.size):
            self.send(x, other)
        return [self._take(other) for other in range(self.size)]

    def exchange(self, parts: torch.Tensor) -> list[torch.Tensor]:
        for other, part in enumerate(parts):
            self.send(part, other)
        return [self._take(other) for other in range(self.size)]

    def send(self, x: torch.Tensor, place: int) -> None:
        self._group.boxes[self.place, place].put(x.clone(memory_format=torch.contiguous_format))

    def receive(self, into: torch.Tensor, place: int) -> None:
        found = self._take(place)
        assert (found.shape, found.dtype) == (into.shape, into.dtype), "both sides agree about the value"
        into.copy_(found)

    def _take(self, place: int) -> torch.Tensor:
        for _ in range(int(SECONDS / 0.05)):
            try:
                return self._group.boxes[place, self.place].get(timeout=0.05)
            except queue.Empty:
                if self._broken.is_set():
                    raise RankError("another thread failed") from None
        raise RankError("nothing came")


class ThreadRanks:
    """The other ranks of a mesh, in threads. It has what `MeshLauncher` needs of a `Leader`."""

    def __init__(self, artifact: Artifact, num_pages: int | None) -> None:
        mesh = mesh_of(artifact.manifest)
        file = read_plan_file(artifact)
        self.plans, self._ranks = whole_plans(file), ranks(mesh)
        limits = read_limits(artifact, file.of(0))
        each = [file.of(rank.index) for rank in self._ranks]
        memory = serving_memory(this_machine(artifact.manifest), each[0], None, capture="none")
        room = find_room(each, limits, memory, num_pages, None, keep_states=True)
        slots = StepSlots.of(file, limits)
        self._area = SharedArea(len(self._ranks))
        self._area.add_slots(slots.words, mesh.get(STAGES, 1))
        self._pipes: dict[int, int] = {}
        self._steps = PostedSteps(self._area, slots, self._pipes)
        self._broken, self.errors = threading.Event(), list[BaseException]()
        made: dict[tuple[int, ...], _Group] = {}

        def connections(rank: Rank) -> Mapping[str, Communicator]:
            found: dict[str, Communicator] = {}
            for axis, place, size in rank.axes:
                members = next(one for one in groups(mesh, axis) if rank.index in one)
                group = made.setdefault((*members, size, axis == "tp"), _Group(size))
                found[axis] = ThreadCommunicator(group, place, self._broken)
            return found

        seats = [Seat(rank, mesh, room, lambda rank=rank: connections(rank)) for rank in self._ranks]  # type: ignore[misc]
        self.loaded = [bind(artifact, seat=seat) for seat in seats]
        for rank in self._ranks[1:]:
            read, self._pipes[rank.index] = os.pipe()
            arguments = (self.loaded[rank.index].round, self._area, slots, rank.index, read)
            threading.Thread(target=self._run, args=arguments, daemon=True).start()

    def _run(self, *arguments: Any) -> None:
        try:
            run_posted(*arguments)
        except BaseException as error:
            self.errors.append(error)
            self._broken.set()
        finally:
            os.close(arguments[-1])

    def close(self) -> None:
        for pipe in self._pipes.values():
            os.close(pipe)

    def check(self) -> None:
        if self.errors:
            raise self.errors[0]

    def post(self, inputs: StepInputs) -> None:
        while not self._steps.has_room():
            self.check()
        self._steps.post(inputs)

    def post_late(self, inputs: StepInputs) -> None:
        self._steps.post_late(inputs)

    def post_ending(self) -> None:
        self._steps.post_ending()

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._broken.set()
            self.check()
            raise


@contextmanager
def thread_engine(folder: Path, num_pages: int = 8, **options: Any) -> Iterator[Any]:
    """An engine for an artifact of any mesh, or of none, whose ranks are threads."""
    artifact = open_artifact(folder)
    others = ThreadRanks(artifact, num_pages) if mesh_of(artifact.manifest) else None
    loaded: Loaded = bind(artifact, num_pages=num_pages) if others is None else replace(others.loaded[0], leader=others)  # type: ignore[arg-type]
    usual: dict[str, Any] = dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "max_num_mixed_tokens"))
    usual |= {"chunked_prefill": True, "prefix_caching": None, "cascade": False, "policy": "fcfs", "seed": 0}
    try:
        yield make_engine(loaded, **{**usual, **options})
    finally:
        if others is not None:
            others.close()


def generated(engine: Any, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Any]:
    """The completions of an engine for prompts of token ids, in their order."""
    return [output.outputs[0] for output in answered(engine, prompts, params)]


def answered(engine: Any, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Any]:
    """The outputs of an engine for prompts of token ids, in their order."""
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"{index}", {"prompt_token_ids": list(prompt)}, one, stream=False)
    found = {}
    while engine.has_unfinished():
        found |= {output.request_id: output for output in engine.step() if output.finished}
    return [found[f"{index}"] for index in range(len(prompts))]


def is_gone(pid: int) -> bool:
    """Whether a process has ended; its parent may not have noticed yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return text.rpartition(")")[2].split()[0] == "Z"
