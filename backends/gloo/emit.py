"""The gloo backend at compile time: it claims the ops that the ranks of a mesh axis compute together."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ingot.backends.table import claim_cost
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.backend import No, Yes
from ingot.ir.machine.target import Target
from ingot.ir.ops import op_of
from ingot.ir.program import target_name


class Gloo:
    """The gloo backend. It claims (offers to compute) collectives between CPU processes, and compiles nothing."""

    name = "gloo"

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cpu":
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
        return op.costliest
