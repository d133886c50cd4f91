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
    """Statistics of a tensor: the least, the greatest and the root mean square of its finite elements.

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
    """The first tensor in which two programs of one model differ: `before` and `after` some rewrites.

    node      the tensor's name in the program after; CALL/NODE if it is in a region's body
    namesake  the name of the tensor that it was compared with, in the program before
    step      the number of the step, from 0
    before    statistics of the tensor in the program before
    after     statistics of the tensor in the program after
    breach    how the tensors differ
    made      nodes and params from which the tensor is computed, if only the program after has them and they agree with
              no value of the program before. One of them is wrong, or `node` is, or its arguments are
    fed       nodes that those in `made` read, and that only the program after has. They agree with some value in the
              program before, perhaps the wrong one
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
    """The first tensor of a program that overflows: it has infinities or NaN where its float64 value is finite.

    `node` is its name, CALL/NODE if it is in a region's body. `largest` is the largest magnitude in float64, `limit`
    the largest finite number of `dtype`, `count` the number of overflowed elements.
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
    """Return a function that compares two tensors of a model of `dtype`, for `first_divergence`.

    It returns how they differ by more than the contract `numerics` (exact, rounding or lossy) allows; None if they do
    not.
    """
    return partial(breach, numerics, dtype=dtype)


def first_divergence(before: Recording, after: Recording, differs: Differs = changed_meaning) -> Divergence | None:
    """Return the first tensor, in the order of the program `after`, that differs from its counterpart in `before`.

    None if no tensor differs. `differs` compares two tensors. An output is compared with the output of the same name.
    Another value is compared with that of the same node, because passes keep the names of unchanged nodes. A value
    inside a region is searched for by value. Steps are compared one to one, so programs with different inputs need a
    single step.
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
    """Finds, for each value of one step of the recording `after`, its counterpart in the recording `before`."""

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
        """Return the node in a region's body that computes a value, and the region's call; None outside regions."""
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
        """Return the counterpart in the program before of a value in a region; None if there is none.

        The node `inner` in the region's body computes the value, and `call` is the region call. The counterpart is the
        node with the same name, if the call is the body's first. Otherwise it is a value that agrees, or else the
        nearest one of the same op and layer. A region that several layers call has the node names of the first.
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

        `value` is the tensor that differs, `other` its counterpart in the program before.
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
        """Return whether the value `name` agrees with its counterpart `expected` in the program before.

        If `expected` is None, any value of the program before may agree with it.
        """
        value = self.new.get(name)
        if value is None:
            return False
        if expected is None:
            return self._agreeing(value) is not None
        return _shape(expected) == _shape(value) and self.differs(expected.measured, value.measured) is None


def _inputs(node: fx.Node, call: fx.Node | None) -> list[tuple[fx.Node, fx.Node | None]]:
    """Return the nodes that `node` reads, each with the region call whose body it is in; None outside regions.

    `call` is the region call if `node` is in a body. An argument of that call replaces the body's placeholder.
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
    """Return the name of a node in a recording, CALL/NODE in a region's body; for a placeholder its target."""
    return str(node.target) if node.op == "placeholder" else f"{call.name}/{node.name}" if call else node.name


def _shape(value: RecordedValue) -> tuple[int, ...]:
    return tuple(value.measured.found.shape)


def _is_same(other: RecordedValue, value: RecordedValue, node: fx.Node, origin: str) -> bool:
    """Return whether `other`, a value with the name of `node` in the program before, is the same call as `node`.

    A pass may give the name of a removed node to a new one. So the origin in the model (`origin` is that of `node`),
    the shape and the op must agree too. `value` is the value that `node` computes.
    """
    return other.origin == origin and _shape(other) == _shape(value) and _same_kind(other.node, node)


def _same_kind(node: fx.Node, other: fx.Node) -> bool:
    """Return whether two calls may compute the same value: they have the same op and number of arguments.

    Example of another number: on a mesh the bias is no argument of the matmul, but is added after the sum over ranks.
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
    """Run a program from fresh states, a step for each of `inputs`, and return the first tensor that overflows.

    None if none overflows. `params` holds each rank's params by name. A tensor overflows if it has infinities or NaN
    where its float64 value is finite; an unwritten page, which is NaN in float64 too, does not count.
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
