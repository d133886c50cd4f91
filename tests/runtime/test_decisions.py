"""A decision that one executor took, executed by another one with another history: both compute in the same sizes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_seed import again, run_seed

from ingot.ir.artifact.plan import BucketClass, BucketMemory, BucketPlan, Executable, Instruction, Plan, ResidentMemory
from ingot.ir.errors import InternalError
from ingot.ir.machine.gpus import TYPICAL
from ingot.ir.machine.load_context import LoadContext
from ingot.ir.mesh import Rank
from ingot.runtime.cuda import executor as executor_module
from ingot.runtime.cuda.decision import Decision
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.graphs import captured as graphs_module
from ingot.runtime.cuda.graphs.choice import _PATIENCE, Capture
from ingot.runtime.loading.memory import shared_pages
from ingot.runtime.steps.step import StepInputs, StepLayout, StepSizes

PAGES = 5
INPUTS = {"tokens": "i32[T]", "q_lens": "i32[B]", "rows": "i32[B]", "page_table": "i32[B, P]", "logit_rows": "i32[L]"}
NO_MEMORY = ResidentMemory(weights=0, states=0, inputs=0, outputs=0)
# Few tokens; a batch that decodes; prompts. All are computed by compiled code, which graphs can hold.
CLASSES = (("few", (1, 64), None), ("many", (65, 512), 1), ("any", (65, 4096), None))


def plan() -> Plan:
    call = Instruction(target="exe.e", backend="triton", args=())
    return Plan(
        entry="main",
        ending="sample",
        dims={"T": (1, 4096), "B": (1, 200), "L": (1, 4096), "P": (1, PAGES)},
        inputs=INPUTS,
        params={},
        states={},
        outputs={},
        executables={"e": Executable(id="e", backend="triton", inputs=(), outputs=(), files=("f",))},
        memory=NO_MEMORY,
        buckets=tuple(
            BucketPlan(
                bucket=BucketClass(name=name, tokens=tokens, q_max=q_max),
                instructions=(call,),
                values={},
                memory=BucketMemory(sizes={}, activations=0, peak=0),
                ending=1,
            )
            for name, tokens, q_max in CLASSES
        ),
    )


# What ran, in order: how, the bucket class, and the sizes (T, B, L, P).
Ran = list[tuple[str, str, tuple[int, ...]]]


class Bucket:
    """A bucket class that notes the sizes of what it runs."""

    def __init__(self, bucket: BucketPlan, ran: Ran) -> None:
        self.plan, self.ran = bucket, ran

    def begin(self, inputs: object, sizes: Mapping[str, int], watch: object) -> None:
        self.ran.append(("instructions", self.plan.bucket.name, tuple(sizes[dim] for dim in "TBLP")))

    def end(self, sizes: object, watch: object) -> dict[str, torch.Tensor]:
        return {"tokens": torch.zeros(1), "logprobs": torch.zeros(1)}


class Graph:
    """A graph that notes its sizes when it is launched."""

    def __init__(
        self,
        bucket: Bucket,
        layout: object,
        step_outputs: object,
        size: StepSizes,
        *rest: object,
        apart: bool,
        delayed: None,
    ) -> None:
        self.bucket, self.size, self.buffers = bucket, size, {}
        self.kind = "graph of the forward pass" if apart else "graph"

    def launch(self, inputs: object, step: StepSizes, *, returns_logprobs: bool) -> SimpleNamespace:
        name, size = self.bucket.plan.bucket.name, self.size
        sizes = size.T, size.B, size.L, size.P
        self.bucket.ran.append((self.kind, name, sizes))

        def finish() -> None:
            if self.kind != "graph":  # a whole graph has run its ending
                self.bucket.ran.append(("ending", name, sizes))

        return SimpleNamespace(bucket=name, finish=finish)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes executors of a machine without a GPU, each with a list of what it ran."""
    ran_by: dict[int, Ran] = {}

    def bound(one: Plan, *rest: object) -> list[Bucket]:
        return [Bucket(bucket, ran_by[len(ran_by) - 1]) for bucket in one.buckets]

    for name, value in {
        "bound_buckets": bound,
        "find_gpu": lambda: TYPICAL["sm_90"],
        "GraphMemory": lambda *args, **options: None,
        "to_device": lambda tensor, device: tensor,
        "to_host": lambda tensor: tensor,
        "CudaStepHandle": lambda bucket, *rest, **options: SimpleNamespace(bucket=bucket, finish=lambda: None),
    }.items():
        monkeypatch.setattr(executor_module, name, value)
    monkeypatch.setattr("ingot.runtime.cuda.graphs.staging.to_device", lambda tensor, device: tensor)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    monkeypatch.setattr(graphs_module, "StepGraph", Graph)

    def make(capture: Capture = "idle") -> tuple[CudaExecutor, Ran]:
        ran = ran_by[len(ran_by)] = []
        stream: Any = object()
        place: Any = SimpleNamespace()
        rank = Rank(0, ())
        context = LoadContext(torch.device("cpu"), rank, {}, stream, {}, place)
        states: Any = {}
        return CudaExecutor(plan(), {}, {}, {}, {}, states, context, capture=capture), ran

    return make


