"""Lowering of experts fused with the add of the residual stream, or of another value, to their result."""

from collections.abc import Mapping, Sequence

from torch import fx

from ingot.backends.triton.lower.call import call_of
from ingot.backends.triton.lower.experts.experts import lower_experts
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.lower.residual import residual_of
from ingot.backends.triton.schedule import Schedule, Value


def experts_group(experts: fx.Node, free: Mapping[fx.Node, object]) -> list[fx.Node]:
    """Return the region of a call of `experts`: the call, and the add that is the only user of its result.

    It is empty if there is no add that can be fused. `free` holds the calls that are in no other region yet.
    """
    users = list(experts.users)
    if experts in free and len(users) == 1 and users[0] in free and residual_of(users[0], experts) is not None:
        return [experts, users[0]]
    return []


def lower_experts_region(
    calls: Sequence[fx.Node], values: Mapping[fx.Node, Value], schedule: Schedule
) -> tuple[Value, ...]:
    """Add the launches of a call of `experts` and an add to `schedule`, and return the sum.

    Raises Refused if `experts_group` cannot return such a region, or if no kernel supports the call.
    """
    experts = calls[0]
    if experts_group(experts, dict.fromkeys(calls)) != list(calls):
        raise Refused(f"a region of {len(calls)} calls that are not experts and an add")
    residual = residual_of(calls[1], experts)
    assert residual is not None
    return lower_experts(call_of(experts, values), schedule, residual=values[residual])
