"""Find and lower regions of the triton backend: a matmul, a rounding or experts, fused with the ops around them.

Before a matmul may come a norm. After it may come a gate, an activation, a residual add, or a cast. Before the rounding
of rows (`round_rows`) comes a gate. After experts comes a residual add.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ingot.backends.triton.lower.experts.region import experts_group, lower_experts_region
from ingot.backends.triton.lower.linear.call import Gate, Linear, Norm
from ingot.backends.triton.lower.linear.matmul import schedule_linear
from ingot.backends.triton.lower.linear.weight import stored_weight
from ingot.backends.triton.lower.quant.round_rows import lower_rounding, rounding_group
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.lower.residual import residual_of
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir import ops
from ingot.ir.program import Program, is_call, named_arguments, tensor_type
from ingot.ir.weights import matmul_of

_SLICE = torch.ops.aten.slice.Tensor
_GATES = (ops.silu_mul.overload, ops.gelu_mul.overload)


@dataclass(frozen=True)
class _Chain:
    """The nodes of a region: a matmul and the ops that are fused with it.

    `norm` comes before the matmul `linear`, or is None. `slices` are the two parts of the matmul's columns that a gate
    reads, in order of columns. `end` is the gate, activation, residual add or cast after the matmul, or None. Only the
    result of the last node is read outside the region.
    """

    norm: fx.Node | None
    linear: fx.Node
    slices: tuple[fx.Node, ...] = ()
    end: fx.Node | None = None

    def members(self) -> list[fx.Node]:
        """Return the nodes of the region, in program order."""
        parts = (self.norm, self.linear, *self.slices, self.end)
        return [node for node in parts if node is not None]


def groups(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return the regions among the fusible calls `nodes`: matmuls, roundings and experts, with the ops fused with them.

    Each region is a list of nodes in program order, slices of the matmul included. Only the results of its last op are
    read outside the region, so the region can run in its place. A call in no region gets a kernel of its own. The add
    of a matmul and experts is fused with the matmul.
    """
    free = dict.fromkeys(nodes)
    found: list[list[fx.Node]] = []

    def take(members: list[fx.Node]) -> None:
        if len(members) > 1:
            found.append(members)
            for member in members:
                free.pop(member, None)

    for node in nodes:
        if is_call(node, ops.round_rows.overload):
            take(rounding_group(node, free))
        elif matmul_of(node) is not None:
            take(_chain(node, free).members())
    for node in nodes:
        if is_call(node, ops.experts.overload):
            take(experts_group(node, free))
    return found


def lower_region(body: Program, schedule: Schedule) -> tuple[Value, ...]:
    """Add the launches of a region (a matmul, a rounding or experts with fused ops) to `schedule`; return the results.

    `body` is the region's program. Raises Refused if `groups` cannot return such a region.
    """
    calls = list(body.calls())
    values = {node: Value(tensor_type(node), input=place) for place, node in enumerate(body.placeholders())}
    if any(is_call(node, ops.round_rows.overload) for node in calls):
        return lower_rounding(calls, values, schedule)
    if is_call(calls[0], ops.experts.overload):
        return lower_experts_region(calls, values, schedule)
    products = [node for node in calls if matmul_of(node) is not None]
    if len(products) != 1:
        raise Refused(f"a region with {len(products)} matmuls, where one is supported")
    chain = _chain(products[0], dict.fromkeys(calls))
    outputs = list(body.output_nodes().values())
    if set(chain.members()) != set(calls) or outputs != [chain.members()[-1]]:
        raise Refused(f"a region of {len(calls)} calls, where only {len(chain.members())} are fusible with the matmul")
    return (schedule_linear(_linear(chain, values), schedule),)


