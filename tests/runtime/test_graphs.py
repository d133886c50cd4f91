"""Captured steps as far as no GPU is needed: what is captured in which time, and who may still hold what it gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch

from ingot.ir.artifact.plan import BucketClass
from ingot.ir.errors import InternalError
from ingot.runtime.cuda.graphs import captured as graphs_module
from ingot.runtime.cuda.graphs.captured import Graphs
from ingot.runtime.cuda.graphs.choice import DecodeChoice
from ingot.runtime.cuda.graphs.memory import GraphMemory
from ingot.runtime.steps.step import StepLayout, StepSizes
from ingot.runtime.steps.step_outputs import StepOutputs

FEW, MORE = BucketClass(name="few", tokens=(1, 4)), BucketClass(name="more", tokens=(5, 64))


def step(count: int) -> StepSizes:
    return StepSizes(count, count, count, 1)


class Graph:
    """A graph that takes `seconds[its class]` to capture, by a clock of its own."""

    now = 0.0
    seconds: Mapping[str, float] = {"few": 0.25, "more": 2.0}

    def __init__(
        self, bucket: Any, layout: StepLayout, step_outputs: StepOutputs, size: StepSizes, *rest: Any, **more: Any
    ) -> None:
        Graph.now += self.seconds[bucket]
        self.what, self.size = f"the graph of {size.B}", size
        self.buffers = {"tokens": torch.zeros(size.B)}

    def launch(self, inputs: Any, step: StepSizes, *, returns_logprobs: bool) -> StepSizes:
        return self.size


def graphs(monkeypatch: pytest.MonkeyPatch, resident: dict[str, torch.Tensor] | None = None) -> Any:
    monkeypatch.setattr(graphs_module, "StepGraph", Graph)
    monkeypatch.setattr(graphs_module.time, "perf_counter", lambda: Graph.now)
    classes = {step(count): FEW if count <= 4 else MORE for count in (1, 2, 4, 8, 16)}
    buckets: Any = {size: one.name for size, one in classes.items()}
    layout, step_outputs, no_memory = StepLayout.usual(), StepOutputs(("tokens",), {"tokens": "L"}), cast(Any, None)
    choice = DecodeChoice(classes, "idle")
    return Graphs(choice, buckets, layout, step_outputs, {}, no_memory, torch.device("cpu"), resident)


def launched(made: Any, size: StepSizes) -> Any:
    """The size of the graph that is launched where `size` was decided."""
    return made.launch({}, size, size, returns_logprobs=False)


def test_a_capture_is_begun_where_there_is_time_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = graphs(monkeypatch)
    assert not made.capture_next(1e9) and not made.seconds, "no capture was measured yet"
    made.capture_for(1)
    assert not made.capture_next(0.49) and list(made.seconds) == [step(1)]  # half of the time is certain
    assert made.capture_next(0.51) and made.capture_next(0.51)
    assert [size.B for size in made.seconds] == [1, 2, 4]
    assert made.capture_next(0.51), "no capture of another class was measured yet"
    assert made.seconds[step(8)] == 2.0 and not made.capture_next(3.9)
    assert made.capture_next(4.1) and not made.capture_next(1e9), "all are there"
    assert launched(made, step(8)) == step(8)
    with pytest.raises(InternalError, match="no graph can hold steps of 17 tokens"):
        launched(made, step(17))


def test_without_an_end_of_the_time_one_is_captured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = graphs(monkeypatch)
    assert made.capture_next() and [size.B for size in made.seconds] == [1]


def test_what_has_moved_stops_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = {"w": torch.zeros(3)}
    made = graphs(monkeypatch, resident)
    assert launched(made, step(2)) == launched(made, step(2)) == step(2)
    resident["w"] = torch.zeros(3)
    with pytest.raises(InternalError, match="'w' has moved"):
        launched(made, step(2))
    assert launched(made, step(4)) == step(4), "captured where it lies now"


@pytest.mark.parametrize("strict", [True, False])
def test_outputs_are_lent_until_the_next_launch(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    memory, outputs = GraphMemory(0, strict=strict), {"logits": torch.zeros(2, 3), "tokens": torch.zeros(2)}
    memory.begin_launch()
    lent = memory.lend(outputs, 1)
    assert lent.keys() == outputs.keys() and all(lent[name].data_ptr() == outputs[name].data_ptr() for name in lent)
    del lent["logits"]
    if strict:
        with pytest.raises(InternalError, match="the output 'tokens' of a step is held while the next one overwrites"):
            memory.begin_launch()
    memory.begin_launch()
    with pytest.raises(InternalError, match="the outputs of a step are read after a later step"):
        memory.lend(outputs, 1)
    memory.lend(outputs, 2)  # no reference to these is kept
    memory.begin_launch()
