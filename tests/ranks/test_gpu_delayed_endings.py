"""Endings on GPU stages run after later forward passes, on a stream of their own. Streams and ranks are recorded."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.ir.artifact.plan import (
    BucketClass,
    BucketMemory,
    BucketPlan,
    Instruction,
    Plan,
    Ref,
    ResidentMemory,
    Transfer,
    Transfers,
    Value,
)
from ingot.ir.errors import InternalError
from ingot.ir.machine.gpus import TYPICAL
from ingot.ir.machine.load_context import Communicator, LoadContext
from ingot.ir.mesh import STAGES, Rank
from ingot.runtime.cuda import executor as executor_module
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.graphs import delayed as delayed_module
from ingot.runtime.cuda.graphs.captured import Graphs
from ingot.runtime.cuda.graphs.delayed import CarriedValues, DelayedEndings, carried_values
from ingot.runtime.cuda.graphs.step_graph import StepGraph
from ingot.runtime.cuda.staged_bucket import StagedBucket
from ingot.runtime.steps.late_step import LateStep
from ingot.runtime.steps.stage_line import StageLine
from ingot.runtime.steps.step import StepInputs, StepLayout, StepSizes
from ingot.runtime.steps.step_outputs import StepOutputs

CPU = torch.device("cpu")
INPUTS = {"tokens": "i32[T]", "q_lens": "i32[B]", "rows": "i32[B]", "page_table": "i32[B, P]", "logit_rows": "i32[L]"}


def add(first: str, second: str, result: str) -> Instruction:
    args = Ref(ref=first), Ref(ref=second)
    return Instruction(target="aten.add.Tensor", backend="reference", args=args, results=(result,))


def bucket(place: int) -> BucketPlan:
    """Stage 0 sends `own` to stage 1, which sends `token` back: its ending adds both. Stage 1 only moves values."""
    first = place == 0
    return BucketPlan(
        bucket=BucketClass(name="any", tokens=(1, 64)),
        instructions=(
            (add("rows", "rows", "own"), add("own", "rows", "scratch"), add("own", "token", "tokens"))
            if first
            else (add("own", "rows", "token"), add("token", "token", "tokens"))
        ),
        values={
            name: Value(type="i32[B]", buffer="received" if name == ("token" if first else "own") else "pool")
            for name in ("own", "scratch", "token", "tokens")
            if first or name != "scratch"
        },
        memory=BucketMemory(sizes={}, activations=0, peak=0),
        ending=2 if first else 1,
        transfers=Transfers(
            received=(Transfer(name="token" if first else "own", stage=1 - place),),
            sent=(Transfer(name="own" if first else "token", stage=1 - place),),
        ),
    )


def plan(place: int) -> Plan:
    return Plan(
        entry="main",
        ending="sample",
        dims={"T": (1, 64), "B": (1, 64), "L": (1, 64), "P": (1, 3)},
        inputs=INPUTS,
        params={},
        states={},
        outputs={"tokens": "i32[B]"},
        executables={},
        memory=ResidentMemory(weights=0, states=0, inputs=0, outputs=0),
        buckets=(bucket(place),),
        stage=(place, 2),
    )


class Machine:
    """In place of a GPU: `ran` has what was launched, in order, each with the stream of it."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, str]] = []
        self.current = self.steps = Stream("steps", self)

    def note(self, what: str) -> None:
        self.ran.append((self.current.name, what))


class Stream:
    def __init__(self, name: str, machine: Machine) -> None:
        self.name, self.machine = name, machine

    def wait_event(self, event: Event) -> None:
        self.machine.ran.append((self.name, f"waits for {event.stream} {event.after}"))


