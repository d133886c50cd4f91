"""A pipeline stage on a GPU, with its kernels and graphs left out: what it moves, what it captures, when it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.ir.artifact.plan import BucketClass, BucketMemory, BucketPlan, Instruction, Ref, Transfer, Transfers, Value
from ingot.ir.errors import RankError
from ingot.ir.machine.load_context import Communicator
from ingot.runtime.cuda.executor import _check_ranks
from ingot.runtime.cuda.graphs.memory import GraphMemory
from ingot.runtime.cuda.graphs.sizes import captured_together
from ingot.runtime.cuda.staged_bucket import StagedBucket
from ingot.runtime.steps.stage_line import StageLine
from ingot.runtime.steps.step import StepSizes

CPU = torch.device("cpu")


class Recorded(Communicator):
    """A stage's neighbours: what they send is in `given`, in order; what they get is in `sent`."""

    def __init__(self, place: int, given: Sequence[torch.Tensor]) -> None:
        self.place, self.size, self.given, self.sent = place, 3, list(given), list[tuple[int, torch.Tensor]]()
        self.ended = False

    @property
    def alive(self) -> bool:
        return not self.ended

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        raise AssertionError("stages do not gather")

    def send(self, x: torch.Tensor, place: int) -> None:
        self.sent.append((place, x.clone()))

    def receive(self, into: torch.Tensor, place: int) -> None:
        into.copy_(self.given.pop(0))


def add(first: str, second: str, result: str) -> Instruction:
    return Instruction(
        target="aten.add.Tensor", backend="reference", args=(Ref(ref=first), Ref(ref=second)), results=(result,)
    )


def test_a_stage_receives_before_it_computes_and_sends_before_it_forgets() -> None:
    """The middle one of three: x comes from stage 0 and goes on as y; the token comes back from stage 2."""
    plan = BucketPlan(
        bucket=BucketClass(name="any", tokens=(1, 8)),
        instructions=(add("x", "own", "y"), add("token", "token", "doubled")),
        values={
            name: Value(type="f32[T, 2]", buffer="received" if name in ("x", "token") else "pool")
            for name in ("x", "y", "token", "doubled")
        },
        memory=BucketMemory(sizes={}, activations=0, peak=0),
        ending=1,
        transfers=Transfers(
            received=(Transfer(name="x", stage=0), Transfer(name="token", stage=2)),
            sent=(Transfer(name="y", stage=2), Transfer(name="doubled", stage=0)),
        ),
    )
    line = Recorded(1, [torch.ones(3, 2), torch.full((3, 2), 5.0)])
    bucket = StagedBucket(
        plan,
        resident={},
        inputs=["own"],
        outputs=["doubled"],
        executables={},
        libraries={},
        line=StageLine(line, CPU),
    )
    bucket.begin({"own": torch.full((3, 2), 2.0)}, {"T": 3})
    assert [(place, value.mean().item()) for place, value in line.sent] == [(2, 3.0)] and len(line.given) == 1
    outputs = bucket.end({"T": 3})
    assert [(place, value.mean().item()) for place, value in line.sent] == [(2, 3.0), (0, 10.0)] and not line.given
    assert outputs["doubled"].tolist() == [[10.0, 10.0]] * 3
    assert bucket.value("y") is None, "it is forgotten"


def test_stages_capture_what_all_can_capture() -> None:
    sizes = [StepSizes(rows, rows, rows, 7) for rows in (1, 2, 4, 8)]
    mine: Any = {size: SimpleNamespace() for size in sizes}
    other = [StepSizes(size.T, size.B, size.L, 1) for size in sizes[1:]]  # a stage without a cache
    third = [StepSizes(size.T, size.B, size.L, 7) for size in sizes[:3]]
    assert list(captured_together(mine, [other, third])) == sizes[1:3]
    assert captured_together(mine, []) == mine
    assert not captured_together({StepSizes(2, 2, 2, 7, 2): mine[sizes[1]]}, [other]), (
        "shared prefixes are other graphs"
    )


def test_no_graph_is_launched_when_a_connection_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    one, other = Recorded(0, []), Recorded(0, [])
    context: Any = SimpleNamespace(communicators={"tp": one, "pp": other})
    memory = GraphMemory(0, check=lambda: _check_ranks(context))
    memory.begin_launch()
    other.ended = True
    with pytest.raises(RankError, match="one of them is gone"):
        memory.begin_launch()
    assert memory.launches == 1
