"""separate-rounding: in steps of many tokens, a GPU rounds activations once, and a library multiplies the elements."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.plan import REFERENCES
from ingot.ir.artifact.record import Numerics
from ingot.ir.backend import Backend, call_compilers
from ingot.ir.ops.rounded_linear import why_not_separate
from ingot.ir.program import tensor_type
from ingot.ir.weights import Matmul, matmul_of
from ingot.passes.base import Pass, PassContext
from ingot.passes.fuse_qk_norm_rope import why_no_kernel
from ingot.passes.many_tokens import has_many_tokens, why_few_rows
from ingot.passes.rewrite import Rewriter, trimmed


@dataclass(frozen=True)
class SeparateRounding(Pass):
    """Replaces `quant_linear` by `round_rows` and `rounded_linear`, where the format rounds activations.

    A matmul of eight-bit elements with scales is one that a library has, and tensor cores multiply such elements at
    twice the rate of bf16. Linears that read the same rows, and round them alike, share the rounding.

    The pass only runs on a GPU, in bucket classes (ranges of step sizes) with steps of many tokens, not in
    deterministic mode, and if backends have kernels for both ops. `force` rewrites in any class and without kernels.
    """

    name: ClassVar[str] = "separate-rounding"
    # Sums have another order. With scales of rows, cuBLAS adds with some 14 bits (errors: backends/cublas/load.py).
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    force: bool = False

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        compilers = call_compilers(context.backends)
        if not self.force and not (has_many_tokens(context) and compilers):
            return
        libraries = [backend for backend in context.backends if backend.name not in REFERENCES]
        rounded: dict[tuple[object, ...], tuple[fx.Node, fx.Node, fx.Node]] = {}
        for node in list(rewriter.program.calls(ops.quant_linear.overload)):
            matmul = matmul_of(node)
            assert matmul is not None
            if problem := _obstacle(matmul):
                rewriter.refuse(node, problem)
                continue
            key = (matmul.x, matmul.weight.parts.get("input_scale"), matmul.weight.format.activations)
            shared = key in rounded
            if not shared:
                rounded[key] = _rounding(rewriter, node, matmul)
            rounding, *parts = rounded[key]
            product = _product(rewriter, node, matmul, parts)
            wanted: tuple[tuple[fx.Node, Sequence[Backend]], ...] = ((rounding, compilers), (product, libraries))
            wanted = () if self.force else wanted
            reason = next((why for one, backends in wanted if (why := _why_not(one, backends, context))), "")
            if reason:
                rewriter.refuse(node, reason)
            if reason or not rewriter.take(node, product):
                rewriter.program.graph.erase_node(product)
                if not shared:
                    for one in (*reversed(parts), rounding):
                        rewriter.program.graph.erase_node(one)
                    del rounded[key]
                continue
            rewriter.replace(node, product)


def _obstacle(matmul: Matmul) -> str:
    """Return why a matmul keeps its quantized weight; "" if both ops can replace it."""
    return why_not_separate(matmul.weight.format) or why_few_rows(matmul.x)


def _why_not(node: fx.Node, backends: Sequence[Backend], context: PassContext) -> str:
    why = why_no_kernel(node, backends, context)
    return f"no backend has a kernel: {why}" if why else ""


def _rounding(rewriter: Rewriter, node: fx.Node, matmul: Matmul) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Add the call of `round_rows` before `node`. Return the call, its elements and its scales."""
    origin, format = node.meta.get("origin"), matmul.weight.format.name
    args = trimmed([matmul.x, matmul.weight.parts.get("input_scale")])
    call = rewriter.call(ops.round_rows, *args, before=node, origin=origin, format=format)
    elements, scales = (rewriter.call(operator.getitem, call, place, before=node) for place in (0, 1))
    return call, elements, scales


def _product(rewriter: Rewriter, node: fx.Node, matmul: Matmul, rows: list[fx.Node]) -> fx.Node:
    """Add the call of `rounded_linear` before `node`, and return it. `rows` are the elements and scales of x."""
    weight = [matmul.weight.parts[part] for part in ("weight", "scales")]
    args = trimmed([*rows, *weight, matmul.bias])
    attributes = {"format": matmul.weight.format.name, "dtype": tensor_type(matmul.x).dtype}
    return rewriter.call(ops.rounded_linear, *args, before=node, origin=node.meta.get("origin"), **attributes)
