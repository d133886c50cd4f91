"""Which decode steps are captured as graphs, and when."""

from collections.abc import Collection, Sequence
from typing import Literal

from ingot.ir.plan import BucketPlan, Plan

# When graphs are captured: "all" before a model is ready, "need" when a step of their size comes, "idle" by then at the
# latest and otherwise while the host waits, "none" never.
Capture = Literal["all", "idle", "need", "none"]
CAPTURES: tuple[Capture, ...] = ("all", "idle", "need", "none")

# Sequences of a captured decode step; one of fewer is filled up. As far apart as vLLM has them (1, 2, 4, then steps of
# 8 to 256 and of 16 above), and twice that where steps are long enough that a row of padding costs little.
GRAPH_ROWS = (1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, 513, 32))
# Providers whose calls read data on the host, or allocate by it: a graph cannot hold them.
_UNCAPTURABLE = frozenset({"reference", "rowwise"})
# Steps that a larger graph serves before their own is captured. Capturing takes as long as some tens of steps, and
# padding up to twice the rows costs less than half of a step.
_PATIENCE = 32


def graph_sizes(largest: int, candidates: Sequence[int] = GRAPH_ROWS) -> list[int]:
    """The sizes of graphs for batches up to `largest`, the last of which the largest batch fills."""
    return sorted({*(size for size in candidates if size < largest), min(largest, candidates[-1])})


def capturable_sizes(plan: Plan) -> dict[int, BucketPlan]:
    """The sizes of decode steps that graphs can hold, up to the largest batch, each with the bucket class it is of."""
    sizes = graph_sizes(plan.dims.get("B", (1, 0))[1])
    served = {size: next((one for one in plan.buckets if one.bucket.holds(size, 1)), None) for size in sizes}
    return {size: bucket for size, bucket in served.items() if bucket is not None and is_capturable(plan, bucket)}


def is_capturable(plan: Plan, bucket: BucketPlan) -> bool:
    """Whether a graph can hold the instructions of a bucket class: calls of libraries, of compiled code that says so,
    and aten's views and arithmetic."""
    return all(
        plan.executables[one.calls].capturable and plan.executables[one.calls].prologue is None
        if one.calls is not None
        else one.provider not in _UNCAPTURABLE or one.target.startswith("aten.")
        for one in bucket.instructions
    )


class GraphChoice:
    """Which of the graphs of `sizes` serves a step, and which is captured next."""

    def __init__(self, sizes: Collection[int], when: Capture) -> None:
        self.sizes = () if when == "none" else tuple(sorted(sizes))
        self._when = when
        self._seen = 1  # sequences of the last decode step
        self._missed: dict[int, int] = {}  # steps that wanted a graph of this size in vain

    def holds(self, rows: int) -> bool:
        return bool(self.sizes) and 0 < rows <= self.sizes[-1]

    def serving(self, rows: int, captured: Collection[int]) -> int:
        """The size that serves a step of `rows` sequences: the least that holds it, or for a while one that is captured
        already and not twice as large."""
        self._seen = rows
        least = next(size for size in self.sizes if size >= rows)
        if self._when != "idle" or least in captured:
            return least
        self._missed[least] = self._missed.get(least, 0) + 1
        larger = min((size for size in captured if size >= rows), default=0)
        return larger if 0 < larger <= 2 * rows and self._missed[least] <= _PATIENCE else least

    def next(self, captured: Collection[int]) -> int | None:
        """The missing size that is nearest to the batch seen last; of two, the one that holds it."""
        missing = [size for size in self.sizes if size not in captured]
        return min(missing, key=lambda size: (abs(size - self._seen), -size), default=None)
