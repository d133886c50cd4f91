"""Lowerings of the routers of mixtures of experts: route and sparse_mixer."""

import torch

from ingot.backends.triton.kernels.experts import route as kernels
from ingot.backends.triton.launches import WARP
from ingot.backends.triton.lower.attention.heads import static
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.sizes import power_of_two
from ingot.backends.triton.schedule import Schedule, Value

# Scores that a thread holds. With one warp a choice needs no exchange between warps.
_HELD = 16
# The most scores of a tile: 16 for each of 1024 threads.
_MOST = 1 << 14


def _checked(call: Call) -> tuple[Value, int]:
    """Return the logits of a call, and the number of experts. Raises Refused if the kernels cannot read the logits."""
    logits = call.value("router_logits")
    call.want(len(logits.type.shape) == 2, f"the router's logits are {logits.type}, not [T, E]")
    call.want(logits.type.dtype is torch.float32, f"the router's logits are not f32: {logits.type}")
    call.want_dense_rows("router_logits")
    return logits, static(logits, 1)


def _warps(call: Call, block: int) -> int:
    """Return the warps of a program that holds a tile of `block` scores. Raises Refused if it would need too many."""
    call.want(block <= _MOST, f"a tile of {block} scores of experts, more than {_MOST}")
    return max(1, block // (_HELD * WARP))


def _route(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    logits, experts = _checked(call)
    bias, asked = call.optional("bias"), call.attributes
    call.want(bias is None or bias.strides == (1,), "the bias is not a dense vector")
    groups = asked["groups"]
    block_groups, block_size = power_of_two(groups), power_of_two(experts // groups)
    constants = {
        "TOP_K": asked["top_k"],
        "SIGMOID": asked["scores"] == "sigmoid",
        "RENORMALIZE": asked["renormalize"],
        "LEAST_SUM": float(asked["least_sum"]),
        "GROUPS": groups,
        "SIZE": experts // groups,
        "KEPT": asked["kept_groups"],
        "BEST": asked["group_best"],
        "SCALE": float(asked["scale"]),
        "BY_LOGITS": asked["by_logits"],
        "BLOCK_GROUPS": block_groups,
        "BLOCK_SIZE": block_size,
        "BLOCK_CHOICES": power_of_two(asked["top_k"]),
    }
    weights, chosen = (schedule.output(result) for result in call.results)
    schedule.launch(
        kernels.route,
        (logits.type.shape[0],),
        {"logits": logits, "bias": bias, "weights": weights, "chosen": chosen},
        {"LOGITS_ROW": logits.strides[0], **constants, "DEPENDENT": schedule.dependent},
        warps=_warps(call, block_groups * block_size),
        dependent=schedule.dependent,
    )
    return weights, chosen


def _sparse_mixer(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    logits, experts = _checked(call)
    block = power_of_two(experts)
    weights, chosen = (schedule.output(result) for result in call.results)
    schedule.launch(
        kernels.sparse_mixer,
        (logits.type.shape[0],),
        {"logits": logits, "weights": weights, "chosen": chosen},
        {
            "LOGITS_ROW": logits.strides[0],
            "EXPERTS": experts,
            "FAR": 2.0 * call.attributes["jitter"],
            "BLOCK": block,
            "DEPENDENT": schedule.dependent,
        },
        warps=_warps(call, block),
        dependent=schedule.dependent,
    )
    return weights, chosen


LOWERINGS: dict[str, Lowering] = {"route": _route, "sparse_mixer": _sparse_mixer}
