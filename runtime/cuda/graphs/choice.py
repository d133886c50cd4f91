"""The choice of the graph that serves a step, and of the time to capture each graph."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal, Protocol

from ingot.ir.artifact.plan import BucketClass, BucketPlan, Plan
from ingot.runtime.cuda.graphs.sizes import ALWAYS_CAPTURED, bucket_serving, filled_up, has_few_tokens, most_pages
from ingot.runtime.steps.step import StepSizes

# When to capture graphs. "all": before the model is ready; "need": when a step of the size comes; "idle": while the
# host waits, and at the latest when needed; "none": never.
Capture = Literal["all", "idle", "need", "none"]
CAPTURES: tuple[Capture, ...] = ("all", "idle", "need", "none")

# A graph is captured after more than this many steps of its size ran in a larger graph or without one. A capture takes
# as long as some tens of steps. Padding to twice the rows costs less than half of a step. Launching a step of many
# sequences takes the host no longer than the device computes.
_PATIENCE = 32
# Under load, a prompt graph is captured once more than _PROMPTS steps wanted its size and more than _APART steps ran
# without a graph since the last such capture. So captures take no longer than the time lost without them, and no
# request waits for several. On an H200, capturing 16 layers takes 25 to 30 ms, and a step without a graph loses 2 ms.
# With these times, the scheduler was simulated at 128 ShareGPT-like requests per second, initially without prompt
# graphs. The p99 time to first token is 47 ms in the first 2 s (58 ms if captures may follow each other, 37 ms without
# captures). Over 30 s the p99 is 31 ms and the mean 7 ms (38 and 7; 23 and 13).
_PROMPTS = 4
_APART = 12


class GraphChoice(Protocol):
    """Chooses the CUDA graph that replays each step, and the next graph to capture.

    Results must not depend on how much time there was for captures. So among graphs that may round differently, the
    choice depends only on the sizes of this and earlier steps. Among graphs that round equally, it may depend on which
    are captured.
    """

    def serving(self, step: StepSizes, most: int, captured: Collection[StepSizes]) -> StepSizes | None:
        """Return the sizes of the CUDA graph that replays a step; None: run the step without a graph. The caller
        captures the graph if it does not exist.

        step       the sizes of the step
        most       the most tokens of one sequence in the step
        captured   the sizes for which a graph exists
        """
        ...

    def filled_up(self, step: StepSizes) -> StepSizes | None:
        """Return the sizes to pad a step to if it runs without a CUDA graph; None: do not pad it. A graph of these
        sizes may replay such steps later. Equal sizes make results round equally with and without the graph."""
        ...

    def next(self, captured: Collection[StepSizes]) -> StepSizes | None:
        """Return the sizes of the CUDA graph to capture next, before a step needs it; None if no graph is left to
        capture. `captured` has the sizes for which a graph exists."""
        ...


class DecodeChoice:
    """Chooses among the CUDA graphs of decode steps.

    classes   the steps that can be captured: sizes -> bucket class. A bucket class is a range of step sizes with one
              compiled plan
    when      when to capture graphs, such as "idle" (while the host waits)
    """

    def __init__(self, classes: Mapping[StepSizes, BucketClass], when: Capture) -> None:
        self._classes = {size: classes[size] for size in sorted(classes, key=lambda size: (size.T, size.G))}
        self._when = when
        self._seen = 1  # sequences of the last decode step
        self._shares = False  # whether any step so far had shared prefixes
        self._missed: dict[StepSizes, int] = {}  # steps that wanted this graph before it was captured

    def serving(self, step: StepSizes, most: int, captured: Collection[StepSizes]) -> StepSizes | None:
        least = self._least(step)
        if least is None or not self._classes[least].holds(least.T, most):
            return None
        larger = self._larger(least, captured)
        if step.T > step.B:
            # Prompt chunks or forced tokens together with decodes. Launching such a step once takes less time than
            # capturing it, but forced tokens come again and again.
            if larger is not None or not has_few_tokens(self._classes[least]):
                return larger
            self._missed[least] = self._missed.get(least, 0) + 1
            return least if self._missed[least] > _PATIENCE else None
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
        """Return the sizes of the graph to capture next; None: all are captured. This is the graph nearest in size to
        the last decode step; of two equally near ones, the larger.

        Graphs for cascade attention (a shared prefix is read once) come last. They are left out until a step could use
        one.
        """
        missing = [size for size in self._classes if size not in captured and (self._shares or not size.shares)]
        return min(missing, key=lambda size: (size.shares, abs(size.B - self._seen), -size.B), default=None)

    def _least(self, step: StepSizes) -> StepSizes | None:
        """Return the smallest sizes to which the step can be padded and for which a graph can be captured. Return None
        if the step is too large."""
        candidates = (size for size in self._classes if size.shares == step.shares)
        return next((size for size in candidates if size.T >= step.T and size.L >= step.L), None)

    def _larger(self, size: StepSizes, captured: Collection[StepSizes]) -> StepSizes | None:
        """Return the sizes of the smallest captured graph to which steps of `size` may be padded; None if there is
        none. It may be at most twice as large, and must use the same compiled plan."""
        own = self._classes[size]
        if not has_few_tokens(own):
            return None
        candidates = (other for other, one in self._classes.items() if one == own and other.shares == size.shares)
        larger = (other for other in candidates if size.T <= other.T <= 2 * size.T)
        return next((other for other in larger if other in captured), None)


class PromptChoice:
    """Chooses among the CUDA graphs of steps that prefill. `classes` has the steps that can be captured: sizes ->
    instructions.

    A graph is captured while the host is idle, or after several steps needed it. Until then, such steps are padded to
    the graph's sizes and run without it.
    """

    def __init__(self, plan: Plan, classes: Mapping[StepSizes, BucketPlan]) -> None:
        self._plan = plan
        self._classes = classes
        self._wanted = dict.fromkeys(sorted(classes, key=_rank), 0)
        self._lost = 0  # steps without a graph since the last capture that a step waited for

    def serving(self, step: StepSizes, most: int, captured: Collection[StepSizes]) -> StepSizes | None:
        if "T" not in self._plan.dims or (served := bucket_serving(self._plan, step.T, most)) is None:
            return None
        size = replace(filled_up(step, self._plan), P=most_pages(self._plan))
        if self._classes.get(size) is not served:  # steps of many decodes can have this size, but another class
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
        """Return the sizes of the graph to capture next; None: all are captured. This is the graph that most steps
        needed. Of equals, the one with fewest sequences comes first, then with fewest tokens; long steps come last."""
        missing = [size for size in self._wanted if size not in captured]
        return max(missing, key=self._wanted.__getitem__, default=None)


def _rank(size: StepSizes) -> tuple[bool, int, int]:
    """Return the sort key of a graph's sizes, for the order of captures. Fewest sequences come first, then fewest
    tokens, because a server first has few requests. Long steps come last: they occur only while prompts queue."""
    return size.T > ALWAYS_CAPTURED, size.B, size.T
