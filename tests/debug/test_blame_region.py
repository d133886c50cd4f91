"""Faults inside compiled regions. Compiling is stood in for by interpreting what the compiler is given to see."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from staged import staged, traced
from tiny import CHECKPOINTS

from ingot.backends.inductor.emit import Inductor
from ingot.debug.bisect.execution import blame_region
from ingot.debug.bisect.execution.blame_region import overflow_start, region_fault, with_outputs
from ingot.debug.bisect.verdict import Kind
from ingot.ir.interpret import interpret
from ingot.ir.machine.target import Target
from ingot.ir.ops import op_of
from ingot.ir.program import Program, Region
from ingot.ir.types import TensorType
from ingot.ir.verify import verify

View = Callable[[Program], Program]


@pytest.fixture(scope="module")
def region() -> Region:
    """From attention in one layer to attention in the next: products, norms, a gate and views."""
    _, lowered = staged(traced(CHECKPOINTS["mistral-window"].config))
    (program,) = lowered.programs.values()
    return max(program.regions.values(), key=lambda one: len(list(one.body.calls())))


@pytest.fixture(scope="module")
def inputs(region: Region) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [_sample(value_type, generator) for value_type in region.body.input_types().values()]


def _sample(value_type: TensorType, generator: torch.Generator) -> torch.Tensor:
    shape = value_type.bind({"T": 21})
    if not value_type.dtype.is_floating_point:
        return torch.arange(21, dtype=value_type.dtype)  # positions
    # Products of about the size of their inputs, as in a model.
    return torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) == 2 else 1)


def run(body: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(interpret(body, dict(zip(body.input_types(), inputs, strict=True))).values())


def as_is(body: Program) -> Program:
    return body


def calls_of(body: Program, name: str) -> Iterator[Any]:
    return (node for node in body.calls() if (op := op_of(node.target)) is not None and op.name == name)


def gate_and_up_swapped(body: Program) -> Program:
    seen = body.copy()
    for node in calls_of(seen, "silu_mul"):
        node.args = node.args[::-1]
    return seen


def other_epsilon(body: Program) -> Program:
    seen = body.copy()
    for node in list(calls_of(seen, "add_rms_norm"))[-1:]:
        node.kwargs = {**node.kwargs, "eps": node.kwargs["eps"] * 4}
    return seen


def no_residual(body: Program) -> Program:
    seen = body.copy()
    for node in list(calls_of(seen, "add_rms_norm"))[:1]:
        node.args = (node.args[0], node.args[0], node.args[2])
    return seen


def blamed(
    region: Region, inputs: list[torch.Tensor], stored: View, anew: View, patch: pytest.MonkeyPatch
) -> tuple[blame_region.RegionFault, int]:
    """The fault of a region whose executable was made of `stored`, where compilers are given `anew` to see; and how
    many bodies were compiled."""
    count = 0

    def compiled(bodies: Sequence[Program], *_: Any) -> list[Callable[..., list[torch.Tensor]]]:
        nonlocal count
        count += len(bodies)
        for body in bodies:
            verify(body)
        return [functools.partial(lambda seen, *args: run(seen, args), anew(body)) for body in bodies]

    patch.setattr(blame_region, "_compiled", compiled)
    found = run(stored(region.body), inputs)
    return region_fault(region, inputs, found, Inductor(), Target.detect("cpu")), count


@pytest.mark.parametrize(
    ("fault", "op"),
    [(gate_and_up_swapped, "silu_mul"), (other_epsilon, "add_rms_norm"), (no_residual, "add_rms_norm")],
)
def test_the_node_is_named_by_the_values_inside(
    fault: View, op: str, region: Region, inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, count = blamed(region, inputs, fault, fault, monkeypatch)
    assert found.node is not None and found.node.target is not None and not found.stored
    wrong = fault(region.body)
    changed = [
        node.name for node, other in zip(region.body.calls(), wrong.calls(), strict=True) if differs(node, other)
    ]
    assert [found.node.name] == changed and op in str(found.node.target)
    assert "compiled with all its values as outputs" in found.text and count == 2


def differs(node: Any, other: Any) -> bool:
    return str(node.args) != str(other.args) or node.kwargs != other.kwargs


@pytest.mark.parametrize("fault", [gate_and_up_swapped, other_epsilon])
def test_an_executable_of_something_else(
    fault: View, region: Region, inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body compiled anew is right; what the executable gives tells which call it does otherwise."""
    if fault is other_epsilon:  # by a factor that is tried
        monkeypatch.setattr("ingot.debug.bisect.execution.region_variants._FACTORS", (0.5, 4.0))
    found, _ = blamed(region, inputs, fault, as_is, monkeypatch)
    assert found.stored and found.node is not None
    assert "compiled anew gives the right results; its results are those of" in found.text


