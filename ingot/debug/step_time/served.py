"""The padded sizes with which a step runs: those of a CUDA graph, or of calls that the host launches."""

from dataclasses import replace

import torch

from ingot.debug.explained import StepShape
from ingot.ir.artifact.plan import BucketPlan, Plan
from ingot.ir.machine.gpus import Gpu
from ingot.runtime.cuda.graphs.sizes import decode_steps, filled_up, has_few_tokens, most_pages, prompt_steps
from ingot.runtime.cuda.graphs.staging import HostInputs
from ingot.runtime.steps.step import StepInputs, StepSizes


def served_size(plan: Plan, bucket: BucketPlan, step: StepShape, gpu: Gpu) -> StepSizes | None:
    """Return the sizes of the CUDA graph that replays a step. They may be larger than the step's sizes.

    Return None if the step has no graph, so that the host launches its calls. `bucket` is the plan of the step's bucket
    class (a range of step sizes).
    """
    if step.tokens == step.sequences:
        held = (size for size, one in decode_steps(plan).items() if one is bucket and step.tokens <= size.T)
        return min(held, key=lambda size: size.T, default=None)
    size = replace(computed_size(plan, bucket, step), P=most_pages(plan))
    return size if prompt_steps(plan, gpu).get(size) is bucket else None


def computed_size(plan: Plan, bucket: BucketPlan, step: StepShape) -> StepSizes:
    """Return the sizes of a step when the host launches its calls one by one.

    Some steps with prompts are padded to larger sizes.
    """
    size = StepSizes(step.tokens, step.sequences, step.sequences, P=1)  # for any context
    whole = bucket.bucket
    return size if whole.q_max is not None or has_few_tokens(whole) else filled_up(size, plan)


def padded(inputs: StepInputs, size: StepSizes) -> dict[str, torch.Tensor]:
    """Return a step's inputs, by name, padded to the sizes `size` of a CUDA graph."""
    host = HostInputs(inputs.layout, size)
    host.fill(inputs)
    return inputs.layout.views(host.flat.host, size)
