"""fuse-swiglu: the merged matmul of gate and up, and the gate after it, become one op."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Pattern, Rewriter, Var
from my_op.swiglu import swiglu

_PRODUCT = Pattern(ops.linear, Var("x"), Var("weight"))
_SLICE = torch.ops.aten.slice.Tensor
_GATED = Pattern(
    ops.silu_mul,
    Pattern(_SLICE, _PRODUCT, 1, 0, Var("half")),
    Pattern(_SLICE, _PRODUCT, 1, Var("half"), Var("end")),
)


@dataclass(frozen=True)
class FuseSwiGLU(Pass):
    """`silu_mul` of the two halves of `linear(x, w)` becomes `swiglu(x, w)`."""

    name: ClassVar[str] = "fuse-swiglu"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING  # the matmul is not rounded in between

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        for gated, bound in rewriter.find(_GATED):
            if bound["end"] != 2 * bound["half"] or bound["weight"].meta["type"].shape[0] != bound["end"]:
                rewriter.refuse(gated, "gate and up are not the halves of the product")
                continue
            if rewriter.take(gated):
                rewriter.replace(gated, rewriter.call(swiglu, bound["x"], bound["weight"], before=gated))
