"""Checks of weights and step inputs against a plan, and the choice of the bucket class for a step."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from ingot.ir.artifact.plan import BucketClass, Plan
from ingot.ir.errors import ArtifactError, InternalError
from ingot.ir.parse import parse_type
from ingot.ir.types import TensorType
from ingot.runtime.steps.bucket import Bucket


def bound_params(plan: Plan, params: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return the weights that the plan uses, by name. `params` has all weights by name. `sizes` has the value of each
    symbolic dim by name.

    Raises ArtifactError if a weight is missing, or has another dtype, shape or strides than in the plan.
    """
    for name, text in plan.params.items():
        if name not in params:
            raise ArtifactError(f"weight '{name}' is missing", where="weights.json", expected=text)
        if problem := parse_type(text).mismatch(params[name], sizes):
            raise ArtifactError(f"weight '{name}' has {problem}", where="weights.json against plan.json")
    return {name: params[name] for name in plan.params}


def step_sizes(
    types: Mapping[str, TensorType], inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return the size of each symbolic dim of a step, by name, such as `T` tokens and `B` sequences.

    types    the type of each input, by name
    inputs   the step's inputs; their shapes give the sizes
    sizes    the sizes that are known at load time

    Raises InternalError if an input is missing or not of its type.
    """
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
    """Return the first bucket class that can run a step. A bucket class is a range of step sizes with one compiled
    plan.

    buckets   the bucket classes to choose from
    inputs    the step's inputs on the host, by name
    sizes     the step's symbolic dims, by name. Without the dim `T` (tokens), as in some draft models, each sequence
              counts as one token

    Raises InternalError if no bucket class can run the step.
    """
    tokens, q_max = (sizes["T"], sizes["T"]) if "T" in sizes else (sizes["B"], 1)
    if "T" in sizes and "q_lens" in inputs:
        q_max = int(inputs["q_lens"].max())
    for bucket in buckets:
        if bucket.plan.bucket.holds(tokens, q_max):
            return bucket
    raise no_bucket([bucket.plan.bucket for bucket in buckets], tokens, q_max)


def no_bucket(classes: Iterable[BucketClass], tokens: int, q_max: int) -> InternalError:
    """Return the error for a step that is too large for every bucket class. A bucket class is a range of step sizes
    with one compiled plan.

    classes   the bucket classes
    tokens    the number of tokens in the step
    q_max     the most tokens of one sequence in the step
    """
    return InternalError(
        f"no bucket class holds a step of {tokens} tokens, at most {q_max} of one sequence",
        expected=", ".join(f"{one.name}: {one.tokens}" for one in classes),
    )
