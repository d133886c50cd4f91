"""Sites: the groups of calls in a traced program that passes fuse, and that the check computes as a whole."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.ops import Effect, op_of
from ingot.ir.origin import layer_of
from ingot.ir.program import Program, is_call

_ADD = torch.ops.aten.add.Tensor
# Column j of their results needs only column j of their arguments.
_ARITHMETIC = frozenset({_ADD, torch.ops.aten.mul.Tensor})
_BY_COLUMN = frozenset({"silu_mul", "gelu_mul", "activate", "cast", "soft_cap"})
_NORMS = (ops.rms_norm.overload, ops.layer_norm.overload)


class Part(Enum):
    """The part of the model that a site (a group of calls that passes may fuse) computes."""

    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"
    NORM = "norm"
    LOGITS = "logits"


@dataclass(frozen=True)
class Site:
    """A group of calls that passes may fuse.

    `members` are the calls in program order. `last` is the last of them. Only its result is used outside. `hidden` is
    the value that all matmuls of the site read. `norm` is the norm that computes `hidden`, or None if another call
    does.
    """

    entry: str
    part: Part
    hidden: fx.Node
    last: fx.Node
    members: tuple[fx.Node, ...]
    norm: fx.Node | None = None

    @property
    def layer(self) -> int | None:
        """Return the number of its layer, or None for logits and for norms after the layers."""
        return layer_of(str(self.last.meta.get("origin", "")))

    @property
    def matmuls(self) -> tuple[fx.Node, ...]:
        return tuple(node for node in self.members if is_call(node, ops.linear.overload))

    @property
    def is_columnwise(self) -> bool:
        """Return whether column j of the result needs only column j of each matmul.

        Some columns can then be computed exactly from a few rows of the weights.
        """
        return self.part in (Part.FEED_FORWARD, Part.LOGITS) and all(
            node in self.matmuls or node.target in _ARITHMETIC or getattr(op_of(node.target), "name", "") in _BY_COLUMN
            for node in self.members
        )

    def params(self) -> tuple[fx.Node, ...]:
        """Return the params that the calls of the site and `norm` read, each once."""
        calls = (*([self.norm] if self.norm else []), *self.members)
        read = dict.fromkeys(source for call in calls for source in call.all_input_nodes)
        return tuple(node for node in read if node.op == "placeholder" and node.meta["kind"] == "param")

    def passes(self) -> Mapping[str, tuple[str, ...]]:
        """Return the passes that may fuse calls of the site, by name.

        The value is the origins (source lines) of the calls at which the pass would begin a rewrite. For form-regions,
        these are all calls that a region may hold.
        """
        last = _origins([self.last])
        if self.part is Part.NORM:
            return {"fuse-add-rms-norm": last}
        found: dict[str, tuple[str, ...]] = {}
        if len(self.matmuls) > 1 and self.part is not Part.LOGITS:
            found["merge-linears"] = _origins(self.matmuls)
        if any(is_call(node, ops.rope.overload) for node in self.members):
            found["fuse-qk-norm-rope"] = found["fuse-append-attention"] = last
        found["form-regions"] = _origins(node for node in self.members if _is_fusible(node))
        return found


def find_sites(program: Program) -> tuple[Site, ...]:
    """Return the sites of a traced program (groups of calls that passes may fuse), in program order."""
    found: list[Site] = []
    for node in program.calls():
        if is_call(node, ops.attention.overload):
            found += _site(program, node, Part.ATTENTION)
        elif is_call(node, ops.rms_norm.overload) and is_call(node.args[0], _ADD):
            add = node.args[0]
            assert isinstance(add, fx.Node)
            found.append(Site(program.name, Part.NORM, add, node, (node,)))
        elif len({one for one in node.all_input_nodes if is_call(one, ops.linear.overload)}) > 1:
            found += _site(program, node, Part.FEED_FORWARD)
    if (logits := program.output_nodes().get("logits")) is not None:
        found += _site(program, logits, Part.LOGITS)
    return tuple(found)


def _site(program: Program, last: fx.Node, part: Part) -> list[Site]:
    """Return the site (a group of calls that passes may fuse) that ends in `last`, as a list of one item.

    It begins at matmuls. The list is empty if these read several values. It is also empty if the calls between them and
    `last` include an embedding, another attention, or an op with a state.
    """
    members = {last}
    read: set[fx.Node] = set()
    waiting = [last]
    while waiting:
        node = waiting.pop()
        if is_call(node, ops.linear.overload):
            read.update(node.all_input_nodes[:1])
            continue
        for source in node.all_input_nodes:
            if source.op != "call_function" or source in members:
                continue
            op = op_of(source.target)
            if op in (ops.embedding, ops.attention) or (op is not None and op.effect is not Effect.PURE):
                return []
            members.add(source)
            waiting.append(source)
    if len(read) != 1:
        return []
    (hidden,) = read
    ordered = tuple(node for node in program.calls() if node in members)
    return [Site(program.name, part, hidden, last, ordered, hidden if hidden.target in _NORMS else None)]


def _is_fusible(node: fx.Node) -> bool:
    op = op_of(node.target)
    return op is None or op.fusible


def _origins(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(node.meta.get("origin", "")) for node in nodes))


def inputs_of(program: Program, site: Site) -> Iterator[fx.Node]:
    """Yield the inputs of the program that the calls of `site` read."""
    read = {source for node in site.members for source in node.all_input_nodes}
    return (node for node in program.placeholders("input") if node in read)
