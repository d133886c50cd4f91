"""Decisions on how to compute a step, made before its launch, so that one rank can decide for all."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from ingot.ir.artifact.plan import BucketClass, BucketPlan, Plan
from ingot.runtime.cuda.graphs.choice import Capture, DecodeChoice, PromptChoice
from ingot.runtime.cuda.graphs.sizes import bucket_serving, has_few_tokens
from ingot.runtime.steps.binding import no_bucket
from ingot.runtime.steps.step import StepSizes

# Graphs of decode-only steps, and of steps that prefill.
GraphKind = Literal["decode", "prompts"]


@dataclass(frozen=True, slots=True)
class Decision:
    """How to compute a step. If several ranks (devices) follow one decision, they run the same code on the same sizes.

    bucket   the name of the bucket class (a range of step sizes with one compiled plan)
    sizes    the sizes to pad the step to; None: do not pad it
    graph    the kind of CUDA graph that replays the step at these sizes; it is captured first if needed. None: launch
             the instructions one by one
    """

    bucket: str
    sizes: StepSizes | None = None
    graph: GraphKind | None = None


class Decider:
    """Decides for each step whether a CUDA graph replays it, and to which sizes it is padded. Decisions depend on the
    sizes of this step and of earlier steps.

    plan      the plan of the steps
    decode    the decode steps that can be captured as CUDA graphs: sizes -> instructions
    prompts   the prompt steps that can be captured as CUDA graphs: sizes -> instructions
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
        """Return how to compute a step, and remember the step for later decisions.

        step      the sizes of the step
        most      the most tokens of one sequence in the step
        decode    the sizes of decode steps for which a CUDA graph has been captured
        prompts   the sizes of prompt steps for which a CUDA graph has been captured

        Raises InternalError if the step is too large for every bucket class (range of step sizes with one compiled
        plan).
        """
        if (size := self.decode.serving(step, most, decode)) is not None:
            return self._by_decode[size]
        if (size := self.prompts.serving(step, most, prompts)) is not None:
            return self._by_prompts[size]
        return self.without_graph(step, most)

    def without_graph(self, step: StepSizes, most: int) -> Decision:
        """Return how to compute a step without a CUDA graph. Later decisions do not depend on this call.

        step   the sizes of the step
        most   the most tokens of one sequence in the step

        Raises InternalError if the step is too large for every bucket class (range of step sizes with one compiled
        plan).
        """
        if (served := bucket_serving(self._plan, step.T, most)) is None:
            raise no_bucket([one.bucket for one in self._plan.buckets], step.T, most)
        return Decision(served.bucket.name, self.padded(served.bucket, step))

    def padded(self, bucket: BucketClass, step: StepSizes) -> StepSizes | None:
        """Return the sizes to pad a step to if it runs without a CUDA graph; None: do not pad it.

        A CUDA graph of these sizes may replay such steps later. Libraries may round differently at different sizes. So
        steps with and without the graph have equal sizes, and equal results. `bucket` is the step's bucket class (a
        range of step sizes with one compiled plan).
        """
        if has_few_tokens(bucket):
            return None
        return (self.prompts if bucket.q_max is None else self.decode).filled_up(step)
