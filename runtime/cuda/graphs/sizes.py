"""Which steps can be captured as graphs, and the sizes that steps are filled up to."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ingot.ir.artifact.plan import GPU_FEW_TOKENS, BucketClass, BucketPlan, Instruction, Plan
from ingot.ir.machine.gpus import Gpu
from ingot.ir.ops import OPS
from ingot.runtime.cuda.graphs.launch_bound import LaunchBound
from ingot.runtime.scheduler_config import DEFAULT_MIXED_TOKENS
from ingot.runtime.step import StepSizes

# Sequences of a captured decode step; one of fewer is filled up. As far apart as vLLM has them (1, 2, 4, then steps of
# 8 to 256 and of 16 above), and twice that where steps are long enough that a row of padding costs little.
GRAPH_ROWS = (1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, 513, 32))
# Tokens of steps that feed prompts, which are filled up: for each other size cuBLAS would choose its code anew (H200,
# CUDA 13.0: 5 to 9 ms of the first launch of a step of 16 layers). No more than half of a step is padding, and of one
# that computes for longer than it is launched an eighth.
_PROMPT_TOKENS = (
    *(96, 128, 192, 256, 384, 512, 768, 1024),
    *(size * part // 8 for size in (1 << power for power in range(10, 16)) for part in range(9, 17)),
)
# Up to so many they are captured whatever the model: the host takes 2.2 ms to launch 8 layers on an H200's machine, and
# their kernels take as long for some 1000 tokens.
ALWAYS_CAPTURED = 1024
# Of the GPU's memory, what longer steps may take for it, where the short ones do not take as much: the KV cache would
# have it otherwise.
_MEMORY_SHARE = 1 / 64
# Their sequences: up to 64 rows of logits cost about what one does, reading the weight; above, no more than half of the
# rows are padding. There are no more than tokens.
_PROMPT_ROWS = (64, 128, 256, GRAPH_ROWS[-1])
# Backends whose calls may read data on the host, or allocate by it, unless the op says that it does neither.
_MAY_LOOK = frozenset({"reference", "rowwise"})


def graph_sizes(largest: int, candidates: Sequence[int] = GRAPH_ROWS) -> list[int]:
    """The sizes of graphs for batches up to `largest`, the last of which the largest batch fills."""
    return sorted({*(size for size in candidates if size < largest), min(largest, candidates[-1])})


def decode_steps(plan: Plan) -> dict[StepSizes, BucketPlan]:
    """The decode steps that graphs can hold, one token of each sequence, up to the largest batch; each with the bucket
    class that it is of. Where the plan takes the table of shared prefixes, steps that share any come after the
    others."""
    rows = graph_sizes(plan.dims.get("B", (1, 0))[1])
    sizes = [StepSizes(size, size, size, most_pages(plan)) for size in rows]
    if "G" in plan.dims:
        sizes += [replace(size, G=size.B) for size in sizes if size.B > 1]
    return _capturable(plan, sizes, most=1)


def prompt_steps(plan: Plan, gpu: Gpu) -> dict[StepSizes, BucketPlan]:
    """The same of steps that feed prompts, of more tokens than a decode step of few has: all short ones, and those of
    the long ones that come again and again, that the GPU waits for the host in, and that take little of its memory."""
    if "T" not in plan.dims:
        return {}  # it is fed none
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


def _recurs(tokens: int, rows: int, plan: Plan) -> bool:
    """Whether steps that are filled up to these sizes come again and again while prompts wait: of as many tokens as a
    step may have, or of as many of prompts as may stand beside sequences that decode, and one of each of these."""
    sizes = _prompt_tokens(plan)
    if tokens == sizes[-1]:
        return True
    fewest = max(size for size in sizes if size < tokens) + 1 - DEFAULT_MIXED_TOKENS  # sequences that decode
    return 0 < fewest <= rows


def mixed_tokens(plan: Plan, captured: Collection[StepSizes]) -> list[int]:
    """Tokens of steps that feed prompts, as they are filled up, where none of these graphs holds them and yet sequences
    that decode wait for them."""
    held = {size.T for size in captured}
    if "T" not in plan.dims:
        return []
    longest = DEFAULT_MIXED_TOKENS + GRAPH_ROWS[-1]
    return [size for size in _prompt_tokens(plan) if ALWAYS_CAPTURED < size <= longest and size not in held]


def filled_up(step: StepSizes, plan: Plan) -> StepSizes:
    """The sizes that a step is computed in which feeds prompts: of a graph where one could serve it, and then of few
    others, whether or not anything is captured."""
    tokens = next(size for size in _prompt_tokens(plan) if size >= step.T)
    needed = max(step.B, step.L)
    rows = next((count for count in _prompt_rows(plan, tokens) if needed <= count), None)
    return StepSizes(tokens, rows or step.B, rows or step.L, step.P)


def has_few_tokens(bucket: BucketClass) -> bool:
    """Whether kernels of a class round a row alike whatever the size of the step; libraries, which others have, may
    not."""
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
    """The bucket class of steps of so many tokens, at most `most` of one sequence."""
    return next((one for one in plan.buckets if one.bucket.holds(tokens, most)), None)


def most_pages(plan: Plan) -> int:
    return plan.dims.get("P", (1, 1))[1]


def is_capturable(bucket: BucketPlan) -> bool:
    """Whether a graph can hold the instructions of a bucket class: calls of libraries, of compiled code, and aten's
    views and arithmetic."""
    return all(
        one.calls is not None or one.backend not in _MAY_LOOK or one.target.startswith("aten.") or _on_device(one)
        for one in bucket.instructions
    )


def _on_device(instruction: Instruction) -> bool:
    op = OPS.get(instruction.target.removeprefix("ingot."))
    return op is not None and op.on_device


def graph_arena(steps: Mapping[StepSizes, BucketPlan]) -> int:
    """Bytes that hold everything that lives within any of these steps. The plan knows the largest step of a bucket
    class; of a smaller one all is smaller, by its tokens or its rows of logits, but some numbers for each sequence."""
    return max(
        (math.ceil(_share(size, bucket) * bucket.memory.activations) for size, bucket in steps.items()), default=0
    )


def _share(size: StepSizes, bucket: BucketPlan) -> float:
    dims = {"T": size.T, "L": size.L}
    return min(1.0, max(count / max(1, bucket.memory.sizes.get(dim, 1)) for dim, count in dims.items()))
