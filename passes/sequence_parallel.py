"""sequence-parallel: in long steps, each rank adds and norms its own rows of the residual stream alone."""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from ingot.ir import build, ops
from ingot.ir.artifact.plan import FEW_TOKENS, GPU_FEW_TOKENS
from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import OptionError
from ingot.ir.infer import infer
from ingot.ir.infer_placement import placement_of
from ingot.ir.ops import Op
from ingot.ir.ops.stand_ins import rows_of_part
from ingot.ir.program import Program, named_arguments, tensor_type
from ingot.ir.types import Dim, TensorType, TupleType, ValueType
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter

_AXIS, _ROWS = "tp", "T_tp"
_STEPS = ("long", "all")
# Calls that compute a row of their result from the same row of their arguments alone. A matmul is none of them: for
# fewer rows, a library may add in another order.
_BY_ROW = (
    torch.ops.aten.add.Tensor,
    torch.ops.aten.mul.Tensor,
    ops.rms_norm.overload,
    ops.layer_norm.overload,
    ops.add_rms_norm.overload,
    operator.getitem,
)


@dataclass(frozen=True)
class SequenceParallel(Pass):
    """Splits the residual stream of long steps over the ranks of `tp`, by rows: sequence parallelism, arXiv 2205.05198.

    Without the pass, the sum of a block is all-reduced, and every rank computes the add and the norm of all rows. With
    it, a reduce_scatter gives each rank the sums of its own rows. The rank adds and norms these. An all_gather brings
    the normed rows of all ranks to the next matmul. The residual stays split until a call reads all of its rows.

    An all-reduce sends as many bytes as a reduce_scatter and an all_gather. Gathering the residual too after each norm
    would send half as many again. The pass gathers it once, where the rows that get logits are selected.

    steps   "long": bucket classes (ranges of step sizes) with prompts, all of whose steps have more than few tokens.
            "all": all bucket classes
    """

    name: ClassVar[str] = "sequence-parallel"
    numerics: ClassVar[Numerics] = Numerics.EXACT  # sums are added in the order of the ranks, and rows norm alone
    by_bucket: ClassVar[bool] = True
    on_mesh: ClassVar[bool] = True
    steps: str = "long"

    def __post_init__(self) -> None:
        if self.steps not in _STEPS:
            raise OptionError(
                f"option 'steps' of pass '{self.name}' is '{self.steps}'",
                where="--passes",
                expected=" or ".join(_STEPS),
                hint=f"leave '{self.name}' out if no steps are to be split",
            )

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        sums = [
            node
            for node in program.calls(ops.all_reduce.overload)
            if _has_rows(node) and named_arguments(node)["axis"] == _AXIS
        ]
        if self.steps == "long":
            few = GPU_FEW_TOKENS if context.target.device == "cuda" else FEW_TOKENS
            bucket = context.any_bucket()
            if bucket.q_max == 1:
                return  # a class of decode steps
            if bucket.tokens[0] <= few:
                least, most = bucket.tokens
                have = f"have at most {most}" if most <= few else f"may have {least}"
                for node in sums:
                    rewriter.refuse(node, f"steps of the class {bucket.name} {have} tokens")
                return
        like = next((node for node in program.placeholders("input") if _has_rows(node)), None)
        splitting = _Splitting(rewriter)
        for node in _worth_it(rewriter, sums):
            if like is None:
                rewriter.refuse(node, "no input of the program has a row for each token")
            elif rewriter.take(node):
                splitting.begin(node)
        if splitting.parts and like is not None:
            ranks, tokens = program.mesh[_AXIS], program.dims["T"]
            program.dims[_ROWS] = Dim(_ROWS, rows_of_part(tokens.lo, ranks), rows_of_part(tokens.hi, ranks))
            splitting.run(_split(program, list(splitting.parts)), like)


def _has_rows(node: fx.Node) -> bool:
    """Return whether a value is a row-major tensor with a row for each token of the step."""
    return _is_by_row(node.meta["type"])


def _is_by_row(value_type: ValueType) -> bool:
    return isinstance(value_type, TensorType) and value_type.strides is None and value_type.shape[:1] == ("T",)


