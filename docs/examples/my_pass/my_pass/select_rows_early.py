"""select-rows-early: what follows the last attention is computed for the rows that get logits, and for no others.

A model selects these rows in front of its last norm. In a prefill of a hundred tokens one row is selected, and the last
MLP is computed for all hundred. An op that works row by row gives the same when the rows are selected in front of it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.program import Stage
from ingot.ir.record import Numerics
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter

# Calls that work row by row, and which of their arguments hold the rows.
_ROWS = {
    ops.rms_norm.overload: (0,),
    ops.silu_mul.overload: (0, 1),
    ops.linear.overload: (0,),
    torch.ops.aten.add.Tensor: (0, 1),
    torch.ops.aten.mul.Tensor: (0, 1),
}


@dataclass(frozen=True)
class SelectRowsEarly(Pass):
    """`select_rows(f(x), rows)` becomes `f(select_rows(x, rows))`, as far up as that goes."""

    name: ClassVar[str] = "select-rows-early"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING  # a product of fewer rows may be summed in another order
    joins: ClassVar[Stage] = Stage.NORMAL
    past_linears: bool = True

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        while True:  # what two branches read can be passed only when both have come up to it
            problems = {node: self._problem(node) for node in rewriter.program.calls(ops.select_rows.overload)}
            ready = [node for node, problem in problems.items() if not problem]
            if not ready or not rewriter.take(ready[0]):
                break
            self._move_up(rewriter, ready[0])
        for node, problem in problems.items():
            if problem:
                rewriter.refuse(node, problem)

    def _problem(self, node: fx.Node) -> str:
        """Why the selection cannot move in front of what it selects from; "" when it can."""
        source, rows = node.args
        if source.target not in _ROWS or (source.target == ops.linear.overload and not self.past_linears):
            return f"%{source.name} is not passed"
        if len(source.users) > 1:
            return f"%{source.name} has other uses"
        if rows.op != "placeholder":
            return "the rows are computed, maybe later than what they would be selected from"
        for value in _row_arguments(source):
            if value.op == "placeholder" or value.meta["type"].shape[0] != source.meta["type"].shape[0]:
                return f"%{value.name} is an input or broadcast"
        return ""

    def _move_up(self, rewriter: Rewriter, node: fx.Node) -> None:
        source, rows = node.args
        early = {value: _selected(rewriter, value, rows) for value in _row_arguments(source)}
        args = [early.get(argument, argument) for argument in source.args]
        rewriter.replace(node, rewriter.call(source.target, *args, before=source, **source.kwargs))
        rewriter.program.graph.erase_node(source)


def _row_arguments(call: fx.Node) -> list[fx.Node]:
    return [call.args[place] for place in _ROWS[call.target] if isinstance(call.args[place], fx.Node)]


def _selected(rewriter: Rewriter, value: fx.Node, rows: fx.Node) -> fx.Node:
    """`select_rows(value, rows)`: the one that is there, so that branches which come together stay together."""
    for user in value.users:
        if user.target == ops.select_rows.overload and user.args == (value, rows):
            return user
    return rewriter.call(ops.select_rows, value, rows, before=value.next, origin=value.meta.get("origin", ""))
