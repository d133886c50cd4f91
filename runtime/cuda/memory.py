"""What a GPU has for serving, found without running anything: the plan says what a step takes."""

from collections.abc import Sequence

import torch

from ingot.ir.plan import Plan, Plans
from ingot.runtime.cuda.graph_sizes import graph_sizes
from ingot.runtime.memory import ServingMemory

# Of all memory, what serving takes when nobody says: as much as gpu_memory_utilization is by default in vLLM.
USUAL_SHARE = 0.9
# What no plan counts and no file tells: code of kernels (cuBLAS's above all), cuBLAS's workspaces, and what the
# allocator loses to rounding up to its blocks of 2 and 20 MiB. An allowance, not yet measured on a device by itself.
_LIBRARIES = 512 << 20
# The driver's own part of an instantiated graph of some hundred launches.
_GRAPH = 8 << 20


def device_memory(device: torch.device, plans: Plans, rows: Sequence[int]) -> ServingMemory:
    """What `device` has to serve `plans` with captured graphs of `rows` sequences, as it stands now."""
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch kept it for the next
    return serving_memory(free, total, plans, rows)


def serving_memory(free: int, total: int, plans: Plans, rows: Sequence[int]) -> ServingMemory:
    """`device_memory` of a device of `total` bytes, `free` of which nobody has taken."""
    beside = _LIBRARIES + sum(graph_bytes(plan, rows) for plan in plans.plans.values())
    return ServingMemory(most=free, usual=int(USUAL_SHARE * total), beside=beside)


def graph_bytes(plan: Plan, rows: Sequence[int]) -> int:
    """What captured decode steps of `rows` sequences hold beside other steps, as far as there are such: one pool for
    what lives within a step and comes out of it, which the largest fills, and the inputs of each."""
    kept = graph_sizes(plan.dims.get("B", (1, 0))[1], rows) if rows else []
    buckets = {bucket.bucket.name: bucket for size in kept for bucket in plan.buckets if bucket.bucket.holds(size, 1)}
    if not buckets:
        return 0
    pool = max(bucket.memory.activations for bucket in buckets.values())
    # The inputs of a step grow with its rows; the plan's are those of its largest.
    largest = max(1, *(max(bucket.memory.sizes.get("L", 1), 1) for bucket in plan.buckets))
    shares = sum(-(-size * plan.memory.inputs // largest) for size in kept)
    return pool + shares + _GRAPH * len(kept)
