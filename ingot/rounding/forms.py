"""Compute a site in three ways: in float64, with the rounding of separate calls, and with that of a fused form."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.ops import op_of
from ingot.rounding.sites import Site

# Tensors by node: what the members of a site read from outside it.
Values = Mapping[fx.Node, Any]
# Results of the matmuls of a site, which its forms share: in float64, and with their terms in another order.
Matmuls = dict[fx.Node, torch.Tensor]
_NORMS = frozenset({"rms_norm", "layer_norm"})


@dataclass(frozen=True)
class FusedForm:
    """How a pass may change the rounding of a site (a group of calls that passes may fuse).

    `reordered` names the ops that may add their terms in another order. A fused kernel has other tiles, and no contract
    fixes the order. With `in_float32`, values between matmuls stay in float32. Only results of matmuls, inputs of
    attention and the last value are rounded.
    """

    reordered: frozenset[str] = frozenset()
    in_float32: bool = False

    def differs(self, site: Site) -> bool:
        """Return whether this form may round the result of `site` differently from separate calls."""
        called = (op_of(node.target) for node in site.members)
        return self.in_float32 or any(op is not None and op.name in self.reordered for op in called)


SEPARATE = FusedForm()
# Kernels of norm, rope and cache write round where the ops do (`ingot.ir.ops.rope_append`).
FORMS: Mapping[str, FusedForm] = {
    "merge-linears": FusedForm(frozenset({"linear"})),
    "fuse-add-rms-norm": FusedForm(_NORMS),
    "fuse-qk-norm-rope": FusedForm(_NORMS),
    "fuse-append-attention": FusedForm(_NORMS | {"attention"}),
    "form-regions": FusedForm(_NORMS | {"linear"}, in_float32=True),
}


def compute(site: Site, values: Values, exact: Matmuls, reordered: Matmuls, form: FusedForm = SEPARATE) -> torch.Tensor:
    """Return the result of `site`, a row for each token, with the rounding of the fused form `form`.

    A site is a group of calls that passes may fuse. `exact` are the float64 matmuls of `compute_exactly`. If the form
    does not reorder a matmul, its result is the exact one, rounded once. No kernel does better, so scores do not depend
    on this processor's BLAS. `reordered` is a cache for matmuls with terms in another order. Calls with equal `values`
    may share it.
    """
    env = dict(values)
    for node in site.members:
        op = op_of(node.target)
        given = {one: env[one] for one in node.all_input_nodes}
        reorder = op is not None and op.name in form.reordered
        if op is ops.linear and not reorder:
            env[node] = _as_declared(node, exact[node])
            continue
        if op is ops.linear:
            if node not in reordered:
                reordered[node] = _called(site, node, given, reorder=True)
            env[node] = reordered[node]
            continue
        if form.in_float32 and op is ops.attention:  # a kernel outside regions: it reads rounded values
            given = {one: _as_declared(one, value) for one, value in given.items()}
        elif form.in_float32:
            given = {one: _to(value, torch.float32) for one, value in given.items()}
        env[node] = _called(site, node, given, reorder=reorder)
    result = _as_declared(site.last, env[site.last])
    assert isinstance(result, torch.Tensor)
    return result


def compute_exactly(site: Site, values: Values) -> tuple[torch.Tensor, Matmuls]:
    """Return the result of `site` in float64, a row for each token, and the results of its matmuls in float64."""
    env = {node: _to(value, torch.float64) for node, value in values.items()}
    for node in site.members:
        env[node] = _called(site, node, {one: env[one] for one in node.all_input_nodes}, exact=True)
    result = env[site.last]
    assert isinstance(result, torch.Tensor)
    return result, {node: env[node] for node in site.matmuls}


def _called(site: Site, node: fx.Node, given: Values, *, reorder: bool = False, exact: bool = False) -> Any:
    """Return the result of one call. `given` has the tensors of its arguments.

    With `reorder`, sums are computed in another order. With `exact`, the call has dtype float64.
    """
    op = op_of(node.target)
    args: Any = fx.node.map_arg(node.args, given.__getitem__)
    kwargs: Any = fx.node.map_arg(node.kwargs, given.__getitem__)
    if op is None:
        assert callable(node.target)
        return node.target(*args, **kwargs)
    call = op.bind(args, kwargs)
    if exact and isinstance(call.get("dtype"), torch.dtype):
        call["dtype"] = torch.float64
    if op is ops.linear:
        return _linear(call, int(node.meta["type"].shape[-1]), reorder=reorder, repeat=not site.is_columnwise)
    if reorder and op is ops.attention:
        return _attention_reordered(call)
    if reorder:
        return _norm_reordered(op.reference, call)
    return op.reference(**call)


def _linear(call: dict[str, Any], columns: int, *, reorder: bool, repeat: bool) -> torch.Tensor:
    """Compute the op `linear` with a weight that may have only some of its rows.

    Each row yields one column of the result. With `repeat`, these columns are repeated until there are `columns`. With
    `reorder`, the terms are added in another order.
    """
    rows, bias = len(call["weight"]), call["bias"]
    if rows < columns and bias is not None:
        few = bias[torch.arange(rows) * columns // rows]
        call = {**call, "bias": None if repeat else few}
    if reorder:
        order = _order(call["weight"].shape[1])
        # gather takes a third of the time of index_select for bfloat16.
        moved = {name: call[name].gather(1, order.expand(len(call[name]), -1)) for name in ("x", "weight")}
        call = {**call, **moved}
    result: torch.Tensor = ops.linear.reference(**call)
    if rows < columns and repeat:
        result = result[:, torch.arange(columns) * rows // columns]
        result = result if bias is None else result + bias
    return result


def _norm_reordered(reference: Any, call: dict[str, Any]) -> torch.Tensor:
    order = _order(call["x"].shape[-1])
    moved = {name: call[name][..., order] for name in ("x", "weight", "bias") if call.get(name) is not None}
    result: torch.Tensor = reference(**{**call, **moved})
    return result[..., order.argsort()]


def _attention_reordered(call: dict[str, Any]) -> torch.Tensor:
    """Return attention with its sums over positions and over the columns of q and k in another order."""
    order, columns = _order(len(call["q"])), _order(call["q"].shape[-1])
    names = ("q", "k", "v", "positions", "token_seqs")
    moved = {name: call[name][order] for name in names if call[name] is not None}
    moved |= {name: moved[name][..., columns] for name in ("q", "k")}
    result: torch.Tensor = ops.attention.reference(**{**call, **moved})
    return result[order.argsort()]


@cache
def _order(count: int) -> torch.Tensor:
    """Return the random order in which a reordered sum adds `count` terms.

    Terms that cancel each other in the given order are then far apart.
    """
    return torch.randperm(count, generator=torch.Generator().manual_seed(count))


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _as_declared(node: fx.Node, value: Any) -> Any:
    """Return `value` in the dtype that the program declares for `node`."""
    dtype = getattr(node.meta["type"], "dtype", None)
    return value.to(dtype) if isinstance(value, torch.Tensor) and dtype is not None else value
