"""The checks of a compile request's options against the model, the target and the backends."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ingot.frontend.trace import Limits
from ingot.ir.backend import Backend, Tunable
from ingot.ir.errors import OptionError, TargetError
from ingot.ir.layout import Layout
from ingot.ir.machine.gpus import FEATURES
from ingot.ir.machine.target import Target
from ingot.ir.program import ModelSpec
from ingot.models.architectures import ARCHITECTURES


def check_dtype(spec: ModelSpec, target: Target) -> None:
    """Raise TargetError if the target does not compute in the model's dtype."""
    if target.device == "cuda" and spec.dtype is torch.bfloat16 and "bf16" not in target.features:
        raise TargetError(
            f"the model's dtype is bfloat16, which {target.name} does not compute",
            expected=f"a GPU with bf16: {FEATURES['bf16'].needs}",
            hint="compile with --dtype float16 or float32",
        )


def check_cache_dtype(name: str, target: Target) -> None:
    """Raise TargetError if the target does not convert to and from the KV cache dtype `name`."""
    if name == "fp8" and target.device == "cuda" and "fp8" not in target.features:
        raise TargetError(
            f"a KV cache in fp8, which {target.name} does not convert to and from",
            expected=f"a GPU with fp8: {FEATURES['fp8'].needs}",
            hint="compile with --kv-cache-dtype auto",
        )


def check_tunable(backends: Sequence[Backend], target: Target, *, tune: bool) -> None:
    """Raise TargetError if tile sizes are to be timed and no backend has any."""
    if tune and not any(isinstance(one, Tunable) for one in backends):
        raise TargetError(
            f"no backend for {target.name} on this machine has tile sizes to time",
            where=f"the backends {', '.join(one.name for one in backends)}",
            expected="a GPU as the target, and the backend triton",
            hint="compile without --tune",
        )


def check_limits(limits: Limits, spec: ModelSpec) -> None:
    """Raise OptionError for limits that are no counts, or that the model or a step cannot have."""
    for name, value, hi in (
        ("max_seq_len", limits.max_seq_len, spec.max_position),
        ("max_batch", limits.max_batch, 1 << 16),
        ("max_tokens", limits.max_tokens, 1 << 20),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= hi:
            raise OptionError(f"{name} is {value!r}", expected=f"a whole number from 1 to {hi}")
    if limits.max_tokens < limits.max_batch:
        raise OptionError(
            f"max_tokens {limits.max_tokens} is below max_batch {limits.max_batch}",
            expected="room for one token of every sequence in a step",
        )


def check_budget(budget: float) -> None:
    """Raise OptionError unless the weight budget is a number of copies from 1 to the number of layouts."""
    if not isinstance(budget, int | float) or isinstance(budget, bool) or not 1.0 <= budget <= len(Layout):
        raise OptionError(
            f"the weight budget is {budget!r}", expected=f"a number from 1.0 to {len(Layout)}.0, copies of the weights"
        )


def check_others(given: Mapping[str, str | Path], spec: ModelSpec) -> None:
    """Raise OptionError unless `given` has exactly the additional checkpoints that the model's definition needs.

    Its keys are their aliases, such as "draft".
    """
    asked = ARCHITECTURES[spec.architecture].definition.checkpoints
    if odd := sorted(given.keys() ^ set(asked)):
        what = f"the checkpoint '{odd[0]}' is " + ("missing" if odd[0] in asked else "not needed")
        raise OptionError(
            what, where=f"checkpoints of {spec.family}", expected=", ".join(asked) or "none besides the model's own"
        )
