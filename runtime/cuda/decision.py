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
    """How to compute a step: the bucket class (a range of step sizes that shares one compiled plan), the sizes to pad
    the step to, and whether a CUDA graph replays it.

    bucket   the name of the bucket class
    sizes    the sizes to pad the step to; None: do not pad it
    graph    the kind of CUDA graph that replays the step at these sizes, captured first if needed; None: launch the
             instructions one by one

    Ranks that follow equal decisions run the same code on the same sizes.
    """

    bucket: str
    sizes: StepSizes | None = None
    graph: GraphKind | None = None


class Decider:
    """Decides for each step of a plan whether a CUDA graph replays it, and to which sizes it is padded. Decisions
    depend on the sizes of this step and of earlier steps on this rank.

    decode    all sizes of decode steps for which a CUDA graph can be captured, each with the plan of its bucket class
              (range of step sizes that shares one compiled plan)
    prompts   all sizes of prompt steps for which a CUDA graph can be captured, each with the plan of its bucket class
    capture   when to capture graphs of decode steps
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
        """Return how to compute a step of these sizes, and remember the step for later decisions.

        step      the sizes of the step
        most      the most tokens of one sequence in the step
        decode    the sizes of decode steps for which a CUDA graph has been captured
        prompts   the sizes of prompt steps for which a CUDA graph has been captured

        Raises InternalError if no bucket class (range of step sizes) contains the step.
        """
        if (size := self.decode.serving(step, most, decode)) is not None:
            return self._by_decode[size]
        if (size := self.prompts.serving(step, most, prompts)) is not None:
            return self._by_prompts[size]
        return self.without_graph(step, most)

    def without_graph(self, step: StepSizes, most: int) -> Decision:
        """Return how to compute a step without a CUDA graph. `most` is the most tokens of one sequence in it. Later
        decisions do not depend on this call. Raises InternalError if no bucket class (range of step sizes) contains the
        step."""
        if (served := bucket_serving(self._plan, step.T, most)) is None:
            raise no_bucket([one.bucket for one in self._plan.buckets], step.T, most)
        return Decision(served.bucket.name, self.padded(served.bucket, step))

    def padded(self, bucket: BucketClass, step: StepSizes) -> StepSizes | None:
        """Return the sizes to pad a step to that runs without a CUDA graph; None: do not pad it.

        They are the sizes of the graph that may replay such steps once it is captured. So results are equal with and
        without the graph, although libraries may round differently at another size.
        """
        if has_few_tokens(bucket):
            return None
        return (self.prompts if bucket.q_max is None else self.decode).filled_up(step)
