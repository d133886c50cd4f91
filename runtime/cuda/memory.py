"""What a GPU has for serving, found without running anything: the plan says what a step takes."""

import torch

from ingot.ir.artifact.plan import Plan, Plans
from ingot.ir.machine.find_gpu import find_gpu
from ingot.ir.machine.gpus import Gpu
from ingot.runtime.cuda.graphs.sizes import decode_steps, graph_arena, prompt_steps
from ingot.runtime.memory import ServingMemory

# Of all memory, what serving takes by default: as much as gpu_memory_utilization is by default in vLLM.
USUAL_SHARE = 0.9
# What no plan counts and no file tells: code of kernels (cuBLAS's above all), cuBLAS's workspaces, and what the
# allocator loses to rounding up to its blocks of 2 and 20 MiB. An allowance, not yet measured on a device by itself.
_LIBRARIES = 512 << 20
# The driver's own part of an instantiated graph of some hundred launches.
_GRAPH = 8 << 20


def device_memory(device: torch.device, plans: Plans, *, graphs: bool, granularity: int | None = None) -> ServingMemory:
    """What `device` has to serve `plans` as it stands now, with captured graphs or without. `granularity` is that of
    its allocator."""
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch kept it for the next
    return serving_memory(free, total, plans, find_gpu() if graphs else None, granularity)


def serving_memory(
    free: int, total: int, plans: Plans, graphs: Gpu | None, granularity: int | None = None
) -> ServingMemory:
    """`device_memory` of a device of `total` bytes, `free` of which are not taken; `graphs` says what it is where
    steps are captured."""
    beside = _LIBRARIES + (sum(graph_bytes(plan, graphs) for plan in plans.plans.values()) if graphs else 0)
    return ServingMemory(most=free, usual=int(USUAL_SHARE * total), beside=beside, granularity=granularity)


def graph_bytes(plan: Plan, gpu: Gpu) -> int:
    """What captured steps hold beside other steps, as far as there are such: one memory for what lives within a step
    and comes out of it, and the inputs of each."""
    decode, prompts = decode_steps(plan), prompt_steps(plan, gpu)
    # The inputs of a step grow with its tokens, sequences and rows of logits; the plan's are those of its largest.
    largest = max(1, *(max(bucket.memory.sizes.get("L", 1), 1) for bucket in plan.buckets))
    inputs = sum(-(-min(size.T, largest) * plan.memory.inputs // largest) for size in (*decode, *prompts))
    return graph_arena({**decode, **prompts}) + inputs + _GRAPH * (len(decode) + len(prompts))
