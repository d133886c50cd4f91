"""Find the first tensor in which two equivalent programs differ, and the first that overflows its dtype."""

import heapq
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from ingot.ir.artifact.record import Numerics
from ingot.ir.numerics.contracts import Breach, Measured, RankParams, breach, changed_meaning
from ingot.ir.numerics.harness import MeshRun
from ingot.ir.numerics.recording import Inputs, RecordedValue, Recording, layer_of
from ingot.ir.program import Program, RegionCall, target_name
from ingot.ir.types import DTYPE_NAMES

# How many tensors of equal shape to compare with a value: those with the nearest sums. Views share a sum.
_TRIED = 8

# Returns how a tensor of `after` breaks its bound against `before`; None if it does not.
Differs = Callable[[Measured, Measured], Breach | None]


@dataclass(frozen=True)
class Statistics:
    """The least value, the greatest value and the root mean square of a tensor's finite elements.

    `nonfinite` is the number of elements that are infinite or NaN.
    """

    dtype: str
    shape: tuple[int, ...]
    least: float
    most: float
    rms: float
    nonfinite: int

    @staticmethod
    def of(tensor: torch.Tensor) -> "Statistics":
        finite = tensor[tensor.isfinite()].double()
        some = finite if finite.numel() else torch.zeros(1, dtype=torch.float64)
        return Statistics(
            dtype=DTYPE_NAMES[tensor.dtype],
            shape=tuple(tensor.shape),
            least=float(some.min()),
            most=float(some.max()),
            rms=float(some.square().mean().sqrt()),
            nonfinite=tensor.numel() - finite.numel(),
        )


@dataclass(frozen=True)
class Divergence:
    """The first tensor that differs between two programs of one model, "before" and "after" some rewrites.

    node      the tensor's name in the program after; CALL/NODE inside a region (calls that are compiled together)
    namesake  the name, in the program before, of the tensor that it was compared with
    step      the number of the step, from 0
    before    statistics of the tensor in the program before
    after     statistics of the tensor in the program after
    breach    how the tensors differ
    made      new nodes and params from which the tensor is computed: only the program after has them, and their values
              are not in the program before. The cause is one of them, or `node`, or its arguments
    fed       new nodes that the nodes in `made` read. Their values are in the program before, but the wrong node may
              read them
    """

    node: str
    namesake: str
    op: str
    origin: str
    layer: int | None
    step: int
    before: Statistics
    after: Statistics
    breach: Breach
    made: tuple[str, ...] = ()
    fed: tuple[str, ...] = ()

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"layer {self.layer}, "
        return f"%{self.node} ({layer}{self.op}): {self.breach}"


@dataclass(frozen=True)
class Overflow:
    """The first tensor that overflows in a program: it has infinities or NaN where its float64 value is finite.

    node     the tensor's name; CALL/NODE inside a region (calls that are compiled together)
    largest  the largest magnitude in float64
    limit    the largest finite number of `dtype`
    count    the number of elements that overflowed
    """

    node: str
    op: str
    origin: str
    layer: int | None
    dtype: str
    largest: float
    limit: float
    count: int

    def __str__(self) -> str:
        where = "outside layers" if self.layer is None else f"in layer {self.layer}"
        return (
            f"%{self.node} ({self.op}) {where} overflows {self.dtype}: values reach {self.largest:.3g}, "
            f"{self.dtype} ends at {self.limit:.3g}"
        )


def by_contract(numerics: Numerics, dtype: torch.dtype) -> Differs:
    """Return a function that compares two tensors by the contract `numerics`, for `first_divergence`.

    It returns how the tensors differ more than the contract (exact, rounding or lossy) allows; None if they do not.
    `dtype` is the dtype of the model.
    """
    return partial(breach, numerics, dtype=dtype)


def first_divergence(before: Recording, after: Recording, differs: Differs = changed_meaning) -> Divergence | None:
    """Return the first tensor of the program `after` that differs from its counterpart in `before`; None if none does.

    `differs` compares two tensors. An output is compared with the output of the same name. Another value is compared
    with the node of the same name, because passes keep names. A node inside a region (calls that are compiled together)
    may be compared with any node that has an equal value. Both recordings must have equally many steps.
    """
    for number, _ in enumerate(zip(before.steps, after.steps, strict=True)):
        pairs = _Pairs(before, after, number, differs)
        for value in pairs.new.values():
            other = pairs.of(value)
            if other is not None and (problem := differs(other.measured, value.measured)) is not None:
                made, fed = pairs.causes(value, other)
                return Divergence(
                    node=value.name,
                    namesake=other.name,
                    op=value.op,
                    origin=value.origin,
                    layer=value.layer,
                    step=number,
                    before=Statistics.of(other.measured.found),
                    after=Statistics.of(value.measured.found),
                    breach=problem,
                    made=made,
                    fed=fed,
                )
    return None


