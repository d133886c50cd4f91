"""Which graph serves a decode step, which is captured next, and what is noticed when something has moved."""

from __future__ import annotations

import itertools

import pytest
import torch

from ingot.ir.errors import InternalError, OptionError
from ingot.ir.plan import BucketClass, BucketMemory, BucketPlan, Executable, Instruction, Plan, ResidentMemory
from ingot.runtime.cuda.addresses import Addresses
from ingot.runtime.cuda.graph_sizes import (
    _PATIENCE,
    GRAPH_ROWS,
    GraphChoice,
    capturable_sizes,
    graph_sizes,
)
from ingot.runtime.debug_switch import debugging


def test_the_largest_batch_fills_its_graph() -> None:
    assert graph_sizes(1) == [1] and graph_sizes(3) == [1, 2, 3] and graph_sizes(64) == list(GRAPH_ROWS[:11])
    assert graph_sizes(100) == [*GRAPH_ROWS[:13], 100] and graph_sizes(4096) == list(GRAPH_ROWS)
    # No more than half of a graph is padding, and of large ones a fifth.
    assert all(b <= 2 * a for a, b in itertools.pairwise(GRAPH_ROWS))
    assert all(b <= 1.25 * a for a, b in itertools.pairwise(GRAPH_ROWS) if a >= 64)


def plan(*, capturable: bool = True, prologue: str | None = None) -> Plan:
    """One token is the reference's, up to 8 an executable's, more than 64 sequences cuBLAS's, the rest rowwise's."""
    code = Executable(
        id="e", backend="triton", inputs=(), outputs=(), files=("f",), capturable=capturable, prologue=prologue
    )
    rows = (
        ("one", (1, 1), None, "ingot.linear", "reference"),
        ("few", (2, 8), None, "exe.e", "triton"),
        ("many", (65, 512), 1, "ingot.linear", "cublas"),
        ("any", (9, 4096), None, "ingot.linear", "rowwise"),
    )
    view = Instruction(target="aten.view.default", provider="reference", args=())
    buckets = tuple(
        BucketPlan(
            bucket=BucketClass(name=name, tokens=tokens, q_max=q_max),
            instructions=(view, Instruction(target=target, provider=provider, args=())),
            values={},
            memory=BucketMemory(sizes={}, activations=0, peak=0),
        )
        for name, tokens, q_max, target, provider in rows
    )
    return Plan(
        entry="main",
        dims={"B": (1, 300)},
        inputs={},
        params={},
        states={},
        outputs={},
        executables={"e": code},
        memory=ResidentMemory(weights=0, states=0, page=0, pages_per_sequence=0, inputs=0, outputs=0),
        buckets=buckets,
    )


def test_what_a_graph_cannot_hold_has_none() -> None:
    served = {size: bucket.bucket.name for size, bucket in capturable_sizes(plan()).items()}
    many = {size: "many" for size in (*range(80, 257, 16), 288, 300)}
    assert served == {2: "few", 4: "few", 8: "few", **many}
    for refused in (plan(capturable=False), plan(prologue="plan")):
        assert set(capturable_sizes(refused)) == many.keys()


def test_a_larger_graph_serves_for_a_while() -> None:
    choice = GraphChoice(GRAPH_ROWS, "idle")
    assert choice.serving(5, {}) == 8, "nothing else is there"
    assert choice.serving(5, {4, 8, 16}) == 8
    assert choice.serving(12, {4, 24}) == 24
    assert choice.serving(12, {4, 25}) == 16, "more than half of it were padding"
    choice = GraphChoice(GRAPH_ROWS, "idle")
    assert [choice.serving(20, {32}) for _ in range(_PATIENCE + 1)] == [32] * _PATIENCE + [24]
    for when in ("need", "all"):
        assert GraphChoice(GRAPH_ROWS, when).serving(20, {32}) == 24
    never = GraphChoice(GRAPH_ROWS, "none")
    assert not never.holds(1) and never.next({}) is None
    assert choice.holds(1) and choice.holds(512) and not choice.holds(513) and not choice.holds(0)


def test_the_size_nearest_to_the_last_batch_comes_next() -> None:
    choice = GraphChoice((1, 2, 4, 8, 16, 24), "idle")
    assert choice.next({1}) == 2
    choice.serving(12, {16})
    found: list[int] = [1]
    while (size := choice.next(found)) is not None:
        found.append(size)
    assert found == [1, 16, 8, 4, 2, 24]


def tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(4, 6), "kv.0": torch.zeros(3, 2)}


def test_what_has_moved_is_named() -> None:
    found = tensors()
    places = Addresses.of(found, "the graph of 8 sequences")
    places.check(found)
    found["w"].fill_(3)  # contents may change
    places.check(found)
    for change, said in (
        ({"kv.0": found["kv.0"].clone()}, "'kv.0' has moved: it is at 0x"),
        ({"w": found["w"].t()}, r"'w' has moved: it is at .* shape \[6, 4\], strides \[1, 6\]"),
        ({"w": found["w"].view(6, 4)}, r"shape \[6, 4\], strides \[4, 1\]"),
    ):
        with pytest.raises(InternalError, match=said) as caught:
            places.check({**found, **change})
        assert "the graph of 8 sequences" in str(caught.value)
    with pytest.raises(InternalError, match=r"'kv\.0' is gone"):
        places.check({"w": found["w"]})
    found["w"].set_(torch.zeros(4, 6))  # in place, and yet elsewhere
    with pytest.raises(InternalError, match="'w' has moved"):
        places.check(found)


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("INGOT_DEBUG", value)
        assert debugging() is expected
    monkeypatch.delenv("INGOT_DEBUG")
    assert debugging() is False
    monkeypatch.setenv("INGOT_DEBUG", "yes")
    with pytest.raises(OptionError, match="INGOT_DEBUG is 'yes'"):
        debugging()
