"""Guess which call of a region an executable computes wrongly, by trying wrong variants of the region's body.

Compiled code cannot be read. In each variant one call is left out, has two arguments swapped, or has another constant.
If the executable's results are those of a variant, the changed call is at fault.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ingot.debug.bisect.execution.tensor_check import check_tensor
from ingot.ir.errors import IngotError
from ingot.ir.interpret import interpret
from ingot.ir.program import Program
from ingot.ir.types import TensorType

# Factors that turn a right constant into a wrong one. 0 leaves it out; the others are typical errors, such as a power
# of ten, a small factor or another sign.
_FACTORS = (0.0, 1e-3, 0.01, 0.1, 1 / 3, 0.5, 0.9, 1.1, 1.5, 2.0, 3.0, 5.0, 10.0, 100.0, 1e3, -1.0)


def explained(
    body: Program, inputs: Sequence[torch.Tensor], found: Sequence[torch.Tensor], dtype: torch.dtype | None
) -> tuple[fx.Node, str] | None:
    """Explain the wrong results of a region: search for a change of one call that yields these results.

    A change is, for example, to swap two arguments. Return the call and a description of the change. Return None if no
    tried change yields the results.

    `found` are the wrong results, and `inputs` the tensors that the region ran on. `dtype` is the dtype of lowest
    precision in the body. It sets the tolerance.
    """
    given = dict(zip(body.input_types(), inputs, strict=True))
    for node in body.calls():
        for how, change in _ways(node):
            variant = body.copy()
            change(next(one for one in variant.calls() if one.name == node.name))
            try:
                plain, exact = (list(interpret(variant, given, exact=wide).values()) for wide in (False, True))
            except (IngotError, RuntimeError, ValueError, IndexError, TypeError):
                continue  # a variant that fails cannot have made the results
            results = zip(found, plain, exact, strict=True)
            if not any(check_tensor(value, p, e, dtype) for value, p, e in results):
                return node, how
    return None


def _ways(node: fx.Node) -> Iterator[tuple[str, Callable[[fx.Node], None]]]:
    """Yield plausible compiler errors to try on a call, such as swapped arguments.

    Each is a pair: a description, and a function that makes the error in a copy of the call.
    """
    tensors = [place for place, arg in enumerate(node.args) if isinstance(arg, fx.Node)]
    if node.target is operator.getitem:
        return
    types: Mapping[int, Any] = {place: node.args[place].meta["type"] for place in tensors}  # type: ignore[union-attr]
    for place in tensors:
        if isinstance(node.meta["type"], TensorType) and types[place].shape == node.meta["type"].shape:
            yield f"left out, with its argument {place} in place of the result", _bypassed(place)
    for first in tensors:
        for second in tensors:
            if first < second and types[first] == types[second]:
                yield f"with its arguments {first} and {second} swapped", _swapped(first, second)
        if isinstance(types[first], TensorType) and len(types[first].shape) == 2:
            yield f"with its argument {first} transposed", _replaced(first, _transposed)
        yield f"with zeros for its argument {first}", _replaced(first, _zeros)
    for name, value in node.kwargs.items():
        if isinstance(value, bool):
            yield f"with {name}={not value}", _option(name, not value)
        elif isinstance(value, float):
            for factor in _FACTORS:
                yield f"with {name}={value * factor:.6g}", _option(name, value * factor)


def _bypassed(place: int) -> Callable[[fx.Node], None]:
    def change(node: fx.Node) -> None:
        source = node.args[place]
        assert isinstance(source, fx.Node)
        node.replace_all_uses_with(source)

    return change


def _swapped(first: int, second: int) -> Callable[[fx.Node], None]:
    def change(node: fx.Node) -> None:
        args = list(node.args)
        args[first], args[second] = args[second], args[first]
        node.args = tuple(args)

    return change


def _option(name: str, value: Any) -> Callable[[fx.Node], None]:
    def change(node: fx.Node) -> None:
        node.kwargs = {**node.kwargs, name: value}

    return change


def _replaced(place: int, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[fx.Node], None]:
    """Return a function that changes a call: its argument number `place` is replaced by `make(argument)`."""

    def change(node: fx.Node) -> None:
        source = node.args[place]
        assert isinstance(source, fx.Node)
        with node.graph.inserting_before(node):
            made = node.graph.call_function(make, (source,))
        made.meta["type"] = source.meta["type"]
        node.update_arg(place, made)

    return change


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().view(tensor.shape)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor)
