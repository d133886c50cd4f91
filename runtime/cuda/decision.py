"""Decisions on how to compute a step, made before its launch, so that one rank can decide for all."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from ingot.ir.artifact.plan import BucketClass, BucketPlan, Plan
from ingot.runtime.binding import no_bucket
from ingot.runtime.cuda.graphs.choice import Capture, DecodeChoice, PromptChoice
from ingot.runtime.cuda.graphs.sizes import bucket_serving, has_few_tokens
from ingot.runtime.step import StepSizes

# Graphs of decode-only steps, and of steps that prefill.
GraphKind = Literal["decode", "prompts"]


@dataclass(frozen=True, slots=True)
class Decision:
    """How to compute a step. With equal decisions, all ranks call the same code on the same sizes.

    bucket  the name of the bucket class
    sizes   the sizes to pad the step to; None: the sizes of its inputs
    graph   the kind of graph that replays the step at these sizes, captured first if it does not exist; None: run the
            instructions one by one
    """

    bucket: str
    sizes: StepSizes | None = None
    graph: GraphKind | None = None


class Decider:
    """Decides by the sizes of a step and of the steps before it on one rank.

    `decode` and `prompts` are the steps of `plan` that graphs can hold, by size. `capture` is when to capture decode
    steps.
    """

    def __init__(
        self,
        plan: Plan,
        decode: Mapping[StepSizes, BucketPlan],
        prompts: Mapping[StepSizes, BucketPlan],
        capture: Capture,
    ) -> None:
        self.decode = DecodeChoice({size: one.bucket for size, one in decode.items()}, capture)
        self.prompts = PromptChoice(plan, prompts)
        self._plan = plan
        # Built once, so that a step with a graph allocates no decision.
        self._by_decode = {size: Decision(one.bucket.name, size, "decode") for size, one in decode.items()}
        self._by_prompts = {size: Decision(one.bucket.name, size, "prompts") for size, one in prompts.items()}

    def decide(
        self, step: StepSizes, most: int, decode: Collection[StepSizes], prompts: Collection[StepSizes]
    ) -> Decision:
        """Decide a step of these sizes, with at most `most` tokens of one sequence, and count it in the history.
        `decode` and `prompts` are the captured graphs. Raises InternalError if no bucket class holds the step."""
        if (size := self.decode.serving(step, most, decode)) is not None:
            return self._by_decode[size]
        if (size := self.prompts.serving(step, most, prompts)) is not None:
            return self._by_prompts[size]
        return self.without_graph(step, most)

    def without_graph(self, step: StepSizes, most: int) -> Decision:
        """Decide a step without a graph, and do not count it in the history."""
        if (served := bucket_serving(self._plan, step.T, most)) is None:
            raise no_bucket([one.bucket for one in self._plan.buckets], step.T, most)
        return Decision(served.bucket.name, self.padded(served.bucket, step))

    def padded(self, bucket: BucketClass, step: StepSizes) -> StepSizes | None:
        """Return the sizes to pad a step without a graph to; None: its own. Libraries may round differently at another
        size, so the step gets the sizes of the graph that may serve it later."""
        if has_few_tokens(bucket):
            return None
        return (self.prompts if bucket.q_max is None else self.decode).filled_up(step)
