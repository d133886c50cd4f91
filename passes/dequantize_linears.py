"""dequantize-linears: in steps of many tokens, a GPU multiplies by a matrix that is made of a quantized weight."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.backend import call_compilers
from ingot.ir.program import tensor_type
from ingot.ir.types import DTYPE_NAMES
from ingot.ir.weights import Matmul, matmul_of
from ingot.passes.base import Pass, PassContext
from ingot.passes.fuse_qk_norm_rope import why_no_kernel
from ingot.passes.many_tokens import has_many_tokens, why_few_rows
from ingot.passes.rewrite import Rewriter, trimmed

_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class DequantizeLinears(Pass):
    """Replaces `quant_linear` by `linear` with the result of `dequantize`, where steps have many tokens.

    A matmul of many tokens is limited by tensor cores. Elements that are converted within it slow it down, and each
    element is converted once for each tile of tokens. As a matrix, the weight is converted once in a step, and any
    backend can multiply by it. The matrix is rounded to the dtype of x. Its memory is used again by later calls.

    The pass only runs on a GPU, in bucket classes (ranges of step sizes) with steps of many tokens, not in
    deterministic mode, and if a backend has a kernel for `dequantize`. It leaves formats that round or rotate the input
    of a linear, and those with columns in another order. `force` rewrites in any class and without a kernel.
    """

    name: ClassVar[str] = "dequantize-linears"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING  # the numbers of the weight are rounded
    force: bool = False

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        compilers = call_compilers(context.backends)
        if not self.force and not (has_many_tokens(context) and compilers):
            return
        for node in list(rewriter.program.calls(ops.quant_linear.overload)):
            matmul = matmul_of(node)
            assert matmul is not None
            if problem := _obstacle(matmul):
                rewriter.refuse(node, problem)
                continue
            matrix = _matrix(rewriter, node, matmul)
            no_kernel = "" if self.force else why_no_kernel(matrix, compilers, context)
            if no_kernel:
                rewriter.refuse(node, f"no backend has a kernel for dequantize: {no_kernel}")
            if no_kernel or not rewriter.take(node, matrix):
                rewriter.program.graph.erase_node(matrix)
                continue
            args = trimmed([matmul.x, matrix, matmul.bias])
            made = rewriter.call(ops.linear, *args, before=node, origin=node.meta.get("origin"))
            rewriter.replace(node, made)


def _obstacle(matmul: Matmul) -> str:
    """Return why a matmul keeps its quantized weight; "" if a matrix can replace the weight."""
    format, dtype = matmul.weight.format, tensor_type(matmul.x).dtype
    if dtype not in _DTYPES:
        return f"x is {DTYPE_NAMES[dtype]}, and not of 16 bits"
    if format.lossless or format.activations is not None or format.rotated:
        return f"format {format.name} is plain, or rounds or rotates the input of the linear"
    if format.ordered:
        return f"format {format.name} has columns in another order"
    return why_few_rows(matmul.x)


def _matrix(rewriter: Rewriter, node: fx.Node, matmul: Matmul) -> fx.Node:
    """Add the call of `dequantize` that returns the weight of `node`, before it, and return the call."""
    parts = [matmul.weight.parts.get(part) for part in ops.dequantize.parameters.names]
    dtype = tensor_type(matmul.x).dtype
    origin, format = node.meta.get("origin"), matmul.weight.format.name
    args = trimmed(parts[: ops.dequantize.parameters.positional])
    return rewriter.call(ops.dequantize, *args, before=node, origin=origin, format=format, dtype=dtype)
