"""insert-adapters: adds the ops of LoRA adapters after the linears of a program."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.adapters.low_rank import tensors_of, why_not
from ingot.ir.adapters.sites import STATE_A, STATE_B, weight_recipe
from ingot.ir.artifact.record import Numerics
from ingot.ir.features.adapters import ADAPTERS, SLOTS_INPUT
from ingot.ir.program import Program, StateSpec, is_call, named_arguments, tensor_type
from ingot.ir.recipe import Recipe
from ingot.ir.types import TensorType
from ingot.ir.weights import Matmul, matmul_of
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter

_ADD, _SLICE = torch.ops.aten.add.Tensor, torch.ops.aten.slice.Tensor


@dataclass(frozen=True)
class InsertAdapters(Pass):
    """Adds a shrink and an expand after each linear, in programs with the feature `adapters`. Other programs stay as
    they are.

    Linears that merge-linears has merged get one shrink and one expand together. The factors are states with
    `max_loras` slots, of `max_lora_rank` for each linear that was merged. A linear has no adapters if its weight is
    also read by other ops, as a tied embedding is, or if its recipe does not keep the rank of a change.
    """

    name: ClassVar[str] = "insert-adapters"
    numerics: ClassVar[Numerics] = Numerics.EXACT  # without an adapter, the ops change no bit
    follows: ClassVar[str] = "merge-linears"

    max_loras: int = 1
    max_lora_rank: int = 16

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        if ADAPTERS.name not in program.ending.features:
            return
        slots = _Slots(rewriter)
        shared = _shared_tensors(program)
        for node in list(program.calls()):
            if (matmul := matmul_of(node)) is None:
                continue
            segments = _segments(node, matmul, program, shared)
            if isinstance(segments, str):
                rewriter.refuse(node, segments, by_request=True)
            elif tensor_type(matmul.x).shape[0] not in ("T", "L"):
                rewriter.refuse(node, f"its rows are {tensor_type(matmul.x).shape[0]}, not tokens", by_request=True)
            elif rewriter.take(node):
                self._insert(rewriter, node, matmul, segments, slots)

    def _insert(
        self, rewriter: Rewriter, node: fx.Node, matmul: Matmul, segments: tuple[int, ...], slots: "_Slots"
    ) -> None:
        program, x = rewriter.program, tensor_type(matmul.x)
        name = str(matmul.weight.parts["weight"].target)
        rank, columns = self.max_lora_rank, x.shape[-1]
        shapes = {
            STATE_A + name: (self.max_loras, rank * len(segments), columns),
            STATE_B + name: (self.max_loras, sum(segments), rank),
        }
        a, b = (
            program.add_state(state, StateSpec("lora", ADAPTERS.name, "adapter", TensorType(x.dtype, shape)))
            for state, shape in shapes.items()
        )
        of_rows, origin = slots.of(x.shape[0]), node.meta.get("origin")
        # Before the linear, which reads its weights ahead while the shrink runs.
        shrunk = rewriter.call(ops.lora_shrink, matmul.x, of_rows, a, before=node, origin=origin)
        result = _with_residual(node)
        users = list(result.users)
        made = rewriter.call(
            ops.lora_expand,
            *(result, shrunk, of_rows, b),
            before=result.next,
            origin=origin,
            segments=list(segments),
        )
        for user in users:
            user.replace_input_with(result, made)
        program.set_outputs({**program.output_nodes(), **dict(zip(shapes, (a, b), strict=True))})


def _with_residual(linear: fx.Node) -> fx.Node:
    """Return the call that adds a residual to the result of a linear, or else the linear.

    The expand comes after the add, so that backends can fuse the add with the linear.
    """
    (user, *others) = linear.users
    if others or not is_call(user, _ADD) or user.kwargs or user.meta["type"] != linear.meta["type"]:
        return linear
    return (
        user if all(isinstance(arg, fx.Node) and tensor_type(arg) == tensor_type(user) for arg in user.args) else linear
    )


class _Slots:
    """The slots of the rows that linears read: of tokens, or of rows of logits."""

    def __init__(self, rewriter: Rewriter) -> None:
        self._rewriter = rewriter
        self._made: dict[object, fx.Node] = {}

    def of(self, count: object) -> fx.Node:
        """Return the node with the slot of each row. `count` is the number of rows, "T" or "L"."""
        if count not in self._made:
            program = self._rewriter.program
            if count == "T":
                self._made[count] = program.add_input(SLOTS_INPUT, ADAPTERS.inputs[0].type)
            else:
                rows, first = program.find("logit_rows"), next(program.calls())
                self._made[count] = self._rewriter.call(ops.select_rows, self.of("T"), rows, before=first, origin="")
        return self._made[count]


def _shared_tensors(program: Program) -> frozenset[str]:
    """Return the checkpoint tensors that other ops than matmuls read, such as a tied embedding."""
    shared: set[str] = set()
    for param in program.placeholders("param"):
        for user in param.users:
            matmul = matmul_of(user)
            if matmul is None or param not in (*matmul.weight.parts.values(), matmul.bias):
                shared |= program.params[str(param.target)].recipe.sources()
    return frozenset(shared)


def _segments(node: fx.Node, matmul: Matmul, program: Program, shared: frozenset[str]) -> tuple[int, ...] | str:
    """Return the columns of the result that belong to each checkpoint tensor, or why the linear has no adapters.

    Segments are in the order of the columns. If the weight is made of one tensor, there is one.
    """
    weight = matmul.weight.parts["weight"]
    if weight.op != "placeholder":
        return f"its weight %{weight.name} is computed"
    recipes = weight_recipe(program.params[str(weight.target)].recipe)
    if any(len(tensors_of(one)) != 1 for one in recipes):
        return "a part of its weight is made of several checkpoint tensors"
    if reason := next((reason for one in recipes if (reason := why_not(one))), ""):
        return reason
    if tied := sorted(shared & frozenset().union(*map(tensors_of, recipes))):
        return f"other ops read '{tied[0]}' too"
    width = tensor_type(node).shape[-1]
    assert isinstance(width, int)
    if len(recipes) == 1:
        return (width,)
    return _sizes(node, recipes, width)


def _sizes(node: fx.Node, recipes: tuple[Recipe, ...], width: int) -> tuple[int, ...] | str:
    """Return the sizes of the parts of a merged linear, from the slices that merge-linears has made of its result."""
    slices = [user for user in node.users if is_call(user, _SLICE)]
    cuts = sorted({(int(bound["start"]), int(bound["end"])) for bound in map(named_arguments, slices)})
    ends = [0, *(end for _, end in cuts)]
    if len(cuts) != len(recipes) or [begin for begin, _ in cuts] != ends[:-1] or ends[-1] != width:
        return f"its result is not read in {len(recipes)} parts"
    return tuple(end - begin for begin, end in cuts)
