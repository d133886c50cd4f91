"""The nccl backend at compile time: it claims the ops that the GPUs of a mesh axis compute together."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ingot.backends.table import claim_cost
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.backend import No, Yes
from ingot.ir.machine.target import Target
from ingot.ir.ops import op_of
from ingot.ir.ops.collectives import in_parts
from ingot.ir.program import target_name


class NcclBackend:
    """The nccl backend. It claims (offers to compute) collectives between GPUs, and compiles nothing."""

    name = "nccl"

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cuda":
            return No(f"not for device '{target.device}'")
        for node in nodes:
            op = op_of(node.target)
            if op is None or op.across is None or op.legal == "open":
                return No(f"{target_name(node.target)} is no collective")
        # Every rank adds the values in rank order, element by element, whatever the other rows are.
        return Yes(claim_cost(self.name) * len(nodes), batch_invariant=True, timed=False)

    def dry_run(self, node: fx.Node) -> Callable[..., Any]:
        op = op_of(node.target)
        assert op is not None  # `claim` refuses other calls
        return _ALLOCATES.get(op.name, op.costliest)


def _gathered(x: torch.Tensor, like: torch.Tensor | None = None, *, axis: str, dim: int, parts: int) -> torch.Tensor:
    found = x.contiguous().new_empty((parts, *x.shape))
    return found.flatten(0, 1) if dim == 0 else torch.cat(found.unbind(), dim)


def _added(x: torch.Tensor, *, axis: str) -> list[torch.Tensor]:
    """With more than two ranks, all elements are there three times: padded, received, and gathered."""
    return [torch.empty_like(x) for _ in range(3)]


def _exchanged(x: torch.Tensor, *, axis: str, dim: int, parts: int) -> list[torch.Tensor]:
    """With more than two ranks, the parts are sent and received. A sum in float32 takes two addends and its result."""
    given = in_parts(x, parts, dim)
    one = given[0]
    return [
        given,
        torch.empty_like(given),
        *(torch.empty_like(one, dtype=torch.float32) for _ in range(3)),
        torch.empty_like(one),
    ]


# What `load.py` allocates for a call, results included.
_ALLOCATES: dict[str, Callable[..., Any]] = {
    "all_gather": _gathered,
    "all_reduce": _added,
    "reduce_scatter": _exchanged,
}
