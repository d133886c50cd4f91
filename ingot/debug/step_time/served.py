"""The sizes that a step is served in: a captured graph has rows of padding where the step has fewer."""

import torch

from ingot.debug.explained import Step
from ingot.ir.plan import BucketPlan, Plan
from ingot.runtime.cuda.decode_graph import graph_sizes
from ingot.runtime.cuda.executor import GRAPH_ROWS, is_capturable
from ingot.runtime.cuda.staging import HostInputs
from ingot.runtime.step import StepInputs, StepSizes, step_views


def served_size(plan: Plan, bucket: BucketPlan, step: Step) -> StepSizes | None:
    """Those of the graph that a step of a bucket class is replayed from; None where the host launches its calls."""
    if step.tokens != step.sequences or not is_capturable(bucket):
        return None
    rows = graph_sizes(GRAPH_ROWS, plan.dims.get("B", (1, 0))[1])
    size = next((one for one in rows if one >= step.tokens), None)
    return None if size is None else StepSizes(size, size, size, plan.dims.get("P", (1, 1))[1])


def padded(inputs: StepInputs, size: StepSizes) -> dict[str, torch.Tensor]:
    """The inputs of a step with the padding that a graph of this size adds to them."""
    host = HostInputs(size)
    host.fill(inputs)
    return step_views(host.flat.host, size)
