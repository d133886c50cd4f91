"""The cublas backend at compile time: it claims matmuls, and compiles nothing."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ingot.backends.table import claim_cost
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.backend import No, Yes
from ingot.ir.machine.target import Target
from ingot.ir.ops import linear, op_of
from ingot.ir.program import target_name, tensor_type
from ingot.ir.types import DTYPE_NAMES


class Cublas:
    """The cublas backend. It claims (offers to compute) the op `linear` on GPUs, with cuBLAS through torch."""

    name = "cublas"

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cuda":
            return No(f"not for device '{target.device}'")
        for node in nodes:
            if op_of(node.target) is not linear:
                return No(f"no kernel for {target_name(node.target)}")
            dtypes = {tensor_type(source).dtype for source in node.all_input_nodes}
            if len(dtypes) > 1:
                return No("no matmul of " + " and ".join(sorted(DTYPE_NAMES[dtype] for dtype in dtypes)))
        return Yes(claim_cost(self.name) * len(nodes))

    def dry_run(self, node: fx.Node) -> Callable[..., Any]:
        return linear.costliest
