"""The steps that can be captured as graphs, and the sizes that steps are padded to."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ingot.ir.artifact.plan import GPU_FEW_TOKENS, REFERENCES, BucketClass, BucketPlan, Instruction, Plan
from ingot.ir.machine.gpus import Gpu
from ingot.ir.ops import OPS
from ingot.runtime.cuda.graphs.launch_bound import LaunchBound
from ingot.runtime.scheduling.scheduler_config import DEFAULT_MIXED_TOKENS
from ingot.runtime.steps.step import StepSizes

# Sequences of captured decode steps; smaller steps are padded. The spacing is vLLM's (1, 2, 4, then 8 apart up to 256
# and 16 apart above), and twice that from 64 on, where steps are so long that a row of padding costs little.
GRAPH_ROWS = (1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, 513, 32))
# Tokens of steps that prefill, after padding. At each new size cuBLAS would choose kernels again (H200, CUDA 13.0:
# 5 to 9 ms in the first launch of a step of 16 layers). At most half of a step is padding; at most an eighth above 1024
# tokens, where computing takes longer than launching.
_PROMPT_TOKENS = (
    *(96, 128, 192, 256, 384, 512, 768, 1024),
    *(size * part // 8 for size in (1 << power for power in range(10, 16)) for part in range(9, 17)),
)
# Prompt steps of up to this many tokens are captured for every model. On an H200 machine the host needs 2.2 ms to
# launch 8 layers, and their kernels need as long for some 1000 tokens.
ALWAYS_CAPTURED = 1024
# The share of GPU memory that graphs of longer steps may take, if those of short steps do not already take more. The KV
# cache loses that memory.
_MEMORY_SHARE = 1 / 64
# Sequences of prompt steps, at most as many as tokens. Up to 64 rows of logits cost about as much as one row, because
# reading the weight dominates. Above, at most half of the rows are padding.
_PROMPT_ROWS = (64, 128, 256, GRAPH_ROWS[-1])


def graph_sizes(largest: int, candidates: Sequence[int] = GRAPH_ROWS) -> list[int]:
    """Return the batch sizes to capture CUDA graphs for, in ascending order. They are the `candidates` below `largest`,
    and `largest`. The largest candidate is the upper limit."""
    return sorted({*(size for size in candidates if size < largest), min(largest, candidates[-1])})


def decode_steps(plan: Plan) -> dict[StepSizes, BucketPlan]:
    """Return the decode steps that can be captured as CUDA graphs: sizes -> instructions. A decode step has one token
    per sequence.

    If the plan has cascade attention (a shared prefix is read once), sizes of steps that use it come last.
    """
    rows = graph_sizes(plan.dims.get("B", (1, 0))[1])
    sizes = [StepSizes(size, size, size, most_pages(plan)) for size in rows]
    if "G" in plan.dims:
        sizes += [replace(size, G=size.B) for size in sizes if size.B > 1]
    return _capturable(plan, sizes, most=1)


def prompt_steps(plan: Plan, gpu: Gpu) -> dict[StepSizes, BucketPlan]:
    """Return the prompt steps that can be captured as CUDA graphs: sizes -> instructions. Instructions for few tokens
    are left out.

    These are all short steps, and some long ones. A long step must occur often, be launch-bound on `gpu`, and need
    little GPU memory. A step is launch-bound if the host takes longer than the GPU.
    """
    if "T" not in plan.dims:
        return {}  # the entry takes no tokens
    sizes = [
        StepSizes(tokens, rows, rows, most_pages(plan))
        for tokens in _prompt_tokens(plan)
        for rows in _prompt_rows(plan, tokens)
        if tokens <= ALWAYS_CAPTURED or _recurs(tokens, rows, plan)
    ]
    found = _capturable(plan, sizes, most=max((size.T for size in sizes), default=0))
    found = {size: bucket for size, bucket in found.items() if not has_few_tokens(bucket.bucket)}
    short = {size: bucket for size, bucket in found.items() if size.T <= ALWAYS_CAPTURED}
    memory = max(graph_arena(short), int(_MEMORY_SHARE * gpu.memory))
    long = {
        size: bucket for size, bucket in found.items() if size not in short and graph_arena({size: bucket}) <= memory
    }
    classes = {bucket.bucket.name: bucket for bucket in long.values()}
    bounds = {name: LaunchBound.of(bucket, plan, gpu) for name, bucket in classes.items()}
    return short | {size: bucket for size, bucket in long.items() if bounds[bucket.bucket.name].holds(size)}


def captured_together(
    steps: Mapping[StepSizes, BucketPlan], others: Iterable[Collection[StepSizes]]
) -> dict[StepSizes, BucketPlan]:
    """Return the steps that other pipeline stages capture too. All stages capture at the same time, because the step
    that precedes a capture sends values between them. Page tables may differ: a stage may have no cache.

    steps    the steps that this stage can capture: sizes -> instructions
    others   the sizes that each other stage can capture
    """
    common = [{replace(size, P=1) for size in sizes} for sizes in others]
    return {size: bucket for size, bucket in steps.items() if all(replace(size, P=1) in sizes for sizes in common)}


def _recurs(tokens: int, rows: int, plan: Plan) -> bool:
    """Return whether steps of these sizes, after padding, occur often while prompts queue.

    Such steps have the maximum number of tokens. Or they have DEFAULT_MIXED_TOKENS prompt tokens, and one token of each
    decoding sequence.
    """
    sizes = _prompt_tokens(plan)
    if tokens == sizes[-1]:
        return True
    fewest = max(size for size in sizes if size < tokens) + 1 - DEFAULT_MIXED_TOKENS  # decoding sequences
    return 0 < fewest <= rows


def mixed_tokens(plan: Plan, captured: Collection[StepSizes]) -> list[int]:
    """Return the token counts, after padding, of long mixed steps that no CUDA graph can replay. A mixed step has
    prompt tokens and decoding sequences. `captured` has all sizes for which a graph can be captured."""
    held = {size.T for size in captured}
    if "T" not in plan.dims:
        return []
    longest = DEFAULT_MIXED_TOKENS + GRAPH_ROWS[-1]
    return [size for size in _prompt_tokens(plan) if ALWAYS_CAPTURED < size <= longest and size not in held]


def filled_up(step: StepSizes, plan: Plan) -> StepSizes:
    """Return the sizes to pad a prompt step to. A CUDA graph of these sizes may exist or be captured later. If the step
    is too large for a graph, the tokens are rounded up to one of a few sizes."""
    tokens = next(size for size in _prompt_tokens(plan) if size >= step.T)
    needed = max(step.B, step.L)
    rows = next((count for count in _prompt_rows(plan, tokens) if needed <= count), None)
    return StepSizes(tokens, rows or step.B, rows or step.L, step.P)


def has_few_tokens(bucket: BucketClass) -> bool:
    """Return whether a bucket class is for steps of few tokens. Its kernels round a row equally at every step size.
    Matmul libraries, which other bucket classes use, may not. A bucket class is a range of step sizes with one compiled
    plan."""
    return bucket.tokens[1] <= GPU_FEW_TOKENS


def _prompt_tokens(plan: Plan) -> list[int]:
    largest = plan.dims.get("T", (1, 1))[1]
    return [*(size for size in _PROMPT_TOKENS if size < largest), largest]


def _prompt_rows(plan: Plan, tokens: int) -> list[int]:
    return graph_sizes(min(plan.dims.get("B", (1, 1))[1], tokens), _PROMPT_ROWS)


def _capturable(plan: Plan, sizes: Sequence[StepSizes], most: int) -> dict[StepSizes, BucketPlan]:
    served = {size: bucket_serving(plan, size.T, most) for size in sizes}
    return {size: bucket for size, bucket in served.items() if bucket is not None and is_capturable(bucket)}


def bucket_serving(plan: Plan, tokens: int, most: int) -> BucketPlan | None:
    """Return the bucket class that runs a step; None if the step is too large. A bucket class is a range of step sizes
    with one compiled plan.

    tokens   the number of tokens in the step
    most     the most tokens of one sequence in the step
    """
    return next((one for one in plan.buckets if one.bucket.holds(tokens, most)), None)


def most_pages(plan: Plan) -> int:
    return plan.dims.get("P", (1, 1))[1]


def is_capturable(bucket: BucketPlan) -> bool:
    """Return whether a CUDA graph can contain all these instructions. Each must be compiled code, a call of a kernel
    library, an aten op, or an op with `on_device` (it runs only on the device). The reference of another op may read
    data on the host, or allocate depending on data."""
    return all(
        one.calls is not None or one.backend not in REFERENCES or one.target.startswith("aten.") or _on_device(one)
        for one in bucket.instructions
    )


def _on_device(instruction: Instruction) -> bool:
    op = OPS.get(instruction.target.removeprefix("ingot."))
    return op is not None and op.on_device


def graph_arena(steps: Mapping[StepSizes, BucketPlan]) -> int:
    """Return how many bytes of activation memory suffice for each of these CUDA graphs. `steps` maps the sizes of a
    graph to its instructions.

    The plan states the bytes for the largest step. A smaller step is assumed to need less, in proportion to its tokens
    or its rows of logits. The larger of the two proportions counts.
    """
    return max(
        (math.ceil(_share(size, bucket) * bucket.memory.activations) for size, bucket in steps.items()), default=0
    )


def _share(size: StepSizes, bucket: BucketPlan) -> float:
    dims = {"T": size.T, "L": size.L}
    return min(1.0, max(count / max(1, bucket.memory.sizes.get(dim, 1)) for dim, count in dims.items()))
