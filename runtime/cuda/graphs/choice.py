"""Which graph serves a step, and which is captured when."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal, Protocol

from ingot.ir.artifact.plan import BucketClass, BucketPlan, Plan
from ingot.runtime.cuda.graphs.sizes import ALWAYS_CAPTURED, bucket_serving, filled_up, has_few_tokens, most_pages
from ingot.runtime.step import StepSizes

# When graphs are captured: "all" before a model is ready, "need" when a step of their size comes, "idle" by then at the
# latest and otherwise while the host waits, "none" never.
Capture = Literal["all", "idle", "need", "none"]
CAPTURES: tuple[Capture, ...] = ("all", "idle", "need", "none")

# Steps that a larger graph serves, or that are launched one by one, before their own is captured. Capturing takes as
# long as some tens of steps; padding up to twice the rows costs less than half of a step, and the launches of steps of
# many sequences take the host no longer than the device computes.
_PATIENCE = 32
# Under load a graph of steps that feed prompts is captured for a size that has come so often, and not before as much
# was lost as it takes: so captures never take longer than what was lost without them, and nobody waits for several.
# Capturing 16 layers takes 25 to 30 ms on an H200, and a step that is launched one by one loses 2. By these times the
# scheduler, simulated under 128 requests like ShareGPT's a second without such a graph at first, gives the first token
# within 47 ms for 99 of 100 in the first 2 s (58 ms if captures may follow each other, 37 ms without any); over 30 s
# within 31 ms, 7 ms on average (38 and 7; 23 and 13).
_PROMPTS = 4
_APART = 12


class GraphChoice(Protocol):
    """Which graph serves a step. How much time there was for capturing never shows in results: where two graphs, or a
    graph and single launches, might round a step otherwise, the steps so far decide which of them serves it."""

    def serving(self, step: StepSizes, most: int, captured: Collection[StepSizes]) -> StepSizes | None:
        """The graph that serves a step of these sizes, at most `most` tokens of one sequence; it is captured when it is
        not yet. None: no graph does."""
        ...

    def filled_up(self, step: StepSizes) -> StepSizes | None:
        """The sizes that a step is launched in which no graph serves, so that it is rounded as by the graph that may
        come later. None: its own."""
        ...

    def next(self, captured: Collection[StepSizes]) -> StepSizes | None:
        """What to capture ahead of need, if anything."""
        ...


class DecodeChoice:
    """Of graphs of decode steps. `classes` are the bucket classes by size."""

    def __init__(self, classes: Mapping[StepSizes, BucketClass], when: Capture) -> None:
        self._classes = {size: classes[size] for size in sorted(classes, key=lambda size: (size.T, size.G))}
        self._when = when
        self._seen = 1  # sequences of the last decode step
        self._shares = False  # whether a step so far had prefixes that its sequences share
        self._missed: dict[StepSizes, int] = {}  # steps that wanted this graph in vain

    def serving(self, step: StepSizes, most: int, captured: Collection[StepSizes]) -> StepSizes | None:
        least = self._least(step)
        if least is None or not self._classes[least].holds(least.T, most):
            return None
        larger = self._larger(least, captured)
        if step.T > step.B:
            # Pieces of prompts beside decoding: to launch such a step once takes less than capturing it.
            return larger
        self._seen, self._shares = step.B, self._shares or step.shares
        if self._when != "idle" or least in captured:
            return least
        self._missed[least] = self._missed.get(least, 0) + 1
        if self._missed[least] > _PATIENCE or (larger is None and has_few_tokens(self._classes[least])):
            return least
        return larger

    def filled_up(self, step: StepSizes) -> StepSizes | None:
        least = self._least(step)
        return None if least is None else replace(least, P=step.P)

    def next(self, captured: Collection[StepSizes]) -> StepSizes | None:
        """The missing size that is nearest to the batch seen last; of two, the one that holds it. Those of steps with
        shared prefixes come last, and once such a step was seen."""
        missing = [size for size in self._classes if size not in captured and (self._shares or not size.shares)]
        return min(missing, key=lambda size: (size.shares, abs(size.B - self._seen), -size.B), default=None)

    def _least(self, step: StepSizes) -> StepSizes | None:
        """The least size that holds a step."""
        alike = (size for size in self._classes if size.shares == step.shares)
        return next((size for size in alike if size.T >= step.T and size.L >= step.L), None)

    def _larger(self, size: StepSizes, captured: Collection[StepSizes]) -> StepSizes | None:
        """The least captured size that may take the place of `size`: of its class, and at most twice as large."""
        own = self._classes[size]
        if not has_few_tokens(own):
            return None
        alike = (other for other, one in self._classes.items() if one == own and other.shares == size.shares)
        among = (other for other in alike if size.T <= other.T <= 2 * size.T)
        return next((other for other in among if other in captured), None)


class PromptChoice:
    """Of graphs of steps that feed prompts: one is captured while the host waits, or once several steps have wanted it.
    Until then such steps are launched in the same sizes (`filled_up`). `classes` are the bucket classes by size."""

    def __init__(self, plan: Plan, classes: Mapping[StepSizes, BucketPlan]) -> None:
        self._plan = plan
        self._classes = classes
        self._wanted = dict.fromkeys(sorted(classes, key=_rank), 0)
        self._lost = 0  # steps without a graph since the last capture that one waited for

    def serving(self, step: StepSizes, most: int, captured: Collection[StepSizes]) -> StepSizes | None:
        if "T" not in self._plan.dims or (served := bucket_serving(self._plan, step.T, most)) is None:
            return None
        size = replace(filled_up(step, self._plan), P=most_pages(self._plan))
        if self._classes.get(size) is not served:  # many sequences that decode are of another class, though as large
            return None
        self._wanted[size] += 1
        if size in captured:
            return size
        self._lost += 1
        if self._wanted[size] <= _PROMPTS or self._lost <= _APART:
            return None
        self._lost = 0
        return size

    def filled_up(self, step: StepSizes) -> StepSizes | None:
        return filled_up(step, self._plan) if "T" in self._plan.dims else None

    def next(self, captured: Collection[StepSizes]) -> StepSizes | None:
        """The missing size that was wanted most; of those alike, the first by `_rank`."""
        missing = [size for size in self._wanted if size not in captured]
        return max(missing, key=self._wanted.__getitem__, default=None)


def _rank(size: StepSizes) -> tuple[bool, int, int]:
    """Steps of fewest sequences first, then of fewest tokens: so a load begins. Last those that only waiting prompts
    make."""
    return size.T > ALWAYS_CAPTURED, size.B, size.T
