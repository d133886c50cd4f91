"""The cublas backend at compile time: it claims matmuls, and compiles nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ingot.backends.table import claim_cost
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.backend import No, Yes
from ingot.ir.formats import find_format
from ingot.ir.machine.target import Target
from ingot.ir.ops import linear, op_of, rounded_linear
from ingot.ir.program import named_arguments, target_name, tensor_type
from ingot.ir.types import DTYPE_NAMES

# cuBLAS multiplies eight-bit floats in rows and columns of whole 16 bytes. Blocks of 128 x 128 with a scale need
# compute capability 9.0, and rows of scales in whole 16 bytes (cuBLAS 13.0, "Narrow Precision Data Types Usage").
_ALIGNED = 16
_BLOCK = 128
_SCALES_ALIGNED = 4
_BLOCKS_ON = 90


class Cublas:
    """The cublas backend. It claims (offers to compute) matmuls on GPUs, with cuBLAS through torch.

    These are `linear`, and `rounded_linear` with elements f8e4m3.
    """

    name = "cublas"

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cuda":
            return No(f"not for device '{target.device}'")
        for node in nodes:
            op = op_of(node.target)
            if op is linear:
                problem = _why_no_linear(node)
            elif op is rounded_linear:
                problem = _why_not_rounded(node, target)
            else:
                problem = f"no kernel for {target_name(node.target)}"
            if problem:
                return No(problem)
        return Yes(claim_cost(self.name) * len(nodes))

    def dry_run(self, node: fx.Node) -> Callable[..., Any]:
        return linear.costliest if op_of(node.target) is linear else _rounded_linear


def _rounded_linear(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, *_: object, dtype: torch.dtype, **__: object
) -> torch.Tensor:
    """Allocate what a call of `rounded_linear` allocates (`load.py`): the result, and what is copied for cuBLAS.

    That is the scales, and with scales of blocks also x, if its rows are no multiple of 4.
    """
    blocks = x_scales.shape[1] > 1
    copied = [torch.empty_like(x_scales), torch.empty_like(x)] if blocks else [x_scales.new_empty(len(weight))]
    result = x.new_empty(len(x), len(weight), dtype=dtype)
    del copied
    return result


def _why_no_linear(node: fx.Node) -> str:
    dtypes = {tensor_type(source).dtype for source in node.all_input_nodes}
    return "no matmul of " + " and ".join(sorted(DTYPE_NAMES[dtype] for dtype in dtypes)) if len(dtypes) > 1 else ""


def _why_not_rounded(node: fx.Node, target: Target) -> str:
    """Return why cuBLAS does not compute a call of `rounded_linear` on a target; "" if it does."""
    bound = named_arguments(node)
    format, weight = find_format(bound["format"]), tensor_type(bound["weight"])
    rows, columns = weight.shape
    assert isinstance(rows, int) and isinstance(columns, int)
    if format.element != "f8e4m3" or "fp8" not in target.features:
        return f"no matmul of {format.element} elements on this target"
    if bound["dtype"] is not torch.bfloat16:
        return f"no matmul of f8e4m3 elements with a result of {DTYPE_NAMES[bound['dtype']]}"
    if rows % _ALIGNED or columns % _ALIGNED:
        return f"no matmul by {rows} x {columns} elements f8e4m3, which are no multiples of {_ALIGNED}"
    level, rule = format.levels[0], format.activations
    assert rule is not None
    if not rule.columns and level.rows in (0, 1) and not level.columns:
        return ""
    if (rule.columns, level.rows, level.columns) != (_BLOCK, _BLOCK, _BLOCK) or target.sm != _BLOCKS_ON:
        return f"no matmul with the scales of format {format.name}"
    if columns % (_SCALES_ALIGNED * _BLOCK) or bound["bias"] is not None:
        return f"blocks of {_BLOCK} columns are no multiple of {_SCALES_ALIGNED}, or there is a bias"
    return ""
