"""The executor: runs a plan's instructions over resident weights and states."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ingot.ir.errors import ArtifactError, InternalError
from ingot.ir.parse import parse_type
from ingot.ir.plan import Plan
from ingot.ir.types import TensorType
from ingot.runtime.bucket import Bucket, Call, Executables, Libraries, Watch, bound_buckets
from ingot.runtime.states import States
from ingot.runtime.token_counts import recount

__all__ = ["Call", "Executor", "OutputLogprobs", "StepHandle", "Watch", "bound_params", "choose_bucket", "step_sizes"]


@dataclass
class StepHandle:
    """A launched step, served by the bucket class `bucket`. On a CPU it has finished by then; `tokens` would wait for
    it on a device."""

    bucket: str
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def tokens(self) -> list[int]:
        """The sampled token of each row of logits; -1 where the logits were not finite."""
        return [int(token) for token in self.outputs["tokens"].tolist()]

    def rejected(self) -> list[int]:
        """Of each sequence, how many of the last tokens that it fed were not kept."""
        return [int(count) for count in self.outputs["rejected"].tolist()]

    def logprobs(self) -> "OutputLogprobs":
        """The log-probabilities that were asked for, by row of logits."""
        return OutputLogprobs(self.outputs["logprob_ids"], self.outputs["logprobs"], self.outputs["ranks"])


class OutputLogprobs:
    """What `top_logprobs` gives: `ids` and `values` [L, K], those that were asked for in front; `ranks` [L]."""

    def __init__(self, ids: torch.Tensor, values: torch.Tensor, ranks: torch.Tensor) -> None:
        # All at once: taking a row of a tensor costs as much as making a list of thirty rows.
        self._ids, self._values, self._ranks = ids.tolist(), values.tolist(), ranks.tolist()

    def row(self, index: int) -> tuple[list[int], list[float], int]:
        """Ids and log-probabilities of a row as far as they were asked for, the chosen token in front, and its rank."""
        ids = [token for token in self._ids[index] if token >= 0]
        return ids, self._values[index][: len(ids)], self._ranks[index]


class Executor:
    """A plan, checked by `check_plan`, bound to one set of weights, executables and states on a CPU.

    `params`: every weight by name. `executables`: a loaded callable by executable id. `sizes`: load-time dims (`pages`,
    `S`). `libraries`: the ops of each provider that brought kernels. `states`: those that other entries share, which
    hold the plan's; its own by default. Raises ArtifactError when a weight does not fit the plan's dtype, shape or
    strides, OptionError when there is no memory for the states.
    """

    def __init__(
        self,
        plan: Plan,
        params: Mapping[str, torch.Tensor],
        executables: Executables,
        sizes: Mapping[str, int],
        libraries: Libraries | None = None,
        states: States | None = None,
    ) -> None:
        self.plan = plan
        self.libraries = libraries or {}
        self.sizes = dict(sizes)
        self.inputs = {name: parse_type(text) for name, text in plan.inputs.items()}
        self.states = States(plan.states, self.sizes) if states is None else states
        self.params = bound_params(plan, params, self.sizes)
        self._buckets = bound_buckets(plan, {**self.params, **self.states}, executables, self.libraries)

    def launch(self, inputs: Mapping[str, torch.Tensor], watch: Watch | None = None) -> StepHandle:
        """Run one step. `inputs` are the plan's, by name; states move on. `watch` runs the instructions, one by one."""
        sizes = step_sizes(self.inputs, inputs, self.sizes)
        bucket = choose_bucket(self._buckets, inputs, sizes)
        recount(self.states, inputs)
        with _threads(1 if bucket.plan.bucket.few_tokens else torch.get_num_threads()):
            return StepHandle(bucket.plan.bucket.name, bucket.run(inputs, sizes, watch))


def bound_params(plan: Plan, params: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """The plan's weights. Raises ArtifactError when one is missing or does not fit its dtype, shape or strides."""
    for name, text in plan.params.items():
        if name not in params:
            raise ArtifactError(f"weight '{name}' is missing", where="weights.json", expected=text)
        if problem := parse_type(text).mismatch(params[name], sizes):
            raise ArtifactError(f"weight '{name}' has {problem}", where="weights.json against plan.json")
    return {name: params[name] for name in plan.params}


def step_sizes(
    types: Mapping[str, TensorType], inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]
) -> dict[str, int]:
    """The size of each dim in a step on `inputs`, which must be of `types`; `sizes` are those known at load time."""
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
    """The bucket class that serves a step on these inputs, which lie on the host."""
    q_max = int(inputs["q_lens"].max()) if "q_lens" in inputs else sizes["T"]
    for bucket in buckets:
        if bucket.plan.bucket.holds(sizes["T"], q_max):
            return bucket
    raise InternalError(
        f"no bucket class holds a step of {sizes['T']} tokens, at most {q_max} of one sequence",
        expected=", ".join(f"{b.plan.bucket.name}: {b.plan.bucket.tokens}" for b in buckets),
    )


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """torch's own ops on `count` threads.

    A step of few tokens gives them little to share out, while OpenMP's barriers wait for every thread: on a machine
    with other work that is a scheduler's time slice for each op. Kernels of a library have threads of their own.
    """
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
