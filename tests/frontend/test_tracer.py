"""What a definition can write, what its text is then, and what becomes of all else: an error that names the line."""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exported import exported_program
from torch import nn
from toy_ops import toy_ops

from ingot.frontend.tracer import Tracer
from ingot.ir import ops, recipe
from ingot.ir.errors import ConfigError
from ingot.ir.ops import OPS, Op, Sample, define
from ingot.ir.placements import whole
from ingot.ir.program import ParamSpec, Program, Stage
from ingot.ir.text import print_call, print_program
from ingot.ir.types import Dim, TensorType
from ingot.ir.verify import verify
from ingot.models.architectures import Entry

INPUTS = {
    "x": TensorType(torch.float32, ("T", 8)),
    "y": TensorType(torch.float32, ("T", 8)),
    "rows": TensorType(torch.int32, ("L",)),
}
Forward = Callable[..., Any]


class Module(nn.Module):
    """A definition of one line, which has a weight, one that it does not use, and no layers."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.written = forward
        self.weight, self.unused = (nn.Parameter(torch.empty(6, 8, device="meta")) for _ in range(2))
        self.constant = torch.empty(8, device="meta")

    def forward(self, x: Any, y: Any, rows: Any) -> Any:
        return self.written(self, x, y, rows)


def traced(module: nn.Module) -> Program:
    program = Program("main", Stage.TRACED, {name: Dim(name, 1, 64) for name in "TL"})
    tracer = Tracer(program, module, "definition toy, entry main")
    for name, parameter in module.named_parameters():
        spec = ParamSpec(TensorType(parameter.dtype, tuple(parameter.shape)), recipe.source(name))
        tracer.add_param(parameter, name, spec)
    program.set_outputs({f"out{place}": node for place, node in enumerate(tracer.run(INPUTS))})
    program.remove_unused_params()
    return program


def by_torch_export(module: nn.Module, program: Program) -> Program:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return exported_program("main", Entry(module, INPUTS, program.outputs), program, program.params, names)


def without_origins(program: Program) -> str:
    """The text; torch.export sees no files but those of models/."""
    return re.sub(r"  # .*", "", print_program(program))


SPELLINGS: dict[str, tuple[Forward, str]] = {
    "sum": (lambda m, x, y, rows: x + y, "aten.add.Tensor(%x, %y)"),
    "number on the left": (lambda m, x, y, rows: 1.5 + x, "aten.add.Tensor(%x, 1.5)"),
    "whole number": (lambda m, x, y, rows: 2 * x, "aten.mul.Tensor(%x, 2)"),
    "sum with alpha": (lambda m, x, y, rows: x.add(y, alpha=2), "aten.add.Tensor(%x, %y, alpha=2)"),
    "sum with the default": (lambda m, x, y, rows: x.add(y, alpha=1), "aten.add.Tensor(%x, %y)"),
    "function of torch": (lambda m, x, y, rows: torch.mul(x, y), "aten.mul.Tensor(%x, %y)"),
    "op of aten": (lambda m, x, y, rows: torch.ops.aten.add.Tensor(x, y), "aten.add.Tensor(%x, %y)"),
    "view": (lambda m, x, y, rows: x.view(-1, 2, 4), "aten.view.default(%x, [-1, 2, 4])"),
    "view by a list": (lambda m, x, y, rows: x.view([-1, 2, x.shape[1] // 2]), "aten.view.default(%x, [-1, 2, 4])"),
    "permute": (lambda m, x, y, rows: x.permute(1, 0), "aten.permute.default(%x, [1, 0])"),
    "slice": (lambda m, x, y, rows: x[:, 2:4], "aten.slice.Tensor(%x, 1, 2, 4)"),
    "slice from the end": (lambda m, x, y, rows: x[:, -2:], f"aten.slice.Tensor(%x, 1, -2, {2**63 - 1})"),
    "slice of the last axis": (lambda m, x, y, rows: x[..., :4], "aten.slice.Tensor(%x, 1, 0, 4)"),
    "slice with steps": (lambda m, x, y, rows: x[:, ::2], f"aten.slice.Tensor(%x, 1, 0, {2**63 - 1}, 2)"),
    "parameter": (lambda m, x, y, rows: ops.linear(x, m.weight), "ingot.linear(%x, %weight)"),
    "default given": (lambda m, x, y, rows: ops.linear(x, m.weight, None), "ingot.linear(%x, %weight)"),
    "by name": (lambda m, x, y, rows: ops.linear(weight=m.weight, x=x), "ingot.linear(%x, %weight)"),
    "op of torch.ops": (lambda m, x, y, rows: torch.ops.ingot.linear(x, m.weight), "ingot.linear(%x, %weight)"),
    "parameter alone": (lambda m, x, y, rows: ops.linear(x, m.weight[:3] * 2), "ingot.linear(%x, %mul)"),
    "number and parameter": (lambda m, x, y, rows: ops.linear(x, 2 * m.weight), "ingot.linear(%x, %mul)"),
    "parameter in front": (lambda m, x, y, rows: m.weight.view(48)[:8] + x, "aten.add.Tensor(%slice_1, %x)"),
    "whole number for a float": (lambda m, x, y, rows: ops.soft_cap(x, cap=3), "ingot.soft_cap(%x, cap=3.0)"),
    "dtype": (lambda m, x, y, rows: ops.cast(x, dtype=m.weight.dtype), "ingot.cast(%x, dtype=f32)"),
    "sizes of the model": (lambda m, x, y, rows: x * m.weight.shape[0] ** 0.5, f"aten.mul.Tensor(%x, {6**0.5})"),
    "constants": (lambda m, x, y, rows: x * torch.tensor(0.5).item(), "aten.mul.Tensor(%x, 0.5)"),
    "equal sizes": (lambda m, x, y, rows: x + y if x.shape == y.shape else x, "aten.add.Tensor(%x, %y)"),
    "another symbol": (lambda m, x, y, rows: ops.select_rows(x, rows), "ingot.select_rows(%x, %rows)"),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_what_a_definition_can_write(case: str) -> None:
    forward, written = SPELLINGS[case]
    module = Module(forward)
    program = traced(module)
    verify(program)
    *_, last = program.calls()
    assert f" = {written}" in print_call(last)
    assert without_origins(program) == without_origins(by_torch_export(module, program))


def halves_op() -> dict[str, Op]:
    samples = lambda g, dtype: [Sample((torch.ones(2, 4),))]  # noqa: E731

    @define(placement=whole, flops=1, samples=samples)
    def toy_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The halves of the last axis."""
        left, right = x.chunk(2, -1)
        return left.clone(), right.clone()

    return {"toy_halves": toy_halves}


