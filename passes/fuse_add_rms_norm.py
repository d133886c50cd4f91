"""fuse-add-rms-norm: fuses the residual add and the norm after it into one op."""

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.program import is_call, named_arguments, tensor_type
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Pattern, Rewriter, Var, described

_ADD_THEN_NORM = Pattern(
    ops.rms_norm,
    Pattern(torch.ops.aten.add.Tensor, Var("residual"), Var("x")),
    Var("weight"),
    eps=Var("eps"),
)


@dataclass(frozen=True)
class FuseAddRMSNorm(Pass):
    """Rewrites `rms_norm(add(r, x), w)` as `add_rms_norm(x, r, w)`. The fused op returns the norm and the sum."""

    name: ClassVar[str] = "fuse-add-rms-norm"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        for norm in list(rewriter.program.calls(ops.rms_norm.overload)):
            bound = _ADD_THEN_NORM.match(norm)
            if bound is None:
                if reason := _no_sum(norm):
                    rewriter.refuse(norm, reason)
                continue
            add = bound["calls"][1]
            x, residual = bound["x"], bound["residual"]
            if not all(hasattr(value, "meta") and value.meta["type"] == add.meta["type"] for value in (x, residual)):
                types = " and ".join(_type(value) for value in (residual, x))
                rewriter.refuse(norm, f"the add makes {add.meta['type']} of {types}")
                continue
            if len(tensor_type(add).shape) != 2:
                rewriter.refuse(norm, f"the sum is {add.meta['type']}, not [T, D]")
                continue
            if not (hasattr(bound["weight"], "op") and bound["weight"].op == "placeholder"):
                rewriter.refuse(norm, f"the weight is {described(bound['weight'])}, perhaps computed after the add")
                continue
            if not rewriter.take(norm):
                continue
            # Before the add, because readers of the sum come after it.
            fused = rewriter.call(
                ops.add_rms_norm,
                x,
                residual,
                bound["weight"],
                before=add,
                origin=norm.meta.get("origin"),
                eps=bound["eps"],
            )
            normed = rewriter.call(operator.getitem, fused, 0, before=add, origin=norm.meta.get("origin"))
            total = rewriter.call(operator.getitem, fused, 1, before=add)
            rewriter.replace(norm, normed)
            rewriter.replace(add, total)


def _no_sum(norm: fx.Node) -> str | None:
    """Return why a norm cannot be fused with an add: it does not read a plain sum.

    Return None for norms of attention heads. They never read a sum, so the reason is not recorded.
    """
    source = named_arguments(norm)["x"]
    if len(tensor_type(norm).shape) != 2:
        return None
    if is_call(source, torch.ops.aten.add.Tensor):
        return f"the add has the arguments {dict(source.kwargs)}"
    return f"the norm reads {described(source)}, not a sum"


def _type(value: object) -> str:
    return str(value.meta["type"]) if isinstance(value, fx.Node) else described(value)