def step(*lengths: int) -> dict[str, torch.Tensor]:
    """The inputs of sequences that feed so many tokens each."""
    rows, table = torch.arange(len(lengths)), torch.zeros(len(lengths), 3)
    inputs = {
        "tokens": torch.zeros(sum(lengths)),
        "q_lens": torch.tensor(lengths),
        "rows": rows,
        "page_table": table,
        "logit_rows": rows,
    }
    return {name: value.to(torch.int32) for name, value in inputs.items()}


DECODE_5, DECODE_100, PROMPT_300, LONG = step(*[1] * 5), step(*[1] * 100), step(300), step(1900, *[1] * 30)


def test_the_same_sizes_run_where_the_history_is_another(ranks: Any) -> None:
    (one, ran), (other, told) = ranks(), ranks()
    # The second one has seen, and captured, other steps: by itself it would decide otherwise.
    other.capture_all()
    for _ in range(40):
        other.launch(DECODE_100)
    told.clear()
    sequence = [DECODE_5, PROMPT_300, DECODE_100, LONG, *[DECODE_100] * 40, *[PROMPT_300] * 20]
    apart = 0
    for inputs in sequence:
        decided = one.decide(inputs)
        apart += other.decide(inputs) != decided
        handles = one.execute(inputs, decided), other.execute(inputs, decided)
        assert handles[0].bucket == handles[1].bucket == decided.bucket
    assert apart > 10
    assert ran == told and len(ran) == len(sequence)
    assert ran[:4] == [
        ("graph", "few", (8, 8, 8, PAGES)),
        ("instructions", "any", (384, 64, 64, 3)),
        ("instructions", "many", (112, 112, 112, 3)),
        ("instructions", "any", (2048, 64, 64, 3)),
    ]
    assert ran[43] == ("graph", "many", (112, 112, 112, PAGES)), "many steps have wanted it by then"
    assert ran[-1] == ("graph", "any", (384, 64, 64, PAGES))
    assert set(one.captured.decode) == {8, 112} and set(one.captured.prompts) == {(384, 64)}


def test_a_graph_that_is_decided_on_is_captured_where_it_is_missing(ranks: Any) -> None:
    (one, _), (other, told) = ranks("all"), ranks()
    one.capture_all()
    decided = one.decide(DECODE_100)
    assert decided == Decision("many", StepSizes(112, 112, 112, PAGES), "decode")
    assert other.decide(DECODE_100).graph is None and not other.captured.decode
    other.execute(DECODE_100, decided)
    assert set(other.captured.decode) == {112} and told == [("graph", "many", (112, 112, 112, PAGES))]


def test_deciding_launches_and_captures_nothing(ranks: Any) -> None:
    one, ran = ranks()
    decided = [one.decide(DECODE_100) for _ in range(40)]
    assert decided[0].graph is None and decided[-1].graph == "decode", "these steps are its history"
    assert not ran and not one.captured.decode and not one.captured.prompts
    assert decided[-1] is decided[-2], "a step that a graph serves takes no new object"


def test_executing_decides_nothing(ranks: Any) -> None:
    """Steps that were told do not become this rank's history."""
    (one, _), (other, _) = ranks(), ranks()
    by_instructions = other.decide(DECODE_100)
    for _ in range(40):
        one.execute(DECODE_100, by_instructions)
    assert one.decide(DECODE_100) == by_instructions


def test_a_watched_step_runs_its_instructions_and_does_not_count(ranks: Any) -> None:
    one, ran = ranks("need")
    for _ in range(3):
        one.launch(DECODE_5, lambda call: call())
    assert ran == [("instructions", "few", (5, 5, 5, 3))] * 3
    assert one.decide(DECODE_5).graph == "decode"
    with pytest.raises(InternalError, match="no graph can replay the step"):
        one.execute(DECODE_5, one.decide(DECODE_5), lambda call: call())


@pytest.mark.parametrize("capture", ["need", "idle"])
def test_steps_of_few_tokens_that_recur_get_a_graph(ranks: Any, capture: Capture) -> None:
    """A sequence of five is fed four tokens, as where a grammar forces them."""
    one, ran = ranks(capture)
    for _ in range(40):
        one.launch(step(4, 1, 1, 1, 1))
    kinds = [kind for kind, *_ in ran]
    assert kinds == ["instructions"] * _PATIENCE + ["graph"] * (40 - _PATIENCE)
    assert set(one.captured.decode) == {8} and ran[-1] == ("graph", "few", (8, 8, 8, PAGES))


