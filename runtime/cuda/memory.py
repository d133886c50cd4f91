"""The GPU memory that serving may use, computed from the plans without running a step."""

import torch

from ingot.ir.artifact.plan import Plan, Plans
from ingot.ir.machine.find_gpu import find_gpu
from ingot.ir.machine.gpus import Gpu
from ingot.runtime.cuda.graphs.sizes import decode_steps, graph_arena, prompt_steps
from ingot.runtime.loading.memory import ServingMemory

# The default share of GPU memory for serving, equal to vLLM's default gpu_memory_utilization.
USUAL_SHARE = 0.9
# Memory that no plan counts: kernel code (mostly cuBLAS's), cuBLAS's workspaces, and the allocator's rounding up to
# blocks of 2 and 20 MiB. An allowance, not measured separately on a device.
_LIBRARIES = 512 << 20
# The driver's memory for an instantiated graph of some hundred launches.
_GRAPH = 8 << 20


def device_memory(device: torch.device, plans: Plans, *, graphs: bool, granularity: int | None = None) -> ServingMemory:
    """Return how much memory the GPU `device` has now for serving `plans`.

    graphs        whether steps are captured as CUDA graphs; graphs need memory too
    granularity   the smallest unit of GPU memory, in bytes, that several address ranges can share; None: they cannot
                  share memory
    """
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # cached by torch's allocator
    return serving_memory(free, total, plans, find_gpu() if graphs else None, granularity)


def serving_memory(
    free: int, total: int, plans: Plans, graphs: Gpu | None, granularity: int | None = None
) -> ServingMemory:
    """Return how much memory a GPU has for serving `plans`.

    free          the bytes that are free now
    total         all bytes of the GPU
    graphs        the GPU, if steps are captured as CUDA graphs, which need memory too; None: no graphs
    granularity   the smallest unit of GPU memory, in bytes, that several address ranges can share; None: they cannot
                  share memory
    """
    unplanned = _LIBRARIES + (sum(graph_bytes(plan, graphs) for plan in plans.plans.values()) if graphs else 0)
    return ServingMemory(most=free, usual=int(USUAL_SHARE * total), unplanned=unplanned, granularity=granularity)


def graph_bytes(plan: Plan, gpu: Gpu) -> int:
    """Return how many bytes all CUDA graphs of a plan need on `gpu`. All graphs share one memory for activations and
    outputs. Each graph also needs memory for its inputs and for the driver."""
    decode, prompts = decode_steps(plan), prompt_steps(plan, gpu)
    # The inputs of a step grow with its tokens, sequences and rows of logits; the plan's are those of its largest.
    largest = max(1, *(max(bucket.memory.sizes.get("L", 1), 1) for bucket in plan.buckets))
    inputs = sum(-(-min(size.T, largest) * plan.memory.inputs // largest) for size in (*decode, *prompts))
    return graph_arena({**decode, **prompts}) + inputs + _GRAPH * (len(decode) + len(prompts))
