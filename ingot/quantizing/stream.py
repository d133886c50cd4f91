"""Run a traced program call by call over many texts, and replace weights on the way.

All texts pass one call before the next call begins, so each weight is read once and only one layer is in memory. Values
are float32.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.errors import VerifyError
from ingot.ir.formats import Activations
from ingot.ir.ops import op_of
from ingot.ir.program import Program, is_call, named_arguments, target_name

Read = Callable[[str], torch.Tensor]
Value = Any  # a tensor, or a tuple of tensors


@dataclass(frozen=True)
class Lane:
    """One text on its way through the program.

    - `inputs`: the program's inputs by name, for all tokens of the text
    - `like`: the lane with the same inputs whose values this lane shares until a weight of its own makes them differ;
      None: no other
    - `measured`: whether the program's output is computed for this lane
    """

    inputs: Mapping[str, torch.Tensor]
    like: int | None = None
    measured: bool = False


@dataclass(frozen=True)
class Replaced:
    """What a linear computes in a lane in place of `x @ weight.T`: `rounded(x / scales) @ weight.T`.

    - `weight`: float32 [N, K]
    - `scales`: the scales [K] of the input's channels; None: no scales
    - `activations`: how the input is rounded; None: not at all
    """

    weight: torch.Tensor
    scales: torch.Tensor | None = None
    activations: Activations | None = None

    def input(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input that the weight multiplies, for x [T, K]."""
        scaled = x if self.scales is None else x / self.scales
        return scaled if self.activations is None else self.activations.rounded(scaled, None)


# Receives a linear whose input is computed. Returns what lanes compute in its place, by the index of the lane.
AtLinear = Callable[[fx.Node], Mapping[int, Replaced]]