def _split(program: Program, sums: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the values that are split by rows if these sums are, in program order: sums, adds and norms."""
    found: dict[fx.Node, None] = {}
    for node in program.calls():
        reads_split = any(source in found for source in node.all_input_nodes)
        if node in sums or (node.target in _BY_ROW and reads_split and _works_by_row(node, program, found)):
            found[node] = None
    return list(found)


def _works_by_row(node: fx.Node, program: Program, split: Collection[fx.Node]) -> bool:
    """Return whether a call can compute the rows of one rank alone, given the values that are split so far."""
    if node.target is operator.getitem:
        return True
    value_type = node.meta["type"]
    results = value_type.items if isinstance(value_type, TupleType) else (value_type,)
    if not all(_is_by_row(one) for one in results):
        return False
    axes = len(results[0].shape)  # type: ignore[union-attr]  # a tensor type, as `_is_by_row` has found
    for source in node.all_input_nodes:
        shape = tensor_type(source).shape
        by_row = (source in split or _has_rows(source)) and len(shape) == axes
        for_all_rows = len(shape) < axes or shape[0] == 1
        if not (by_row or for_all_rows) or placement_of(source, program):
            return False
    return True


def _worth_it(rewriter: Rewriter, sums: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the sums that the pass should split; refuse the others.

    Sums whose adds and norms depend on each other form a group, such as those of the residual stream. Without the pass,
    a sum is sent twice, as parts and whole. With it, the parts are sent, and each value that a call reads whole. So a
    group needs as many such values as sums. The largest group may need one more: the residual at its end.
    """
    split = _split(rewriter.program, sums)
    groups = _groups(split)
    added = [[node for node in group if node in sums] for group in groups]
    gathered = [sum(bool(_outside(node, split)) for node in group) for group in groups]
    largest = max(range(len(groups)), key=lambda place: (len(added[place]), len(groups[place])), default=0)
    found = []
    for place, group in enumerate(groups):
        for node in added[place]:
            if len(group) == len(added[place]):
                rewriter.refuse(node, "no add or norm of whole rows reads the sum")
            elif gathered[place] > len(added[place]) + (place == largest):
                rewriter.refuse(node, f"{len(added[place])} sums of rows would need {gathered[place]} gathers")
            else:
                found.append(node)
    return sorted(found, key=list(sums).index)


def _groups(split: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return the values `split` in groups, each in program order.

    A value is in the group of the values that it is computed from.
    """
    groups: list[list[fx.Node]] = []
    for node in split:
        read = [group for group in groups if any(source in group for source in node.all_input_nodes)]
        groups = [group for group in groups if group not in read]
        groups.append([*(member for group in read for member in group), node])
    return groups


def _outside(node: fx.Node, split: Collection[fx.Node]) -> list[fx.Node]:
    """Return the readers of a value that need it whole, if the values `split` are split by rows."""
    return [user for user in node.users if user not in split]


@dataclass
class _Splitting:
    """Splits values by rows.

    parts   value that was whole -> the rows of this rank
    """

    rewriter: Rewriter
    parts: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def begin(self, total: fx.Node) -> None:
        """Add the reduce_scatter for a sum."""
        self.parts[total] = self._call(ops.reduce_scatter, total.args[0], before=total)

    def run(self, split: Sequence[fx.Node], like: fx.Node) -> None:
        """Split the values `split`, in program order, after `begin` for all sums among them.

        `like` is an input with a row for each token.
        """
        order = {node: place for place, node in enumerate(self.rewriter.program.graph.nodes)}
        outside = {node: sorted(_outside(node, split), key=order.__getitem__) for node in split}
        for node in split:
            if node not in self.parts:
                for source in node.all_input_nodes:
                    if _has_rows(source):
                        node.replace_input_with(source, self._part(source, before=node))
                node.meta["type"] = infer(node.target, node.args, node.kwargs, self.rewriter.program)
                build.set_placement(node, self.rewriter.program)
                self.parts[node] = node
        for node, readers in outside.items():
            if readers:
                whole = self._call(ops.all_gather, self.parts[node], like, before=readers[0])
                for reader in readers:
                    reader.replace_input_with(node, whole)
        for node in split:
            if self.parts[node] is not node:
                self.rewriter.program.graph.erase_node(node)

    def _part(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        """Return the rows of this rank of a value that is whole now, or was before."""
        if value not in self.parts:
            self.parts[value] = self._call(ops.take_part, value, before=before)
        return self.parts[value]

    def _call(self, op: Op, *values: Any, before: fx.Node) -> fx.Node:
        ranks = self.rewriter.program.mesh[_AXIS]
        return self.rewriter.call(op, *values, before=before, axis=_AXIS, dim=0, parts=ranks)