class Event:
    """What it was recorded after: the number of launches until then, and their stream."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.stream, self.after = machine, "", -1

    def record(self, stream: Stream | None = None) -> None:
        self.stream = (stream or self.machine.current).name
        self.after = len(self.machine.ran)

    def synchronize(self) -> None:
        return


class Ranks(Communicator):
    """The other stage: it gives 100, 200, … in turns."""

    def __init__(self, name: str, place: int, machine: Machine) -> None:
        self.name, self.place, self.size, self.machine = name, place, 2, machine
        self.sent: list[list[int]] = []
        self.given = 0

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        raise AssertionError("stages do not gather")

    def send(self, x: torch.Tensor, place: int) -> None:
        self.machine.note(f"send {self.name}")
        self.sent.append(x.tolist())

    def receive(self, into: torch.Tensor, place: int) -> None:
        self.machine.note(f"receive {self.name}")
        self.given += 100
        into.fill_(self.given)

    def second(self, device: torch.device) -> Ranks:
        self.back = Ranks("back", self.place, self.machine)
        return self.back


class Ints:
    """Memory of the host, pinned or not."""

    def __init__(self, shape: Any) -> None:
        self.host = self.device = torch.zeros(shape, dtype=torch.int32)


def note_handle(machine: Machine) -> Any:
    def handle(name: str, outputs: Any, read: Any, done: Any, **options: Any) -> Any:
        machine.note("ending")
        return SimpleNamespace(bucket=name, finish=lambda: None, tokens=lambda: read("tokens"))

    return handle


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()

    @contextmanager
    def stream(one: Stream) -> Iterator[None]:
        before, made.current = made.current, one
        yield
        made.current = before

    def handle(name: str, outputs: Any, read: Any, done: Any, **options: Any) -> Any:
        made.note("ending")
        return type(
            "Handle", (), {"bucket": name, "finish": lambda self: None, "tokens": lambda self: read("tokens")}
        )()

    for name, value in {
        "find_gpu": lambda: TYPICAL["sm_90"],
        "GraphMemory": lambda *args, **options: None,
        "to_device": lambda tensor, device: tensor,
        "to_host": lambda tensor: tensor,
        "CudaStepHandle": note_handle(made),
    }.items():
        monkeypatch.setattr(executor_module, name, value)
    monkeypatch.setattr(delayed_module, "GraphMemory", lambda arena: None)
    monkeypatch.setattr("ingot.runtime.cuda.graphs.staging.to_device", lambda tensor, device: tensor.clone())
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(made))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream("endings", made))
    return made


def executor(place: int, machine: Machine) -> tuple[CudaExecutor, Ranks]:
    ranks = Ranks("forth", place, machine)
    nothing: Any = {}
    given: Any = machine.steps
    context = LoadContext(CPU, Rank(place, ((STAGES, place, 2),)), {"pp": 2}, given, {STAGES: ranks}, nothing)
    return CudaExecutor(plan(place), {}, {}, {}, {}, nothing, context, capture="none"), ranks


def step(*rows: int) -> Mapping[str, torch.Tensor]:
    count = len(rows)
    ones, at = torch.ones(count), torch.tensor(rows)
    inputs = {"tokens": ones, "q_lens": ones, "rows": at, "page_table": torch.zeros(count, 3), "logit_rows": ones}
    return {name: value.to(torch.int32) for name, value in inputs.items()}


def test_a_stage_begins_steps_before_the_ending_of_the_first(machine: Machine) -> None:
    """Each ending reads the values of its own step, on the stream of endings, by the connection for endings."""
    one, ranks = executor(0, machine)
    first, second = one.launch(step(1, 2)), one.launch(step(3))
    assert isinstance(first, LateStep) and isinstance(second, LateStep)
    assert ranks.sent == [[2, 4], [6]], "the next stage can compute both"
    first.finish()
    third = one.launch(step(4))
    for late in (second, third):
        late.finish()
    assert [late.tokens() for late in (first, second, third)] == [[102, 104], [206], [308]]
    assert machine.ran == [
        ("steps", "send forth"),
        ("steps", "send forth"),
        ("endings", "waits for steps 1"),  # the first forward pass alone
        ("endings", "receive back"),
        ("endings", "ending"),
        ("steps", "waits for endings 5"),  # whatever is launched later may read what the ending has written
        ("steps", "send forth"),
        ("endings", "waits for steps 2"),
        ("endings", "receive back"),
        ("endings", "ending"),
        ("steps", "waits for endings 10"),
        ("endings", "waits for steps 7"),
        ("endings", "receive back"),
        ("endings", "ending"),
        ("steps", "waits for endings 14"),
    ]


@pytest.mark.parametrize(("target", "backend"), [("ingot.all_reduce", "nccl"), ("exe.abc", "peer")])
def test_a_delayed_ending_has_no_collective(
    target: str, backend: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would use the connection of `tp` from a second stream, in no fixed order with forward passes."""
    sound = plan(0)
    total = Instruction(target=target, backend=backend, args=(Ref(ref="own"),), results=("scratch",))
    first = sound.buckets[0]
    instructions = (*first.instructions[:2], total, first.instructions[2])
    changed = sound.model_copy(update={"buckets": (first.model_copy(update={"instructions": instructions}),)})
    monkeypatch.setitem(globals(), "plan", lambda place: changed)
    with pytest.raises(InternalError, match=f"the ending of a pipeline stage calls {target}"):
        executor(0, machine)


