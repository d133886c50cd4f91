"""How a step is computed, decided before it is launched, so that one rank can decide for all."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from ingot.ir.artifact.plan import BucketClass, BucketPlan, Plan
from ingot.runtime.binding import no_bucket
from ingot.runtime.cuda.graphs.choice import Capture, DecodeChoice, PromptChoice
from ingot.runtime.cuda.graphs.sizes import bucket_serving, has_few_tokens
from ingot.runtime.step import StepSizes

# Graphs of steps that decode alone, and of those that feed prompts.
GraphKind = Literal["decode", "prompts"]


@dataclass(frozen=True, slots=True)
class Decision:
    """How a step is computed. By equal decisions all ranks call the same code on the same sizes.

    bucket  the name of the bucket class
    sizes   what the step is padded to; None for the sizes of its inputs
    graph   the kind of the graph of these sizes that replays it, and is captured first where there is none yet; None
            where its instructions run one by one
    """

    bucket: str
    sizes: StepSizes | None = None
    graph: GraphKind | None = None


class Decider:
    """Decides by the sizes of a step and by those of the steps before it, as one rank saw them.

    `decode` and `prompts` are the steps of `plan` that graphs can hold, by size, and `capture` says when decode steps
    are captured.
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
        # Made once: a step that a graph serves takes no new object.
        self._by_decode = {size: Decision(one.bucket.name, size, "decode") for size, one in decode.items()}
        self._by_prompts = {size: Decision(one.bucket.name, size, "prompts") for size, one in prompts.items()}

    def decide(
        self, step: StepSizes, most: int, decode: Collection[StepSizes], prompts: Collection[StepSizes]
    ) -> Decision:
        """Decide a step of these sizes, at most `most` tokens of one sequence, which counts among the steps so far.
        `decode` and `prompts` are the graphs that are captured. Raises InternalError for what no bucket class holds."""
        if (size := self.decode.serving(step, most, decode)) is not None:
            return self._by_decode[size]
        if (size := self.prompts.serving(step, most, prompts)) is not None:
            return self._by_prompts[size]
        return self.without_graph(step, most)

    def without_graph(self, step: StepSizes, most: int) -> Decision:
        """Decide a step whose instructions run one by one. It does not count."""
        if (served := bucket_serving(self._plan, step.T, most)) is None:
            raise no_bucket([one.bucket for one in self._plan.buckets], step.T, most)
        return Decision(served.bucket.name, self.padded(served.bucket, step))

    def padded(self, bucket: BucketClass, step: StepSizes) -> StepSizes | None:
        """The sizes that a step without a graph is padded to; None for its own. Libraries may round another size
        otherwise, so it gets those of the graph that may serve it later."""
        if has_few_tokens(bucket):
            return None
        return (self.prompts if bucket.q_max is None else self.decode).filled_up(step)
