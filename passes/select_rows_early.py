"""select-rows-early: computes the calls after the last attention only for the rows that get logits."""

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.plan import FEW_TOKENS, GPU_FEW_TOKENS, BucketClass
from ingot.ir.artifact.record import Numerics
from ingot.ir.machine.target import Target
from ingot.ir.ops import Effect, op_of
from ingot.ir.program import is_call, named_arguments, target_name, tensor_type
from ingot.ir.types import Size, TupleType
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter, described

_VIEW, _SLICE, _PERMUTE = torch.ops.aten.view.default, torch.ops.aten.slice.Tensor, torch.ops.aten.permute.default
_ARITHMETIC = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)


@dataclass(frozen=True)
class SelectRowsEarly(Pass):
    """Runs the calls after the last attention only for the rows that get logits.

    A model selects these rows with `select_rows` just before its last norm. The pass moves the selection up:
    `select_rows(f(x), rows)` becomes `f(select_rows(x, rows))`, for calls that work row by row. At the end, one
    selection reads the result of attention, and another one the residual stream. A prefill step then computes one row
    per sequence after the last attention, not one per token.

    The pass only runs in bucket classes (ranges of step sizes) whose steps may hold a prompt. In other steps, most rows
    get logits, and the second selection would only cost a launch.
    """

    name: ClassVar[str] = "select-rows-early"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING  # a matmul of fewer rows may sum in another order

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        assert context.bucket is not None
        if not _feeds_prompts(context.bucket, context.target):
            return
        made: set[fx.Node] = set()  # selections
        # Backwards, so that the readers of a call have moved after a selection, if possible, before the call does.
        for call in reversed(list(rewriter.program.calls())):
            selections = [] if call.target is operator.getitem else _selections(call)
            if not selections or _keeps_state(call):
                continue
            rows = _row_arguments(call)
            if problem := _obstacle(call, rows, selections, made):
                rewriter.refuse(call, problem)
            elif rewriter.take(call):
                _move_after_selections(rewriter, call, rows, selections, made)
            else:
                break


def _feeds_prompts(bucket: BucketClass, target: Target) -> bool:
    """Return whether steps of a bucket class (a range of step sizes) may hold many tokens of one prompt.

    Most tokens of a prompt get no logits.
    """
    few = GPU_FEW_TOKENS if target.device == "cuda" else FEW_TOKENS
    return bucket.q_max != 1 and bucket.tokens[1] > few


def _results(call: fx.Node) -> list[fx.Node]:
    """Return the nodes of a call's results: the getitem nodes if it returns a tuple, else the call itself."""
    return list(call.users) if isinstance(call.meta["type"], TupleType) else [call]


def _selections(call: fx.Node) -> list[fx.Node]:
    """Return the `select_rows` calls that read a result of `call`."""
    readers = [(user, result) for result in _results(call) for user in result.users]
    return [user for user, result in readers if is_call(user, ops.select_rows.overload) and user.args[0] is result]


def _count(call: fx.Node) -> Size:
    """Return the number of rows in a call's results: an int, or a symbolic dim such as "T"."""
    return tensor_type(_results(call)[0]).shape[0]


def _keeps_state(call: fx.Node) -> bool:
    """Return whether a call reads or writes states, as attention over cached pages does.

    Such a call needs all rows, so row selection cannot move before it.
    """
    op = op_of(call.target)
    return op is not None and op.effect is not Effect.PURE


def _row_arguments(call: fx.Node) -> list[fx.Node]:
    """Return the arguments that a call reads row by row: row i of its results depends only on row i of each.

    The list is empty if the call mixes rows.
    """
    rows = [value for value in call.all_input_nodes if tensor_type(value).shape[:1] == (_count(call),)]
    op = op_of(call.target)
    if op is None:
        works_by_row = _keeps_rows(call)
    elif op.across is not None:
        works_by_row = named_arguments(call).get("dim", 1) != 0  # ranks that split columns do not divide rows
    else:
        bound = named_arguments(call)
        works_by_row = {bound[name] for name in op.rows if bound[name] is not None} == set(rows)
    return rows if works_by_row else []


