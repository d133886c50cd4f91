"""The reference backend, compile side: claims every op, at a cost that any other backend beats."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ingot.backends.table import claim_cost
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.backend import No, Yes
from ingot.ir.machine.target import Target
from ingot.ir.ops import op_of
from ingot.ir.program import VIEWS


class Reference:
    """Runs an op's own reference on the step's whole batch.

    `asked`: the user wants references. Else one only stands in for what other backends refuse, and on a GPU it refuses
    calls of ops that need a kernel: they would become slower by orders, without a word.
    """

    name = "reference"
    cost = claim_cost("reference")
    _asked = True

    def __init__(self, *, asked: bool = True) -> None:
        self._asked = asked

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        ops = (op_of(node.target) for node in nodes)
        if not self._asked and target.device == "cuda" and any(op is not None and op.needs_kernel for op in ops):
            return No("on a GPU it stands in for no missing kernel of this op, being slower by orders")
        return self._taking(nodes)

    def _taking(self, nodes: Sequence[fx.Node]) -> Yes:
        # A view computes nothing, so it cannot depend on the batch.
        return Yes(self.cost, batch_invariant=all(node.target in VIEWS for node in nodes), timed=False)

    def dry_run(self, node: fx.Node) -> Callable[..., Any]:
        op = op_of(node.target)
        return node.target if op is None else op.costliest  # type: ignore[return-value]  # an aten call


class Rowwise(Reference):
    """Runs an op's reference one row at a time, so that a row's bits never depend on its batch. Slow."""

    name = "rowwise"
    cost = claim_cost("rowwise")

    def _taking(self, nodes: Sequence[fx.Node]) -> Yes:
        # aten's views, add and mul among them: one correctly rounded operation an element is the same in every batch.
        return Yes(self.cost, batch_invariant=True, timed=False)

    def dry_run(self, node: fx.Node) -> Callable[..., Any]:
        whole = super().dry_run(node)
        op = op_of(node.target)
        if op is None or op.states:
            return whole  # in place, whatever the backend

        def one_row_beside_all_results(*args: Any, **kwargs: Any) -> None:
            results = op.fake(*args, **kwargs)
            rows = [torch.empty_like(item) for item in (results if isinstance(results, tuple) else (results,))]
            args, kwargs = op.changed(args, kwargs, lambda name, value: value[:1] if name in op.rows else value)
            op.costliest(*args, **kwargs)
            del rows  # they were kept until they were joined

        return one_row_beside_all_results
