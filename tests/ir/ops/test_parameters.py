"""Arguments of a call by parameter: as Python itself binds them, for ops of ours and of aten."""

import inspect
from typing import Any

import pytest
import torch
from torch import fx

from ingot.cli.views import lines
from ingot.ir.errors import VerifyError
from ingot.ir.ops import OPS, linear, rope, select_rows
from ingot.ir.ops.aten import ATEN
from ingot.ir.ops.parameters import Parameters
from ingot.ir.program import named_arguments, named_values


@pytest.mark.parametrize("name", OPS)
def test_samples_bind_as_python_binds_them(name: str) -> None:
    op = OPS[name]
    for sample in op.samples(torch.Generator().manual_seed(1), torch.float32):
        wanted = inspect.signature(op.reference).bind(*sample.args, **sample.kwargs)
        wanted.apply_defaults()
        found = op.bind(sample.args, sample.kwargs)
        assert list(found) == list(wanted.arguments)
        assert all(found[key] is value for key, value in wanted.arguments.items())


def _some(x: int, y: int, z: int | None = None, *, kind: str, times: float = 1.0) -> None:
    pass


@pytest.mark.parametrize(
    "args,kwargs",
    [
        ((1, 2), {"kind": "a"}),
        ((1,), {"y": 2, "kind": "a", "times": 2.0}),
        ((), {"kind": "a", "y": 1, "x": 0, "z": 5}),
        ((1, 2, 3, "a"), {}),
        ((1, 2), {}),
        ((1,), {"kind": "a"}),
        ((1, 2), {"x": 1, "kind": "a"}),
        ((1, 2), {"kind": "a", "other": 1}),
    ],
)
def test_a_call_fits_where_python_says_so(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    signature, parameters = inspect.signature(_some), Parameters.of(_some)
    try:
        wanted = signature.bind(*args, **kwargs)
    except TypeError as error:
        with pytest.raises(TypeError) as found:
            parameters.bind(args, kwargs)
        assert str(found.value).split(":")[0] in (str(error).split(":")[0], "missing a required argument")
        return
    wanted.apply_defaults()
    assert parameters.bind(args, kwargs) == dict(wanted.arguments)


def test_calls_of_aten_are_named_as_the_dialect_names_them() -> None:
    assert ATEN["aten.slice.Tensor"].bind((1, 2), {}) == {"x": 1, "dim": 2, "start": None, "end": None, "step": 1}
    assert ATEN["aten.add.Tensor"].bind((1, 2), {"alpha": 3}) == {"x": 1, "other": 2, "alpha": 3}
    assert all(name == op.name and op.parameters.names[0] == "x" for name, op in ATEN.items())


def test_the_arguments_of_nodes() -> None:
    graph = fx.Graph()
    x, weight, rows = (graph.placeholder(name) for name in ("x", "weight", "rows"))
    product = graph.call_function(linear.overload, (x,), {"weight": weight})
    assert named_arguments(product) == {"x": x, "weight": weight, "bias": None}
    assert named_values(product) == {"x": x, "weight": weight}
    turned = graph.call_function(rope.overload, (x, rows, weight))
    assert named_arguments(turned)["interleaved"] is False
    added = graph.call_function(ATEN["aten.add.Tensor"].overload, (product, 2))
    assert named_arguments(added) == {"x": product, "other": 2, "alpha": 1}
    with pytest.raises(VerifyError, match=r"does not fit ingot\.select_rows: missing a required argument: 'rows'"):
        named_arguments(graph.call_function(select_rows.overload, (x,)))


def test_what_text_needs_of_views_is_what_the_table_says() -> None:
    assert set(lines._VIEWS) == {name for name, op in ATEN.items() if op.view}