def test_an_op_with_several_results() -> None:
    def swapped(m: Any, x: Any, y: Any, rows: Any) -> Any:
        left, right = OPS["toy_halves"](x)
        return right, left

    with toy_ops(halves_op):
        module = Module(swapped)
        program = traced(module)
        assert without_origins(program) == without_origins(by_torch_export(module, program))
    assert [node.name for node in program.output_nodes().values()] == ["item_1", "item"]


def in_place(m: Any, x: Any, y: Any, rows: Any) -> Any:
    x += y
    return x


def written(m: Any, x: Any, y: Any, rows: Any) -> Any:
    x[:, 2:] = y
    return x


def by_data(m: Any, x: Any, y: Any, rows: Any) -> Any:
    return x if x else y


def by_size(m: Any, x: Any, y: Any, rows: Any) -> Any:
    return x if x.shape[0] > 16 else y


def of_another_run(m: Any, x: Any, y: Any, rows: Any) -> Any:
    return x + LEFT_OVER[0]


NO_CALL = "and a traced program has no such call"
REFUSED: dict[str, tuple[Forward, str]] = {
    "a function of torch": (lambda m, x, y, rows: F.silu(x), f"calls torch.nn.functional.silu, {NO_CALL}"),
    "of a module of torch": (lambda m, x, y, rows: nn.Softmax(-1)(x), f"calls torch.nn.functional.softmax, {NO_CALL}"),
    "of a list": (lambda m, x, y, rows: torch.cat([x, y]), f"calls torch.cat, {NO_CALL}"),
    "a method": (lambda m, x, y, rows: x.to(torch.float16), f"calls Tensor.to, {NO_CALL}"),
    "a method of a parameter": (lambda m, x, y, rows: x + m.weight.sum(), f"calls torch.Tensor.sum, {NO_CALL}"),
    "an attribute of a parameter": (lambda m, x, y, rows: x + m.weight.T, f"calls torch.Tensor.T.__get__, {NO_CALL}"),
    "an operator": (lambda m, x, y, rows: x - y, f"calls -, {NO_CALL}"),
    "an operator of a number": (lambda m, x, y, rows: 1 / x, f"calls /, {NO_CALL}"),
    "a comparison": (lambda m, x, y, rows: x == y, f"calls ==, {NO_CALL}"),
    "an index": (lambda m, x, y, rows: x[:, 0], rf"calls x\[0\], {NO_CALL}"),
    "a new axis": (lambda m, x, y, rows: x[None], rf"calls x\[None\], {NO_CALL}"),
    "an op of aten": (lambda m, x, y, rows: torch.ops.aten.relu.default(x), f"calls aten.relu.default, {NO_CALL}"),
    "an op of later stages": (
        lambda m, x, y, rows: ops.add_rms_norm(x, y, m.constant, eps=1.0),
        f"calls ingot.add_rms_norm, {NO_CALL}",
    ),
    "a sum in place": (in_place, rf"calls \+=, {NO_CALL}"),
    "a part written": (written, rf"calls x\[…\] =, {NO_CALL}"),
    "a constant tensor": (lambda m, x, y, rows: x + m.constant, r"gets a tensor \[8\] that is neither"),
    "a constant tensor in front": (lambda m, x, y, rows: torch.ones(8) * x, r"gets a tensor \[8\] that is neither"),
    "an object": (lambda m, x, y, rows: ops.cast(x, dtype={}), r"gets \{\}, a dict"),
    "shapes that do not fit": (
        lambda m, x, y, rows: x + rows,
        r"aten.add.Tensor cannot take \(f32\[T, 8\], i32\[L\]\).*length L at",
    ),
    "an unknown argument": (lambda m, x, y, rows: ops.soft_cap(x, cup=3.0), "ingot.soft_cap cannot take .*cap"),
    "a decision by data": (by_data, r"reads a value's data, by bool\(\)"),
    "a number out of data": (lambda m, x, y, rows: x * int(rows), r"reads a value's data, by int\(\)"),
    "iteration": (lambda m, x, y, rows: next(iter(x)), "reads a value's data, by iteration"),
    "a decision by a size": (by_size, "compares the size T"),
    "a size and a number": (lambda m, x, y, rows: x if x.shape == (4, 8) else y, "compares the size T"),
    "two sizes": (lambda m, x, y, rows: x if x.shape[0] == rows.shape[0] else y, "compares the size T"),
    "a loop over a size": (lambda m, x, y, rows: [x for _ in range(x.size(0))], "needs the number of the size T"),
    "arithmetic on a size": (lambda m, x, y, rows: x.view(x.shape[0] * 8), "computes with the size T"),
    "a root of a size": (lambda m, x, y, rows: x * math.sqrt(x.shape[0]), "needs the number of the size T"),
    "a size as an argument": (
        lambda m, x, y, rows: x.view(x.shape[0], 2, 4),
        "passes to a call the size T.*write -1 for it",
    ),
    "rows of a step": (lambda m, x, y, rows: x[:4], "slices an axis of T"),
    "a value of another run": (of_another_run, "gets %x: f32.*, a Value"),
}
LEFT_OVER: list[Any] = []


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_definition_cannot_write(case: str) -> None:
    forward, said = REFUSED[case]
    traced(Module(lambda m, x, y, rows: LEFT_OVER.append(x) or x))
    with pytest.raises(ConfigError, match=f"(?s){said}") as caught:
        traced(Module(forward))
    lines, first = inspect.getsourcelines(forward)
    definition, entry, place = caught.value.where.split(", ")
    file, _, line = place.rpartition(":")
    assert (definition, entry, file) == ("definition toy", "entry main", __file__)
    assert first <= int(line) < first + len(lines) and caught.value.expected