def _chain(linear: fx.Node, free: Mapping[fx.Node, Any]) -> _Chain:
    """Return the largest region around the matmul `linear`: the matmul and the ops that can be fused with it.

    `free` holds the calls that are in no other region yet. Only these can be fused.
    """
    source = named_arguments(linear)["x"]
    norm = source if is_call(source, ops.rms_norm.overload) and source in free and len(source.users) == 1 else None
    if norm is not None and len(tensor_type(norm).shape) != 2:
        norm = None
    return _with_gate(norm, linear, free) or _with_end(norm, linear, free)


def _with_gate(norm: fx.Node | None, linear: fx.Node, free: Mapping[fx.Node, Any]) -> _Chain | None:
    """Return the region of a matmul (the matmul and its fused ops) if it ends in a gate, else None.

    The gate reads two slices of the matmul's columns. `norm` is the norm before the matmul, or None. `free` holds the
    calls that are in no other region yet.
    """
    parts = tuple(linear.users)
    gates = {user for part in parts for user in part.users}
    if len(parts) != 2 or len(gates) != 1 or not all(_is_part_of_columns(part) for part in parts):
        return None
    slices = tuple(sorted(parts, key=_first_column))
    (gate,) = gates
    if gate not in free or gate.target not in _GATES:
        return None
    bound = named_arguments(gate)
    if {bound["gate"], bound["up"]} != set(slices) or len(tensor_type(gate).shape) != 2:
        return None
    return _Chain(norm, linear, slices, gate)


def _with_end(norm: fx.Node | None, linear: fx.Node, free: Mapping[fx.Node, Any]) -> _Chain:
    """Return the region of a matmul (the matmul and its fused ops) without a gate.

    It ends in a residual add, an activation or a cast to float32, if that op is in `free` and the only user of the
    matmul. Otherwise it ends with the matmul. `free` holds the calls that are in no other region yet. `norm` is the
    norm before the matmul, or None.
    """
    users = list(linear.users)
    if len(users) == 1 and users[0] in free:
        (end,) = users
        if residual_of(end, linear) is not None:
            return _Chain(norm, linear, end=end)
        if is_call(end, ops.activate.overload):
            return _Chain(norm, linear, end=end)
        if is_call(end, ops.cast.overload) and named_arguments(end)["dtype"] == torch.float32:
            return _Chain(norm, linear, end=end)
    return _Chain(norm, linear)


def _is_part_of_columns(node: fx.Node) -> bool:
    """Return whether a node is a slice of adjacent columns of a matrix."""
    return is_call(node, _SLICE) and len(node.args) == 4 and bool(node.args[1] == 1) and not node.kwargs


def _first_column(part: fx.Node) -> int:
    return int(str(part.args[2]))


def _linear(chain: _Chain, values: Mapping[fx.Node, Value]) -> Linear:
    matmul = matmul_of(chain.linear)
    assert matmul is not None
    last = chain.members()[-1]
    given = matmul.x if chain.norm is None else named_arguments(chain.norm)["x"]
    linear = Linear(
        values[given],
        stored_weight(matmul.weight.format, {name: values[node] for name, node in matmul.weight.parts.items()}),
        None if matmul.bias is None else values[matmul.bias],
        tensor_type(last),
    )
    if chain.norm is not None:
        norm = named_arguments(chain.norm)
        linear = replace(linear, norm=Norm(values[norm["weight"]], norm["eps"]))
    if chain.slices:
        linear = replace(linear, gate=_gate(last))
    elif chain.end is not None and is_call(chain.end, ops.activate.overload):
        linear = replace(linear, activation=named_arguments(chain.end)["kind"])
    elif chain.end is not None and (residual := residual_of(chain.end, chain.linear)) is not None:
        linear = replace(linear, residual=values[residual])
    return linear


def _gate(node: fx.Node) -> Gate:
    bound = named_arguments(node)
    gate, up = _first_column(bound["gate"]), _first_column(bound["up"])
    if node.target is ops.silu_mul.overload:
        return Gate("silu", gate, up)
    return Gate({"none": "gelu", "tanh": "gelu_tanh"}[bound["approximate"]], gate, up)