def test_the_last_stage_ends_at_once(machine: Machine) -> None:
    one, ranks = executor(1, machine)
    found = one.launch(step(1))
    assert not isinstance(found, LateStep) and found.tokens() == [202]
    assert ranks.sent == [] and ranks.back.sent == [[101]]
    assert machine.ran == [("steps", "receive forth"), ("steps", "send back"), ("steps", "ending")]


@pytest.mark.parametrize("place", [0, 1])
def test_masks_that_are_there_are_written_before_sampling(
    place: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages get the masks of grammars with the step. The last stage samples at once; it must not do so without them.

    Nor may its ending wait for an order: the next forward pass overwrites what it reads.
    """
    one, _ = executor(place, machine)
    monkeypatch.setattr(executor_module, "write_masks", lambda own, states, inputs: machine.note("masks"))
    rows = step(1)
    layout = StepLayout.of(frozenset(rows))
    inputs = StepInputs(
        layout, torch.zeros(layout.words(StepSizes(1, 1, 1, 3)), dtype=torch.int32), StepSizes(1, 1, 1, 3)
    )
    for name, value in rows.items():
        inputs[name].copy_(value)
    masked: Any = (SimpleNamespace(),)
    inputs.masked, inputs.prepared = masked, True
    found = one.launch(inputs)
    if place == 1:
        assert not isinstance(found, LateStep)
        whats = [what for _, what in machine.ran]
        assert whats == ["masks", "receive forth", "send back", "ending"]
    else:
        assert isinstance(found, LateStep) and ("steps", "masks") not in machine.ran
        found.finish()
        assert machine.ran.index(("endings", "masks")) < machine.ran.index(("endings", "receive back"))


def test_the_last_stage_ends_a_graph_with_an_ending_of_its_own_at_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan with late inputs captures endings apart. With those inputs there, the ending is launched with the step."""
    one, _ = executor(1, machine)
    ended: list[str] = []
    late = LateStep("any", lambda: SimpleNamespace(tokens=lambda: [ended.append("read"), 7]))  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(one, "_execute", lambda inputs, decided, watch: late)
    rows = step(1)
    layout = StepLayout.of(frozenset(rows))
    inputs = StepInputs(layout, torch.zeros(64, dtype=torch.int32), StepSizes(1, 1, 1, 3))
    found = one.launch(inputs)
    assert found.tokens()[1] == 7, "it is launched, so its results can be read"


def staged(machine: Machine, place: int = 0) -> tuple[StagedBucket, Ranks]:
    ranks = Ranks("forth", place, machine)
    line = StageLine(ranks, CPU, ranks.second(CPU))
    return StagedBucket(
        bucket(place), resident={}, inputs=INPUTS, outputs=["tokens"], executables={}, libraries={}, line=line
    ), ranks


def test_a_rehearsal_moves_nothing(machine: Machine) -> None:
    """A graph may be captured when steps have begun, whose tokens come later."""
    one, ranks = staged(machine)
    one.rehearse(step(1, 2), {"T": 2, "B": 2, "L": 2, "P": 3})
    assert machine.ran == [] and ranks.sent == []
    one.begin(step(5), {"T": 1, "B": 1, "L": 1, "P": 3})
    assert ranks.sent == [[10]], "a step moves values afterwards"


def test_an_ending_reads_what_no_other_graph_overwrites(machine: Machine) -> None:
    """Graphs share memory, so what an ending reads is copied. A value of the forward pass alone is not."""
    one, _ = staged(machine)
    assert carried_values(one.plan, one.outputs, 0) == ("own",)
    assert carried_values(bucket(1), ["tokens"], 1) == ("token",), "its ending adds and sends what the model computes"
    sizes = {"T": 2, "B": 2, "L": 2, "P": 3}
    carried = CarriedValues(one, ("own",), sizes, CPU)
    one.begin(step(1, 2), sizes)
    computed = one.value("own")
    carried.keep()
    computed.fill_(-1)  # by another graph
    assert one.end(sizes)["tokens"].tolist() == [102, 104]


def test_a_value_that_is_a_view_keeps_its_strides(machine: Machine) -> None:
    one, _ = staged(machine)
    values = {**one.plan.values, "own": Value(type="i32[B; 2]", buffer="pool")}
    one.plan = one.plan.model_copy(update={"values": values})
    carried = CarriedValues(one, ("own",), {"B": 3}, CPU)
    one.set_value("own", torch.arange(6, dtype=torch.int32)[::2])
    carried.keep()
    assert one.value("own").tolist() == [0, 2, 4] and one.value("own").stride() == (2,)


class Graph:
    """In place of a CUDA graph: notes when it is captured and replayed."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.name = ""

    def replay(self) -> None:
        self.machine.note(f"replay {self.name}")


class Memory:
    """In place of the memory of graphs. A capture runs its instructions here, so values are there."""

    launches = 0

    def __init__(self, name: str, machine: Machine) -> None:
        self.name, self.machine = name, machine

    @contextmanager
    def captured(self, graph: Graph, what: str, where: str) -> Iterator[None]:
        graph.name = f"{self.name} {self.machine.ran.count(('steps', f'capture {self.name}'))}"
        self.machine.note(f"capture {self.name}")
        yield

    def begin_launch(self) -> None:
        self.launches += 1

    def check(self) -> None:
        return

    def lend(self, outputs: Any, launch: int) -> Any:
        return outputs


def test_graphs_of_delayed_endings(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three graphs for two steps in flight, each with its inputs on the device; endings have memory of their own."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(machine))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: machine.current)
    for name in ("ingot.runtime.cuda.graphs.staging", "ingot.runtime.cuda.graphs.step_graph"):
        monkeypatch.setattr(f"{name}.PinnedInts", Ints)
    monkeypatch.setattr("ingot.runtime.cuda.graphs.step_graph.device_view", lambda tensor, keep: tensor)
    monkeypatch.setattr("ingot.runtime.cuda.graphs.step_graph.CudaStepHandle", note_handle(machine))
    one, _ = staged(machine)
    steps: Any = machine.steps
    forward, endings = Memory("forward", machine), Memory("ending", machine)
    places: Any = Stream("endings", machine), steps, endings
    delayed = DelayedEndings(*places, place=0, most=2)
    layout, size = StepLayout.of(frozenset(INPUTS)), StepSizes(2, 2, 2, 3)
    sizes = {"T": 2, "B": 2, "L": 2, "P": 3}
    memory: Any = forward
    made = StepGraph(one, layout, StepOutputs.of(plan(0)), size, sizes, CPU, memory, delayed=delayed)
    captures = [what for _, what in machine.ran if what.startswith("capture")]
    assert captures == ["capture forward", "capture ending"] * 3
    assert len({made.buffers[f"inputs on the device {place}"].data_ptr() for place in range(3)}) == 3
    gc.collect()
    kept = [value for graph in made._graphs for value in graph._carried._kept.values()]  # type: ignore[union-attr]
    assert len({value.data_ptr() for value in kept}) == 3, "what endings read lives as long as the graphs"
    machine.ran.clear()
    late = [made.launch(step(place, place), size, returns_logprobs=False) for place in (1, 2)]
    assert all(isinstance(handle, LateStep) for handle in late)
    for handle in late:
        handle.finish()
    assert machine.ran == [
        ("steps", "replay forward 0"),
        ("steps", "replay forward 1"),
        ("endings", "replay ending 0"),
        ("endings", "ending"),
        ("endings", "replay ending 1"),
        ("endings", "ending"),
    ]


def test_graphs_are_made_with_delayed_endings(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first stage, and not on the last."""
    made: list[Any] = []

    def note(self: Graphs, *args: Any, apart: bool, delayed: Any) -> None:
        made.append(delayed)
        self.seconds = {}

    monkeypatch.setattr(Graphs, "__init__", note)
    executor(0, machine)
    first = made[0]
    assert (first.place, first.most, first.stream.name, first.steps.name) == (0, 2, "endings", "steps")
    made.clear()
    executor(1, machine)
    assert made and set(made) == {None}
