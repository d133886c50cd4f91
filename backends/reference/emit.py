"""The reference and rowwise backends at compile time: they claim every op, at a higher cost than other backends."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ingot.backends.rounded_activations import unrounded
from ingot.backends.table import claim_cost
from ingot.ir import ops
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.backend import No, Yes
from ingot.ir.machine.target import Target
from ingot.ir.ops import op_of
from ingot.ir.program import VIEWS
from ingot.ir.weights import formats_of_call


class Reference:
    """The reference backend. It computes an op by its reference implementation in torch, on the whole batch of a step.

    `asked` is true if the user chose this backend. Otherwise, on a GPU, it refuses ops that need a kernel, quantized
    experts, and formats that round activations by instructions that the GPU lacks. A silent fallback to their
    references would be slower by orders of magnitude.
    """

    name = "reference"
    cost = claim_cost("reference")
    _asked = True

    def __init__(self, *, asked: bool = True) -> None:
        self._asked = asked

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        called = [op_of(node.target) for node in nodes]
        if any(op is not None and op.across is not None for op in called):
            return No("ranks compute it together, through a backend that connects them")
        if not self._asked and target.device == "cuda" and any(op is not None and op.needs_kernel for op in called):
            return No("on a GPU it does not replace a missing kernel of this op: it is slower by orders of magnitude")
        if not self._asked and target.device == "cuda" and (formats := _formats_of_experts(nodes)):
            return No(f"on a GPU it does not replace a missing kernel of experts in format {', '.join(formats)}")
        if not self._asked and (refused := unrounded(nodes, target)):
            return refused
        return self._taking(nodes)

    def _taking(self, nodes: Sequence[fx.Node]) -> Yes:
        # A view computes nothing, so it cannot depend on the batch.
        return Yes(self.cost, batch_invariant=all(node.target in VIEWS for node in nodes), timed=False)

    def dry_run(self, node: fx.Node) -> Callable[..., Any]:
        op = op_of(node.target)
        return node.target if op is None else op.costliest  # type: ignore[return-value]  # an aten call


def _formats_of_experts(nodes: Sequence[fx.Node]) -> list[str]:
    """Return the names of the formats in which calls of `experts` read their weights, other than plain ones."""
    experts = [node for node in nodes if op_of(node.target) is ops.experts]
    return sorted({format.name for node in experts for format in formats_of_call(node)})


class Rowwise(Reference):
    """The rowwise backend, which is slow. It computes an op one row at a time.

    The bits of a row therefore never depend on its batch.
    """

    name = "rowwise"
    cost = claim_cost("rowwise")

    def _taking(self, nodes: Sequence[fx.Node]) -> Yes:
        # This includes aten's views, add and mul: one correctly rounded operation per element is the same in any batch.
        return Yes(self.cost, batch_invariant=True, timed=False)

    def dry_run(self, node: fx.Node) -> Callable[..., Any]:
        whole = super().dry_run(node)
        op = op_of(node.target)
        if op is None or op.states:
            return whole  # an op with states runs in place in every backend

        def one_row_at_a_time(*args: Any, **kwargs: Any) -> None:
            results = op.fake(*args, **kwargs)
            rows = [torch.empty_like(item) for item in (results if isinstance(results, tuple) else (results,))]
            args, kwargs = op.changed(args, kwargs, lambda name, value: value[:1] if name in op.rows else value)
            op.costliest(*args, **kwargs)
            del rows  # the rows are kept until they are concatenated

        return one_row_at_a_time