class _Pairs:
    """Finds the counterpart of each value of the recording `after` in the recording `before`, for one step."""

    def __init__(self, before: Recording, after: Recording, step: int, differs: Differs) -> None:
        self.before, self.after, self.differs = before.program, after.program, differs
        self.old, self.new = before.steps[step], after.steps[step]
        self.sums = {name: _sum(value) for name, value in self.old.items()}
        olds = {name: node.name for name, node in self.before.output_nodes().items()}
        self.outputs = {node.name: olds[name] for name, node in self.after.output_nodes().items() if name in olds}
        self.found: set[str] = set()  # found by name, so certainly the right ones

    def of(self, value: RecordedValue) -> RecordedValue | None:
        if other := self._named(value):
            self.found.add(value.name)
            return other
        inner = self._in_body(value)
        return self._of_region(value, *inner) if inner else None

    def _in_body(self, value: RecordedValue) -> tuple[fx.Node, fx.Node] | None:
        """Return the node inside a region that computes a value, and the call of the region; None outside regions.

        A region is a set of calls that are compiled together.
        """
        if value.call is not None:
            return value.node, value.call
        call, index = value.node.args if value.node.target is operator.getitem else (value.node, 0)
        if not isinstance(call, fx.Node) or not isinstance(call.target, RegionCall):
            return None
        assert isinstance(index, int)
        return list(self.after.regions[call.target.name].body.output_nodes().values())[index], call

    def _named(self, value: RecordedValue) -> RecordedValue | None:
        if value.name in self.outputs:
            return self.old.get(self.outputs[value.name])
        other = self.old.get(value.name)
        return other if other is not None and _is_same(other, value, value.node, value.origin) else None

    def _of_region(self, value: RecordedValue, inner: fx.Node, call: fx.Node) -> RecordedValue | None:
        """Return the counterpart, in the program before, of a value inside a region; None if there is none.

        A region is a set of calls that are compiled together. `inner` is the node inside the region, and `call` the
        call of the region. If several layers call the region, its nodes have names of the first layer. In the first
        layer, the counterpart is the node of the same name. In other layers it is a node with an equal value. Failing
        that, it is the node of the same op and layer with the nearest value.
        """
        first, layer = self.old.get(inner.name), layer_of(inner, call)
        if (
            first is not None
            and first.layer == layer
            and _is_same(first, value, inner, str(inner.meta.get("origin", "")))
        ):
            return first
        if agreeing := self._agreeing(value):
            return agreeing
        if first is None or not _same_kind(first.node, inner):
            return None  # made later, so it has no counterpart
        here = [other for other in self._same_shape(value) if other.layer == layer and _same_kind(other.node, inner)]
        return min(here, key=lambda other: _distance_between(other, value), default=None)

    def _agreeing(self, value: RecordedValue) -> RecordedValue | None:
        total = _sum(value)
        # Equal tensors have nearly equal sums, up to rounding and order: compare only the nearest few.
        near = heapq.nsmallest(_TRIED, self._same_shape(value), key=lambda other: abs(self.sums[other.name] - total))
        return next((other for other in near if self.differs(other.measured, value.measured) is None), None)

    def _same_shape(self, value: RecordedValue) -> list[RecordedValue]:
        return [other for other in self.old.values() if _shape(other) == _shape(value)]

    def causes(self, value: RecordedValue, other: RecordedValue) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the nodes that may cause a difference, nearest first: the fields `made` and `fed` of a `Divergence`.

        `value` is the tensor that differs. `other` is its counterpart in the program before.
        """
        made: dict[str, None] = {}
        fed: dict[str, None] = {}
        inputs = _inputs(value.node, value.call)
        owed = [self.old.get(_name(*source)) for source in _inputs(other.node, other.call)]
        known = _same_kind(other.node, value.node) and len(owed) == len(inputs)
        waiting = list(zip(inputs, owed if known else [None] * len(inputs), strict=True))
        while waiting:
            (node, call), expected = waiting.pop(0)
            name = _name(node, call)
            if node.op == "placeholder":
                if name in self.after.params and self.after.params[name] != self.before.params.get(name):
                    made[name] = None
            elif name not in self.found and name not in made and name not in fed:
                if self._is_right(name, expected):
                    fed |= {name: None} if expected is None else {}
                else:
                    made[name] = None
                    waiting += [(source, None) for source in _inputs(node, call)]
        return tuple(made), tuple(fed)

    def _is_right(self, name: str, expected: RecordedValue | None) -> bool:
        """Return whether the value of the node `name` agrees with `expected`, its counterpart in the program before.

        With `expected` None, return whether it agrees with any value of the program before.
        """
        value = self.new.get(name)
        if value is None:
            return False
        if expected is None:
            return self._agreeing(value) is not None
        return _shape(expected) == _shape(value) and self.differs(expected.measured, value.measured) is None


def _inputs(node: fx.Node, call: fx.Node | None) -> list[tuple[fx.Node, fx.Node | None]]:
    """Return the nodes that `node` reads, as pairs (node, call of the region around it).

    The call is None outside regions.

    A region is a set of calls that are compiled together. `call` is the call of the region around `node`, or None. If
    `node` reads an input of the region, the argument of the call is returned in its place.
    """
    if call is None:
        return [(source, None) for source in node.all_input_nodes]
    given = dict(zip((one for one in node.graph.nodes if one.op == "placeholder"), call.args, strict=False))
    found: list[tuple[fx.Node, fx.Node | None]] = []
    for source in node.all_input_nodes:
        argument = given.get(source)
        found.append((argument, None) if isinstance(argument, fx.Node) else (source, call))
    return found


def _name(node: fx.Node, call: fx.Node | None) -> str:
    """Return the name of a node in a recording.

    It is CALL/NODE inside a region (calls that are compiled together). For a placeholder it is the name of the input,
    param or state.
    """
    return str(node.target) if node.op == "placeholder" else f"{call.name}/{node.name}" if call else node.name


def _shape(value: RecordedValue) -> tuple[int, ...]:
    return tuple(value.measured.found.shape)


def _is_same(other: RecordedValue, value: RecordedValue, node: fx.Node, origin: str) -> bool:
    """Return whether `node` of the program after is the same call as `other` of the program before.

    Both have one name. But a pass may name a new node like a removed one. So their origin in the model, shape and op
    must agree too. `value` is the value of `node`, and `origin` its origin.
    """
    return other.origin == origin and _shape(other) == _shape(value) and _same_kind(other.node, node)


def _same_kind(node: fx.Node, other: fx.Node) -> bool:
    """Return whether two calls may compute the same value: they have the same op and equally many arguments.

    Example of a different number: on a mesh, a bias is added after the sum over ranks, and not by the matmul.
    """
    return _kind(node) == _kind(other)


def _kind(node: fx.Node) -> tuple[object, ...]:
    source = node.args[0] if node.target is operator.getitem else None
    of = (source.target, node.args[1]) if isinstance(source, fx.Node) else ()
    return (node.target, *of, sum(argument is not None for argument in node.args))


def _sum(value: RecordedValue) -> float:
    return float(value.measured.exact.double().nan_to_num().sum())


def _distance_between(value: RecordedValue, other: RecordedValue) -> float:
    left, right = value.measured.exact.double(), other.measured.exact.double()
    return float((left - right).abs().nan_to_num(nan=0.0).sum())


def first_nonfinite(program: Program, params: RankParams, inputs: Sequence[Inputs]) -> Overflow | None:
    """Run a program from fresh states, one step for each of `inputs`, and return the first tensor that overflows.

    None if none does. `params` holds the params of each rank by name. A tensor overflows if it has infinities or NaN
    where its float64 value is finite. Unwritten pages are NaN in float64 too, so they do not count.
    """
    lost: dict[tuple[int, fx.Node], torch.Tensor] = {}  # by count: a region's body runs several times

    def keep(count: int, node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not bool(value.isfinite().all()):
            lost[count, node] = value

    _watch_all(program, params, inputs, keep, exact=False)
    if not lost:
        return None
    first: list[tuple[fx.Node, torch.Tensor, torch.Tensor]] = []
    calls: list[fx.Node] = []  # the first call from there on; `watch` sees a body's nodes before the region's call

    def judge(count: int, node: fx.Node, value: Any) -> None:
        if not first and (count, node) in lost and bool((~lost[count, node].isfinite() & value.isfinite()).any()):
            first.append((node, lost[count, node], value))
        if first and not calls and node.graph is program.graph:
            calls.append(node)

    _watch_all(program, params, inputs, judge, exact=True)
    return _overflow(*first[0], calls[0]) if first else None


def _watch_all(
    program: Program,
    params: RankParams,
    inputs: Sequence[Inputs],
    see: Callable[[int, fx.Node, Any], None],
    *,
    exact: bool,
) -> None:
    count = 0

    def watch(node: fx.Node, value: Any) -> None:
        nonlocal count
        count += 1
        see(count, node, value)

    run = MeshRun(program, params, exact=exact, watch=watch)
    for given in inputs:
        run(given)


def _overflow(node: fx.Node, found: torch.Tensor, exact: torch.Tensor, call: fx.Node) -> Overflow:
    inside = node is not call
    return Overflow(
        node=f"{call.name}/{node.name}" if inside else node.name,
        op=target_name(node.target),
        origin=str(call.meta.get("origin", "")),
        layer=layer_of(node, call if inside else None),
        dtype=DTYPE_NAMES[found.dtype],
        largest=float(exact[exact.isfinite()].abs().max()),
        limit=torch.finfo(found.dtype).max,
        count=int((~found.isfinite() & exact.isfinite()).sum()),
    )
