"""Checks of weights and step inputs against a plan, and the choice of the bucket class for a step."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from ingot.ir.artifact.plan import BucketClass, Plan
from ingot.ir.errors import ArtifactError, InternalError
from ingot.ir.parse import parse_type
from ingot.ir.types import TensorType
from ingot.runtime.bucket import Bucket


def bound_params(plan: Plan, params: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return the tensors of `params` that the plan uses. Raises ArtifactError if one is missing, or has another dtype,
    shape or strides than the plan. `sizes` has the values of the plan's symbolic dims."""
    for name, text in plan.params.items():
        if name not in params:
            raise ArtifactError(f"weight '{name}' is missing", where="weights.json", expected=text)
        if problem := parse_type(text).mismatch(params[name], sizes):
            raise ArtifactError(f"weight '{name}' has {problem}", where="weights.json against plan.json")
    return {name: params[name] for name in plan.params}


def step_sizes(
    types: Mapping[str, TensorType], inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return the size of each symbolic dim (`T`, `B`, …) in a step on `inputs`. `sizes` has the dims known at load
    time. Raises InternalError if an input is missing or not of its type in `types`."""
    found_sizes = dict(sizes)
    for name, value_type in types.items():
        if name not in inputs:
            raise InternalError(f"input '{name}' is missing", expected=str(value_type))
        for size, found in zip(value_type.shape, inputs[name].shape, strict=False):
            if isinstance(size, str):
                found_sizes.setdefault(size, found)
        if problem := value_type.mismatch(inputs[name], found_sizes):
            raise InternalError(f"input '{name}' has {problem}")
    return found_sizes


def choose_bucket(buckets: Sequence[Bucket], inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> Bucket:
    """Return the first bucket class that holds a step of `inputs`, which are on the host. Raises InternalError if none
    does.

    `sizes` has the step's dims. An entry without the dim `T` counts one token per sequence."""
    tokens, q_max = (sizes["T"], sizes["T"]) if "T" in sizes else (sizes["B"], 1)
    if "T" in sizes and "q_lens" in inputs:
        q_max = int(inputs["q_lens"].max())
    for bucket in buckets:
        if bucket.plan.bucket.holds(tokens, q_max):
            return bucket
    raise no_bucket([bucket.plan.bucket for bucket in buckets], tokens, q_max)


def no_bucket(classes: Iterable[BucketClass], tokens: int, q_max: int) -> InternalError:
    """Return the error for a step of `tokens` tokens, with at most `q_max` of one sequence, that none of the bucket
    classes `classes` holds."""
    return InternalError(
        f"no bucket class holds a step of {tokens} tokens, at most {q_max} of one sequence",
        expected=", ".join(f"{one.name}: {one.tokens}" for one in classes),
    )