def test_an_executable_of_who_knows_what(
    region: Region, inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def strange(body: Program) -> Program:
        seen = other_epsilon(gate_and_up_swapped(body))
        return no_residual(seen)

    found, _ = blamed(region, inputs, strange, as_is, monkeypatch)
    assert found.stored and found.node is None and found.text == "the same body compiled anew gives the right results"


def test_a_fault_that_vanishes_when_opened_is_found_by_prefixes(
    region: Region, inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when two calls are fused wrongly: only where the value between them is no output."""
    (gate,) = calls_of(region.body, "silu_mul")

    def fused(body: Program) -> Program:
        names = {node.name for node in body.calls()}
        opened = gate.name in {node.name for node in body.output_nodes().values()} and len(body.outputs) > 4
        if opened or gate.name not in names:
            return body
        seen = body.copy()
        node = next(one for one in seen.calls() if one.name == gate.name)
        with seen.graph.inserting_after(node):
            added = seen.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.01))
        added.meta["type"] = node.meta["type"]
        node.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)
        return seen

    found, count = blamed(region, inputs, fused, fused, monkeypatch)
    assert found.node is not None and found.node.name == gate.name and not found.stored
    assert f"compiled up to '{gate.name}'" in found.text
    assert count <= 2 + len(list(region.body.calls())).bit_length(), "a binary search"


def test_with_outputs_keeps_only_what_they_need(region: Region, inputs: list[torch.Tensor]) -> None:
    nodes = [node for node in region.body.calls() if isinstance(node.meta["type"], TensorType)]
    part = with_outputs(region.body, nodes[:2], "part")
    verify(part)
    assert {node.name for node in part.calls()} <= {node.name for node in region.body.calls()}
    assert len(list(part.calls())) < len(list(region.body.calls()))
    values: dict[str, torch.Tensor] = {}
    interpret(
        region.body,
        dict(zip(region.body.input_types(), inputs, strict=True)),
        watch=lambda node, value: values.update({node.name: value}),
    )
    for node, value in zip(nodes[:2], run(part, inputs), strict=True):
        assert torch.equal(value, values[node.name])


def test_where_an_overflow_starts(region: Region, inputs: list[torch.Tensor]) -> None:
    assert overflow_start(region.body, inputs) is None
    (gate,) = calls_of(region.body, "silu_mul")
    large = [1e30 * one if one.dim() == 2 and number > 3 else one for number, one in enumerate(inputs)]
    start = overflow_start(region.body, large)
    assert start is not None and start[1] > torch.finfo(torch.float32).max and start[0].name == gate.name


@pytest.mark.slow
def test_a_region_that_is_emitted_wrongly(
    artifact: Callable[..., Path], blame: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the real compiler, which is given another body than the program has; and the artifact holds what it made."""
    from ingot.compile.emitter import Emitter

    emit = Emitter.emit

    def faulty(self: Emitter, regions: Sequence[Region]) -> Any:
        return emit(self, [Region(one.name, gate_and_up_swapped(one.body), one.backend) for one in regions])

    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Emitter, "emit", faulty)
    monkeypatch.setattr(Emitter, "measure", lambda self, regions, sizes: {one.name: 0 for one in regions})
    folder = artifact("mistral-cut", max_batch=4, max_tokens=256, weight_budget=1.0)
    monkeypatch.setattr("ingot.debug.bisect.execution.blame_execution.exe_key", lambda *_: "unknown")
    verdict = blame(folder, "mistral-cut", reproducer=tmp_path / "fault")
    assert verdict is not None and (verdict.kind, verdict.blamed) == (Kind.BACKEND, "inductor"), verdict
    assert verdict.op == "ingot.silu_mul" and verdict.layer == 0 and verdict.reproducer is not None