def test_a_value_that_is_left_over() -> None:
    kept: list[Any] = []
    program = traced(Module(lambda m, x, y, rows: kept.append(x) or x))
    for use in (lambda x: x + 1, lambda x: torch.add(x, x), F.silu):
        with pytest.raises(ConfigError, match="gets a value of a trace that has ended"):
            use(kept[0])
    assert not list(program.calls())


@pytest.mark.parametrize("returned", [None, 3.0, {"logits": 1}])
def test_what_a_module_cannot_return(returned: Any) -> None:
    with pytest.raises(ConfigError, match=r"the module returns .*, a ") as caught:
        traced(Module(lambda m, x, y, rows: returned))
    assert caught.value.where == "definition toy, entry main"


def test_an_error_of_the_definition_itself_stays_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        traced(Module(lambda m, x, y, rows: x * (1 / 0)))
    traced(Module(lambda m, x, y, rows: x))  # and the tracer has left torch as it was
    assert torch.ones(2).sum().item() == 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8, device="meta"))

    def scaled(self, x: Any) -> Any:
        return x * 2  # line of the call

    def forward(self, x: Any) -> Any:
        return ops.linear(self.scaled(x), self.weight)  # line of the layer


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Any, y: Any, rows: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return outside(x)  # line of the definition


def outside(x: Any) -> Any:
    return x + 1


def test_a_call_names_its_layer_and_line() -> None:
    """Of a call that several layers share the line in the layer, of others that in the definition."""
    lines = {text.rpartition("# line of the ")[2]: number for number, text in enumerate(open(__file__), 1)}  # noqa: SIM115
    layer, definition = lines["layer\n"], lines["definition\n"]
    origins = [node.meta["origin"] for node in traced(Stack()).calls()]
    of_layers = [f"layer {number}, frontend/test_tracer.py:{layer}" for number in (0, 0, 1, 1)]
    assert origins == [*of_layers, f"frontend/test_tracer.py:{definition}"]
