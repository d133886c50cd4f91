"""wide-head: the matmul that computes logits runs in float32, without rounding to the model's dtype in between.

A logit of 20 in bfloat16 is a multiple of 1/8, so different logits may round to the same value. Inputs and weights keep
their values; the last matmul is wider, and so is the copy of its weight.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from ingot.ir import ops, recipe
from ingot.ir.artifact.record import Numerics
from ingot.ir.program import Stage, tensor_type
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Pattern, Rewriter, Var, described

# All models end so: in the model's own dtype, and then in float32 for sampling.
_HEAD = Pattern(ops.cast, Pattern(ops.linear, Var("x"), Var("weight")), dtype=torch.float32)


@dataclass(frozen=True)
class WideHead(Pass):
    """`cast(linear(x, weight))` becomes `linear(cast(x), weight)` in float32.

    `copy_tied`: also if the weight is the embedding table, which then has two copies.
    """

    name: ClassVar[str] = "wide-head"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING  # it rounds less
    joins: ClassVar[Stage] = Stage.NORMAL
    copy_tied: bool = True

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        for node, bound in rewriter.find(_HEAD):
            if problem := self._problem(bound):
                rewriter.refuse(node, problem)
            elif rewriter.take(node):
                _widen(rewriter, node, bound)

    def _problem(self, bound: dict[str, Any]) -> str:
        """Return the reason to leave the matmul unchanged, or ""."""
        (_, matmul), weight = bound["calls"], bound["weight"]
        if tensor_type(matmul).dtype == torch.float32:
            return "it is computed in float32 already"
        if weight.op != "placeholder" or weight.meta["kind"] != "param":
            return f"the weight is no param but {described(weight)}"
        if len(matmul.users) > 1:
            return f"%{matmul.name} has other uses"
        if len(weight.users) > 1 and not self.copy_tied:
            return f"the param '{weight.target}' is used elsewhere too, and is not to be copied"
        return ""


def _widen(rewriter: Rewriter, node: fx.Node, bound: dict[str, Any]) -> None:
    name = str(bound["weight"].target)
    spec = rewriter.program.params[name]
    wide = replace(spec, type=replace(spec.type, dtype=torch.float32), recipe=recipe.cast(spec.recipe, torch.float32))
    weight = rewriter.add_param(f"wide.{name}", wide)
    x = rewriter.call(ops.cast, bound["x"], before=node, dtype=torch.float32)
    rewriter.replace(node, rewriter.call(ops.linear, x, weight, before=node))