def _keeps_rows(call: fx.Node) -> bool:
    """Return whether a call of an aten op, such as a view or a slice, keeps rows apart and in order."""
    axes = len(tensor_type(call).shape)
    if call.target is _VIEW:
        return bool(call.args[1][0] == -1)  # type: ignore[index]  # its sizes
    if call.target is _SLICE:
        return len(call.args) > 1 and bool(call.args[1] % axes)  # type: ignore[operator]  # along which axis
    if call.target is _PERMUTE:
        return bool(call.args[1][0] % axes == 0)  # type: ignore[index, operator]  # the axis that comes first
    return call.target in _ARITHMETIC


def _obstacle(call: fx.Node, rows: list[fx.Node], selections: list[fx.Node], made: set[fx.Node]) -> str:
    """Return why a call cannot run on selected rows only; "" if it can.

    rows         arguments of the call to select rows of
    selections   `select_rows` calls that read its results
    made         `select_rows` calls that the pass has added so far
    """
    if not isinstance(count := _count(call), str):
        return f"it has {count} rows in every step"
    if not rows:
        return f"{target_name(call.target)} does not work row by row"
    for result in _results(call):
        if whole := [user for user in result.users if user not in selections]:
            return f"%{result.name} is read whole too, by %{whole[0].name}"
        if tensor_type(result).strides is not None and not made.issuperset(result.users):
            return f"%{result.name} is strided, but the readers of its selected rows get them row-major"
    chosen = {selection.args[1]: None for selection in selections}
    if len(chosen) > 1:
        return f"several selections of rows read it: {', '.join(f'%{one.name}' for one in selections)}"
    (by,) = chosen
    assert isinstance(by, fx.Node)
    if by.op != "placeholder":
        return f"the rows are {described(by)}, which may be computed after the value to select from"
    return ""


def _move_after_selections(
    rewriter: Rewriter, call: fx.Node, rows: list[fx.Node], selections: list[fx.Node], made: set[fx.Node]
) -> None:
    """Run a call only on selected rows.

    The new results replace the old ones and the `select_rows` calls that read them.

    rows         arguments of the call to select rows of
    selections   `select_rows` calls that read its results
    made         set to which added `select_rows` calls are added
    """
    by = selections[0].args[1]
    early = {value: _selection(rewriter, value, by, made) for value in rows}
    given: Any = fx.node.map_arg((call.args, call.kwargs), lambda value: early.get(value, value))
    fewer = rewriter.call(call.target, *given[0], before=call, **given[1])
    results, heirs = _results(call), {fewer: call.name}
    for result in results:
        own = fewer
        if result is not call:
            own = rewriter.call(operator.getitem, fewer, result.args[1], before=call, origin=result.meta.get("origin"))
        heirs[own] = result.name
        readers = [reader for selection in result.users for reader in selection.users]
        for selection in list(result.users):
            rewriter.replace(selection, own)
        rewriter.retype(readers)  # a view of selected rows has the strides of the view
    for node in dict.fromkeys((*results, call)):
        rewriter.program.graph.erase_node(node)
    for node, name in heirs.items():
        rewriter.rename(node, name)


def _selection(rewriter: Rewriter, value: fx.Node, by: object, made: set[fx.Node]) -> fx.Node:
    """Return the call `select_rows(value, by)`, placed right after `value`.

    It is an existing call if there is one. A new call is added to `made`.
    """
    place = value.next if value.op != "placeholder" else next(rewriter.program.calls())
    for user in value.users:
        if is_call(user, ops.select_rows.overload) and user.args == (value, by):
            place.prepend(user)
            return user
    selection = rewriter.call(ops.select_rows, value, by, before=place, origin=value.meta.get("origin", ""))
    made.add(selection)
    return selection