@dataclass
class Stream:
    """Runs a program over lanes.

    - `read`: returns a checkpoint tensor by name
    - `on_call`: receives the number of finished calls and the total
    - `watched`: by node, a function that receives the index and the value of each lane, once the node is computed
    """

    program: Program
    read: Read
    lanes: Sequence[Lane]
    on_call: Callable[[int, int], None] = lambda done, total: None
    watched: Mapping[fx.Node, Callable[[int, Value], None]] = field(default_factory=dict)
    _shared: dict[fx.Node, Value] = field(default_factory=dict)
    _own: list[dict[fx.Node, Value]] = field(default_factory=list)

    def run(self, at_linear: AtLinear) -> Iterator[tuple[int, torch.Tensor]]:
        """Run all calls. Yield the index and the output, float32, of each measured lane, in order.

        `at_linear` is called for each `linear` whose weight is a param. Raises VerifyError if a call fails.
        """
        self._own = [{} for _ in self.lanes]
        for index, lane in enumerate(self.lanes):
            if lane.like is None:
                for node in self.program.placeholders("input"):
                    self._own[index][node] = lane.inputs[str(node.target)]
        output = next(iter(self.program.output_nodes().values()))
        calls = list(self.program.calls())
        last = {source: node for node in calls for source in node.all_input_nodes}
        tail = _tail(calls, output)
        for done, node in enumerate(calls[:tail], 1):
            self._everywhere(node, at_linear)
            if (watch := self.watched.get(node)) is not None:
                for index in range(len(self.lanes)):
                    watch(index, self.value(index, node))
            self._forget(node, last)
            self.on_call(done, len(calls))
        replaced = {node: at_linear(node) for node in calls[tail:] if self._is_weighted(node)}
        for index, lane in enumerate(self.lanes):
            if lane.measured:
                for node in calls[tail:]:
                    self._own[index][node] = self._call(index, node, replaced.get(node, {}).get(index))
                yield index, self.value(index, output).float()
                for node in calls[tail:]:
                    del self._own[index][node]
        self.on_call(len(calls), len(calls))

    def value(self, index: int, node: fx.Node) -> Value:
        """Return the value of a node in a lane."""
        found = self._found(index, node)
        if found is not None:
            return found
        if node not in self._shared and node.op == "placeholder":
            self._shared[node] = self.program.params[str(node.target)].recipe.execute(self.read)
        return self._shared[node]

    def weight(self, linear: fx.Node) -> torch.Tensor:
        """Return the program's weight of a linear, as it is stored."""
        found = self.value(0, weight_of(linear))
        assert isinstance(found, torch.Tensor)
        return found

    def _found(self, index: int, node: fx.Node) -> Value | None:
        lane: int | None = index
        while lane is not None:
            if node in self._own[lane]:
                return self._own[lane][node]
            lane = self.lanes[lane].like
        return None

    def _is_weighted(self, node: fx.Node) -> bool:
        return is_call(node, ops.linear.overload) and weight_of(node).meta.get("kind") == "param"

    def _everywhere(self, node: fx.Node, at_linear: AtLinear) -> None:
        replaced = at_linear(node) if self._is_weighted(node) else {}
        if all(source in self._shared or self._is_param(source) for source in node.all_input_nodes):
            self._shared[node] = self._call(0, node, None)  # made of params alone, so equal in all lanes
            return
        for index, lane in enumerate(self.lanes):
            differs = lane.like is None or index in replaced
            if differs or any(source in self._own[index] for source in node.all_input_nodes):
                self._own[index][node] = self._call(index, node, replaced.get(index))

    def _is_param(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and node.meta.get("kind") == "param"

    def _call(self, index: int, node: fx.Node, replaced: Replaced | None) -> Value:
        op = op_of(node.target)
        # A table of embeddings stays in its dtype; widening all its rows would take the most memory of all.
        widened: Callable[[Value], Value] = (lambda value: value) if op is ops.embedding else _widened

        def argument(source: fx.Node) -> Value:
            if replaced is not None and source is weight_of(node):
                return replaced.weight
            value = widened(self.value(index, source))
            return replaced.input(value) if replaced is not None and source is input_of(node) else value

        args: Any = fx.node.map_arg(node.args, argument)
        kwargs: dict[str, Any] = {name: fx.node.map_arg(value, argument) for name, value in node.kwargs.items()}
        if node.target is operator.getitem:
            return args[0][args[1]]
        if isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"].is_floating_point:
            kwargs["dtype"] = torch.float32
        function: Callable[..., Any] = node.target if op is None else op.reference  # type: ignore[assignment]
        try:
            return _widened(function(*args, **kwargs))
        except (RuntimeError, IndexError, TypeError) as error:
            raise VerifyError(
                f"{target_name(node.target)} failed: {error}", where=f"%{node.name}, {node.meta.get('origin', '')}"
            ) from error

    def _forget(self, node: fx.Node, last: Mapping[fx.Node, fx.Node]) -> None:
        """Delete the values that no later call reads."""
        for source in (*node.all_input_nodes, node):
            if last.get(source) is node:
                self._shared.pop(source, None)
                for own in self._own:
                    own.pop(source, None)


def weight_of(linear: fx.Node) -> fx.Node:
    """Return the node of a linear's weight."""
    weight = named_arguments(linear)["weight"]
    assert isinstance(weight, fx.Node)
    return weight


def input_of(linear: fx.Node) -> fx.Node:
    """Return the node of a linear's input."""
    found = named_arguments(linear)["x"]
    assert isinstance(found, fx.Node)
    return found


def _tail(calls: Sequence[fx.Node], output: fx.Node) -> int:
    """Return the index of the first call of the tail: the linear that computes the output, and the calls after it.

    The tail's values have the size of the vocabulary, so it is computed lane by lane. It is the search from the output
    back, through calls with a single tensor argument.
    """
    node = output
    while not is_call(node, ops.linear.overload):
        inner = [source for source in node.all_input_nodes if source.op == "call_function"]
        if len(inner) != 1:
            return len(calls) - 1
        node = inner[0]
    return calls.index(node)


def _widened(value: Value) -> Value:
    if isinstance(value, tuple | list):
        return type(value)(map(_widened, value))
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
