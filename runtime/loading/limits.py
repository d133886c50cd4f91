"""The limits that an artifact was compiled for, read from the manifest and compared with the plans."""

from dataclasses import dataclass

from ingot.ir.artifact.plan import Plans
from ingot.ir.errors import ArtifactError
from ingot.ir.parse import parse_type
from ingot.runtime.loading.artifact import Artifact


@dataclass(frozen=True)
class Limits:
    """The limits that an artifact was compiled for.

    vocab_size    the size of the vocabulary
    max_seq_len   the most tokens of a sequence
    max_batch     the most sequences in a step
    max_tokens    the most tokens in a step
    page_size     the tokens in a KV page
    """

    vocab_size: int
    max_seq_len: int
    max_batch: int
    max_tokens: int
    page_size: int


def read_limits(artifact: Artifact, plans: Plans) -> Limits:
    """Return the limits in an artifact's manifest, such as `max_batch`. Raises ArtifactError if a plan has other
    limits. Compiled code is correct only within the plan's limits."""
    model = artifact.manifest.model
    for name in Limits.__dataclass_fields__:
        value = model.get(name)
        if type(value) is not int or value < 1:
            raise _limit_error(f"{name} is {value!r:.80}", "a whole number above 0")
    limits = Limits(**{name: model[name] for name in Limits.__dataclass_fields__})  # type: ignore[arg-type]
    pages = -(-limits.max_seq_len // limits.page_size)
    for plan in plans.plans.values():
        for dim, needed in (
            ("T", limits.max_tokens),
            ("B", limits.max_batch),
            ("R", limits.max_batch),
            ("P", pages),
            ("G", limits.max_batch),
        ):
            if dim in plan.dims and plan.dims[dim][1] != needed:
                raise _limit_error(f"the limits need {dim} up to {needed}", f"{plan.dims[dim][1]}, as in plan.json")
        if not any(bucket.bucket.holds(1, 1) for bucket in plan.buckets):
            raise ArtifactError(
                f"no bucket class of {plan.entry} holds a step of one token", where="plan.json, buckets"
            )
    for name, state in plans.states.items():
        if state.kind == "paged_kv" and limits.page_size not in parse_type(state.type).shape:
            raise _limit_error(f"page_size is {limits.page_size}", f"that of state {name}, {state.type}")
    if limits.max_tokens < limits.max_batch:
        raise _limit_error(f"max_tokens is {limits.max_tokens}", f"at least max_batch, {limits.max_batch}")
    return limits


def _limit_error(what: str, expected: str) -> ArtifactError:
    return ArtifactError(f"the manifest's limits are wrong: {what}", where="manifest.json, model", expected=expected)
