"""Whether the GPU waits for the host in a step whose calls the host launches one by one."""

import math
from collections.abc import Mapping
from dataclasses import asdict

from ingot.ir.gpus import Gpu, product_rate
from ingot.ir.parse import parse_type
from ingot.ir.plan import BucketPlan, Instruction, Plan, Ref
from ingot.ir.types import DTYPE_NAMES
from ingot.runtime.step import StepSizes

# Seconds that a call takes the host under load, views and what stands around a step shared among the calls: on an
# H200's machine a step of 2304 tokens takes it 10 to 12 ms with the 265 calls of Qwen3-0.6B, and 5 to 8 ms with the
# 157 of Llama-3.2-1B.
_CALL = 40e-6
# Of the published rate, what products with weights come to at most where a step's other kernels are counted in: on an
# H200 steps of 8192 tokens of these two models take 13 and 29 ms, in which their products come to 0.56.
_SHARE = 0.56
# Ops that multiply rows by weights, beside compiled regions, which may. Tables that others look up are no work.
_PRODUCTS = frozenset({"ingot.linear", "ingot.quant_linear", "ingot.moe"})


def is_launch_bound(size: StepSizes, bucket: BucketPlan, plan: Plan, gpu: Gpu) -> bool:
    """Whether launching a step of these sizes, of a bucket class of the plan, takes the host longer than the products
    with weights take the GPU."""
    calls = [one for one in bucket.instructions if not _is_view(one, bucket)]
    dims = asdict(size)
    return _CALL * len(calls) > sum(_product_seconds(one, dims, bucket, plan, gpu) for one in calls)


def _is_view(instruction: Instruction, bucket: BucketPlan) -> bool:
    made = [bucket.values[name] for name in instruction.results if name]
    return bool(made) and all(value.buffer == "view" for value in made)


def _product_seconds(call: Instruction, dims: Mapping[str, int], bucket: BucketPlan, plan: Plan, gpu: Gpu) -> float:
    made = [parse_type(bucket.values[name].type) for name in call.results if name]
    if not made or not (call.target in _PRODUCTS or call.target.startswith("exe.")):
        return 0.0
    rows = made[0].bind(dims)[0]
    taken = [parse_type(plan.params[one.ref]) for one in call.args if isinstance(one, Ref) and one.ref in plan.params]
    elements = sum(math.prod(weight.bind({})) for weight in taken if len(weight.shape) > 1)
    return 2 * rows * elements / (_SHARE * product_rate(gpu, DTYPE_NAMES[made[0].dtype]))
