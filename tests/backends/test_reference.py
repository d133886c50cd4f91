"""The reference backend: every op by its name, whole or row by row, in place where it moves a state."""

import operator
from typing import Any

import pytest
import torch
from op_values import no_penalties
from staged import BUCKET, traced
from tiny import TINY
from torch import fx

from ingot.backends.reference.emit import Reference, Rowwise
from ingot.backends.reference.load import load_op, load_rowwise
from ingot.ir.backend import Builder, FunctionBackend, Yes, sources_of, toolchain_of
from ingot.ir.errors import BackendError
from ingot.ir.machine.target import Target
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS, Op, Sample
from ingot.ir.ops.aten import ATEN
from ingot.ir.program import VIEWS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _copied(sample: Sample) -> tuple[list[Any], dict[str, Any]]:
    return [item.clone() if isinstance(item, torch.Tensor) else item for item in sample.args], sample.kwargs


def _results(op: Op, rowwise: bool, sample: Sample) -> tuple[torch.Tensor, ...]:
    """What the backend computes; of an op with states what it returns, then the states that it moved in place."""
    args, kwargs = _copied(sample)
    found = (load_rowwise if rowwise else load_op)(f"ingot.{op.name}")(*args, **kwargs)
    returned = () if found is None else found if isinstance(found, tuple) else (found,)
    named = op.bind(args, kwargs)
    return (*returned, *(named[name] for name in op.states))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rowwise", [False, True], ids=["reference", "rowwise"])
@pytest.mark.parametrize("name", [name for name, op in OPS.items() if not op.across])
def test_every_op_is_its_reference(name: str, rowwise: bool, dtype: torch.dtype) -> None:
    op = OPS[name]
    for sample in op.samples(torch.Generator().manual_seed(5), dtype):
        expected = op.reference(*sample.args, **sample.kwargs)
        expected = expected if isinstance(expected, tuple) else (expected,)
        found = _results(op, rowwise, sample)
        assert len(found) == len(expected)
        for left, right in zip(found, expected, strict=True):
            assert left.dtype == right.dtype
            assert (problem := compare(left, right, right.dtype)) is None, problem
            if not rowwise:
                assert torch.equal(left, right)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if not op.states and not op.across])
def test_nothing_given_is_changed(name: str) -> None:
    for rowwise in (False, True):
        for sample in OPS[name].samples(torch.Generator().manual_seed(5), torch.float32):
            args, kwargs = _copied(sample)
            (load_rowwise if rowwise else load_op)(f"ingot.{name}")(*args, **kwargs)
            for before, after in zip(sample.args, args, strict=True):
                assert not isinstance(before, torch.Tensor) or torch.equal(before, after)


ATEN_ARGUMENTS: dict[str, list[list[Any]]] = {
    "aten.add.Tensor": [[torch.randn(3, 8), torch.randn(8)], [torch.randn(3, 8), 2]],
    "aten.mul.Tensor": [[torch.randn(3, 8), torch.randn(3, 8)], [torch.randn(3, 8), 0.5]],
    "aten.permute.default": [[torch.randn(3, 8), [1, 0]], [torch.randn(3, 4, 2), [2, 0, 1]]],
    "aten.view.default": [[torch.randn(3, 8), [-1, 2, 4]], [torch.randn(3, 8)[:, :4], [-1, 2, 2]]],
    "aten.slice.Tensor": [
        [torch.randn(3, 8), 1, 2, 6],
        [torch.randn(3, 4, 2), 0, 0, 2],
        [torch.randn(3, 4, 2), 2, 1, 2],
    ],
}


@pytest.mark.parametrize("name", ATEN)
def test_the_aten_calls_of_the_dialect(name: str) -> None:
    """What a plan runs is what the target in a graph computes."""
    for arguments in ATEN_ARGUMENTS[name]:
        found, expected = load_op(name)(*arguments), ATEN[name].overload(*arguments)
        assert torch.equal(found, expected) and found.stride() == expected.stride()
        if ATEN[name].overload in VIEWS:
            assert found.untyped_storage().data_ptr() == arguments[0].untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ["ingot.softmax", "aten.sub.Tensor", "exe.r0", ""])
def test_an_unknown_op_is_refused(name: str) -> None:
    with pytest.raises(BackendError, match=f"unknown op '{name}'"):
        load_op(name)


def _calls() -> list[fx.Node]:
    return list(traced(TINY["qwen3-biased"].config).entries["main"].calls())


def test_claims() -> None:
    """The reference takes everything at a price that others beat, and promises batch invariance for views only."""
    target = Target.detect("cpu")
    for node in _calls():
        for backend, invariant in ((Reference(), node.target in VIEWS), (Rowwise(), True)):
            answer = backend.claim([node], target, BUCKET)
            assert isinstance(answer, Yes) and answer.batch_invariant == invariant and answer.cost > 1000
    assert Reference().cost < Rowwise().cost
    assert operator.getitem in VIEWS


@pytest.mark.parametrize("backend", [Reference(), Rowwise()], ids=lambda backend: backend.name)
def test_it_builds_nothing(backend: Reference) -> None:
    assert isinstance(backend, FunctionBackend) and not isinstance(backend, Builder)
    assert not sources_of(backend) and toolchain_of(backend) == {}


@pytest.mark.parametrize("name", ["linear", "rms_norm", "add_rms_norm", "rope", "silu_mul", "embedding", "sample"])
def test_rowwise_gives_a_row_the_same_bits_in_every_batch(name: str) -> None:
    """Larger than the samples, where library products do change with the batch."""
    generator = torch.Generator().manual_seed(7)
    rows = 37
    x, weight = torch.randn(rows, 160, generator=generator), torch.randn(96, 160, generator=generator)
    arguments: dict[str, tuple[list[Any], int, dict[str, Any]]] = {
        # the arguments, how many of them have a row per token (but for the state of counts), attributes
        "linear": ([x, weight], 1, {}),
        "rms_norm": ([x, weight[0]], 1, {"eps": 1e-5}),
        "add_rms_norm": ([x, x.flip(0), weight[0]], 2, {"eps": 1e-5}),
        "rope": ([x.view(rows, 10, 16), torch.arange(rows, dtype=torch.int32), torch.randn(rows, 16)], 2, {}),
        "silu_mul": ([x, x.flip(0)], 2, {}),
        "embedding": ([torch.arange(rows, dtype=torch.int32), weight], 1, {}),
        "sample": (
            [
                x,
                torch.full((rows,), 0.8),
                torch.full((rows,), 20, dtype=torch.int32),
                torch.full((rows,), 0.9),
                torch.zeros(rows),
                torch.full((rows,), 0.9),
                torch.arange(rows),
                torch.arange(rows, dtype=torch.int32),
                *no_penalties(rows, 160),
            ],
            14,
            {},
        ),
    }
    args, counted, kwargs = arguments[name]
    run = load_rowwise(f"ingot.{name}")

    def taken(rows: slice) -> tuple[torch.Tensor, ...]:
        cut = [arg[rows] if index < counted and len(arg) == len(x) else arg for index, arg in enumerate(args)]
        found = run(*cut, **kwargs)
        return found if isinstance(found, tuple) else (found,)

    whole = taken(slice(None))
    for begin, end in ((0, 1), (36, 37), (5, 9), (11, 37)):
        for part, all_rows in zip(taken(slice(begin, end)), whole, strict=True):
            assert torch.equal(part, all_rows[begin:end])
