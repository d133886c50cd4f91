"""Lowerings of the routers of mixtures of experts: route and sparse_mixer."""

from typing import Any

import torch

from ingot.backends.triton.kernels import route as kernels
from ingot.backends.triton.launches import WARP
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.heads import static
from ingot.backends.triton.lower.sizes import power_of_two
from ingot.backends.triton.schedule import Schedule, Value

# Scores that a thread holds. With one warp a choice needs no exchange between warps.
_HELD = 16
# The most experts: 16 scores for each of 1024 threads.
_MOST = 1 << 14


def _checked(call: Call) -> tuple[Value, int]:
    """Return the logits of a call, and the number of experts. Raises Refused if the kernels cannot read the logits."""
    logits = call.value("router_logits")
    call.want(len(logits.type.shape) == 2, f"the router's logits are {logits.type}, not [T, E]")
    call.want(logits.type.dtype is torch.float32, f"the router's logits are not f32: {logits.type}")
    call.want_dense_rows("router_logits")
    experts = static(logits, 1)
    call.want(experts <= _MOST, f"{experts} experts, more than {_MOST}")
    return logits, experts


def _launch(
    call: Call,
    schedule: Schedule,
    kernel: Any,
    logits: Value,
    given: dict[str, Value | None],
    constants: dict[str, Any],
    block: int,
) -> tuple[Value, ...]:
    weights, chosen = (schedule.output(result) for result in call.results)
    schedule.launch(
        kernel,
        (logits.type.shape[0],),
        {"logits": logits, **given, "weights": weights, "chosen": chosen},
        {"LOGITS_ROW": logits.strides[0], **constants, "DEPENDENT": schedule.dependent},
        warps=max(1, block // (_HELD * WARP)),
        dependent=schedule.dependent,
    )
    return weights, chosen


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
        "BLOCK_GROUPS": block_groups,
        "BLOCK_SIZE": block_size,
        "BLOCK_CHOICES": power_of_two(asked["top_k"]),
    }
    return _launch(call, schedule, kernels.route, logits, {"bias": bias}, constants, block_groups * block_size)


def _sparse_mixer(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    logits, experts = _checked(call)
    block = power_of_two(experts)
    constants = {"EXPERTS": experts, "FAR": 2.0 * call.attributes["jitter"], "BLOCK": block}
    return _launch(call, schedule, kernels.sparse_mixer, logits, {}, constants, block)


LOWERINGS: dict[str, Lowering] = {"route": _route, "sparse_mixer": _sparse_mixer}
