"""split-add-rms-norm: replaces `add_rms_norm` by an add and a norm that a backend fuses with the calls around them."""

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.backend import Splitter
from ingot.ir.program import named_arguments
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter


@dataclass(frozen=True)
class SplitAddRMSNorm(Pass):
    """Rewrites `add_rms_norm(x, r, w)` as `rms_norm(add(r, x), w)`, where a backend fuses each part with another call.

    With few tokens, the matmul or the experts before it can add the residual as they store their result. The matmul
    after it can norm its input as it loads. The fused op would be one more launch between the two. Backends decide this
    for each bucket class (a range of step sizes).
    """

    name: ClassVar[str] = "split-add-rms-norm"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        assert context.bucket is not None
        splitters = [one for one in context.backends if isinstance(one, Splitter)]
        for node in list(rewriter.program.calls(ops.add_rms_norm.overload)):
            if not any(one.takes_apart(node, context.target, context.bucket) for one in splitters):
                continue
            if not rewriter.take(node):
                continue
            bound = named_arguments(node)
            total = rewriter.call(torch.ops.aten.add.Tensor, bound["residual"], bound["x"], before=node)
            normed = rewriter.call(ops.rms_norm, total, bound["weight"], before=node, eps=bound["eps"])
            for item in [user for user in node.users if user.target is operator.getitem]:
                rewriter.replace(item, (normed, total)[int(str(item.args[1]))])
            rewriter.program.graph.erase_node(node)