def test_an_entry_of_fewer_inputs_has_no_graph(ranks: Any) -> None:
    one, _ = ranks("need")
    fewer = {name: value for name, value in DECODE_5.items() if name != "page_table"}
    one.inputs = {name: one.inputs[name] for name in fewer}
    assert one.decide(fewer) == Decision("few")


def test_an_entry_that_is_fed_no_tokens_has_one_of_each_sequence(ranks: Any) -> None:
    one, ran = ranks("need")
    one.plan = one.plan.model_copy(update={"dims": {"B": (1, 200), "P": (1, PAGES)}})
    mixed = step(20, *[1] * 4)
    assert one.decide(mixed) == Decision("few", StepSizes(8, 8, 8, PAGES), "decode") and not ran


def test_what_cannot_be_executed_is_refused(ranks: Any) -> None:
    (one, ran), (plain, _) = ranks("need"), ranks("none")
    graph = one.decide(DECODE_5)
    with pytest.raises(InternalError, match="no graph can hold steps of 8 tokens of 8 sequences"):
        plain.execute(DECODE_5, graph)  # this rank was told to capture none
    with pytest.raises(InternalError, match="no bucket class 'other'") as caught:
        one.execute(DECODE_5, replace(graph, bucket="other", graph=None))
    assert "few, many, any" in str(caught.value)
    with pytest.raises(InternalError, match="no bucket class holds a step of 5000 tokens"):
        one.decide(step(5000))
    assert not ran


def test_the_least_room_decides_the_pages() -> None:
    assert shared_pages([{"full": 700}]) == {"full": 700}
    rooms = [{"full": full, "window_64": window} for full, window in ((700, 30), (512, 40), (900, 20))]
    assert shared_pages(rooms) == {"full": 512, "window_64": 20}


def masked(inputs: dict[str, torch.Tensor], count: int) -> StepInputs:
    """The same step, of which `count` sequences have grammars."""
    layout = StepLayout.of(frozenset(INPUTS))
    sizes = StepSizes(*(inputs[name].shape[0] for name in ("tokens", "rows", "logit_rows")), 3)
    made = StepInputs(layout, torch.zeros(layout.words(sizes), dtype=torch.int32), sizes)
    for name, value in inputs.items():
        made[name].copy_(value)
    one: Any = object()
    made.masked = (one,) * count
    return made


def test_steps_with_grammars_have_graphs_of_two_parts(ranks: Any) -> None:
    one, ran = ranks("need")
    sizes = (8, 8, 8, PAGES)
    one.launch(masked(DECODE_5, 0))
    assert ran == [("graph", "few", sizes)] and not one._apart.decode.seconds
    ran.clear()
    handle = one.launch(masked(DECODE_5, 2))
    assert ran == [("graph of the forward pass", "few", sizes)], "the ending waits for the masks"
    handle.finish()
    handle.finish()
    assert ran[1:] == [("ending", "few", sizes)]
    assert set(one.captured.decode) == {8} and len(one._apart.decode.seconds) == 1
    ran.clear()
    handle = one.launch(masked(LONG, 1))
    assert [how for how, *_ in ran] == ["instructions"]
    handle.finish()
    assert handle.bucket == "any"


def test_graphs_of_two_parts_are_captured_ahead_after_the_first_grammar(ranks: Any) -> None:
    one, _ = ranks("idle")
    one.launch(masked(DECODE_5, 0))
    while one.prepare(1e9):
        pass
    assert one.captured.decode and not one._apart.decode.seconds and not one._apart.prompts.seconds
    one.launch(masked(DECODE_5, 1)).finish()
    while one.prepare(1e9):
        pass
    assert one._apart.decode.seconds.keys() == one._whole.decode.seconds.keys()
    assert one._apart.prompts.seconds.keys() == one._whole.prompts.seconds.keys()


def test_ranks_decide_alike_without_a_word_between_them(ranks: Any) -> None:
    """On a mesh, graphs are captured when a step needs them. Each rank then decides by the steps alone."""
    draw = random.Random(run_seed())
    (one, ran), (other, told) = ranks("need"), ranks("need")
    for _ in range(300):
        lengths = [1] * draw.choice((1, 3, 5, 90)) + [draw.choice((2, 70, 290))] * draw.choice((0, 0, 1))
        inputs = masked(step(*lengths), draw.choice((0, 0, 1)))
        for rank in (one, other):
            handle = rank.launch(inputs)
            if inputs.masked:
                handle.finish()
    assert ran == told, again()
    assert one.captured.decode.keys() == other.captured.decode.keys(), again()
    assert one.captured.prompts.keys() == other.captured.prompts.keys() and one._apart.decode.seconds, again()
