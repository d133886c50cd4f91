"""Estimate of whether a step without a CUDA graph is launch-bound: the GPU would wait for the host."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ingot.ir.artifact.plan import BucketPlan, Instruction, Plan, Ref
from ingot.ir.machine.gpus import Gpu, matmul_rate
from ingot.ir.ops import OPS
from ingot.ir.parse import parse_type
from ingot.ir.types import DTYPE_NAMES, Size
from ingot.runtime.steps.step import StepSizes

# Host seconds per call under load, including views and the fixed cost of a step. On an H200 machine a step takes the
# host 10 to 15 ms with the 265 calls of Qwen3-0.6B, and 5 to 9 ms with the 157 calls of Llama-3.2-1B.
_CALL = 55e-6
# The largest share of the published matmul rate that matmuls with weights reach, if a step's other kernels count too.
# On an H200, steps of 8192 tokens of these two models take 13 and 29 ms, in which their matmuls reach 0.56.
_SHARE = 0.56


@dataclass(frozen=True)
class LaunchBound:
    """The time that the host and the GPU take for a step of one bucket class. A bucket class is a range of step sizes
    with one compiled plan.

    launching   seconds that the host needs to launch the calls
    matmuls     seconds that the GPU needs per row of the matmuls with weights. The key is the dim that counts the rows:
                `T` (tokens), `L` (rows of logits), …
    """

    launching: float
    matmuls: Mapping[Size, float]

    @staticmethod
    def of(bucket: BucketPlan, plan: Plan, gpu: Gpu) -> "LaunchBound":
        calls = [one for one in bucket.instructions if not _is_view(one, bucket)]
        matmuls: dict[Size, float] = {}
        for call in calls:
            weights = _weights(call, plan) if _multiplies(call) else 0
            if weights and (name := next(filter(None, call.results), None)):
                made = parse_type(bucket.values[name].type)
                seconds = 2 * weights / (_SHARE * matmul_rate(gpu, DTYPE_NAMES[made.dtype]))
                matmuls[made.shape[0]] = matmuls.get(made.shape[0], 0.0) + seconds
        return LaunchBound(_CALL * len(calls), matmuls)

    def holds(self, size: StepSizes) -> bool:
        """Return whether the host takes longer to launch a step than the GPU takes to compute its matmuls. A CUDA graph
        saves time for such a step. `size` has the step's sizes."""
        dims = asdict(size)
        rows = {dim: dims[dim] if isinstance(dim, str) else dim for dim in self.matmuls}
        return self.launching > sum(rows[dim] * seconds for dim, seconds in self.matmuls.items())


def _is_view(instruction: Instruction, bucket: BucketPlan) -> bool:
    made = [bucket.values[name] for name in instruction.results if name]
    return bool(made) and all(value.buffer == "view" for value in made)


def _multiplies(call: Instruction) -> bool:
    """Return whether a call multiplies activations by weights. For compiled regions (fused calls) the answer is always
    True. An embedding lookup does not multiply."""
    op = OPS.get(call.target.removeprefix("ingot."))
    return op.multiplies if op is not None else call.target.startswith("exe.")


def _weights(call: Instruction, plan: Plan) -> int:
    """Return the number of elements in all weights that a call takes."""
    taken = [parse_type(plan.params[one.ref]) for one in call.args if isinstance(one, Ref) and one.ref in plan.params]
    return sum(math.prod(weight.bind({})) for weight in taken)
