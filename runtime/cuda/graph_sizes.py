"""Which steps are captured as graphs, and when."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from ingot.ir.plan import GPU_FEW_TOKENS, BucketClass, BucketPlan, Plan
from ingot.runtime.scheduler_config import DEFAULT_MIXED_TOKENS
from ingot.runtime.step import StepSizes

# When graphs are captured: "all" before a model is ready, "need" when a step of their size comes, "idle" by then at the
# latest and otherwise while the host waits, "none" never.
Capture = Literal["all", "idle", "need", "none"]
CAPTURES: tuple[Capture, ...] = ("all", "idle", "need", "none")

# Sequences of a captured decode step; one of fewer is filled up. As far apart as vLLM has them (1, 2, 4, then steps of
# 8 to 256 and of 16 above), and twice that where steps are long enough that a row of padding costs little.
GRAPH_ROWS = (1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, 513, 32))
# Tokens of steps that feed prompts, which are filled up: for each other size cuBLAS would choose its code anew (H200,
# CUDA 13.0: 5 to 9 ms of the first launch of a step of 16 layers). No more than half of a step is padding, and of one
# that computes for longer than it is launched an eighth.
_PROMPT_TOKENS = (
    *(96, 128, 192, 256, 384, 512, 768, 1024),
    *(size * part // 8 for size in (1 << power for power in range(10, 16)) for part in range(9, 17)),
)
# Up to so many they are captured. The host takes 2.2 ms to launch 8 layers on an H200's machine; their kernels take as
# long for some 1000 tokens, and for more of them the host is in front anyway.
_MOST_CAPTURED = 1024
# Their sequences: up to 64 rows of logits cost about what one does, reading the weight; above, no more than half of the
# rows are padding. There are no more than tokens.
_PROMPT_ROWS = (64, 128, 256, GRAPH_ROWS[-1])
# Providers whose calls read data on the host, or allocate by it: a graph cannot hold them.
_UNCAPTURABLE = frozenset({"reference", "rowwise"})
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


def graph_sizes(largest: int, candidates: Sequence[int] = GRAPH_ROWS) -> list[int]:
    """The sizes of graphs for batches up to `largest`, the last of which the largest batch fills."""
    return sorted({*(size for size in candidates if size < largest), min(largest, candidates[-1])})


def decode_steps(plan: Plan) -> dict[StepSizes, BucketPlan]:
    """The decode steps that graphs can hold, one token of each sequence, up to the largest batch; each with the bucket
    class that it is of."""
    sizes = graph_sizes(plan.dims.get("B", (1, 0))[1])
    return _capturable(plan, [StepSizes(size, size, size, _pages(plan)) for size in sizes], most=1)


def prompt_steps(plan: Plan) -> dict[StepSizes, BucketPlan]:
    """The same of steps that feed prompts, of more tokens than a decode step of few has."""
    tokens = [size for size in _prompt_tokens(plan) if size <= _MOST_CAPTURED]
    sizes = [StepSizes(size, count, count, _pages(plan)) for size in tokens for count in _prompt_rows(plan, size)]
    found = _capturable(plan, sizes, most=max(tokens, default=0))
    return {size: bucket for size, bucket in found.items() if not has_few_tokens(bucket.bucket)}


def mixed_tokens(plan: Plan) -> list[int]:
    """Tokens of steps that feed prompts, as they are filled up, where no graph holds them and yet sequences that decode
    wait for them."""
    return [size for size in _prompt_tokens(plan) if _MOST_CAPTURED < size <= DEFAULT_MIXED_TOKENS + GRAPH_ROWS[-1]]


def filled_up(step: StepSizes, plan: Plan) -> StepSizes:
    """The sizes that a step is computed in which feeds prompts: of a graph where one could serve it, and then of few
    others, whether or not anything is captured."""
    tokens = next(size for size in _prompt_tokens(plan) if size >= step.T)
    needed = max(step.B, step.L)
    rows = next((count for count in _prompt_rows(plan, tokens) if needed <= count), None)
    return StepSizes(tokens, rows or step.B, rows or step.L, step.P)


def has_few_tokens(bucket: BucketClass) -> bool:
    """Whether kernels of a class round a row alike whatever the size of the step; libraries, which others have, may
    not."""
    return bucket.tokens[1] <= GPU_FEW_TOKENS


def _prompt_tokens(plan: Plan) -> list[int]:
    largest = plan.dims.get("T", (1, 1))[1]
    return [*(size for size in _PROMPT_TOKENS if size < largest), largest]


def _prompt_rows(plan: Plan, tokens: int) -> list[int]:
    return graph_sizes(min(plan.dims.get("B", (1, 1))[1], tokens), _PROMPT_ROWS)


def _capturable(plan: Plan, sizes: Sequence[StepSizes], most: int) -> dict[StepSizes, BucketPlan]:
    served = {size: _serving(plan, size.T, most) for size in sizes}
    return {size: bucket for size, bucket in served.items() if bucket is not None and is_capturable(bucket)}


def _serving(plan: Plan, tokens: int, most: int) -> BucketPlan | None:
    """The bucket class of steps of so many tokens, at most `most` of one sequence."""
    return next((one for one in plan.buckets if one.bucket.holds(tokens, most)), None)


def _pages(plan: Plan) -> int:
    return plan.dims.get("P", (1, 1))[1]


def is_capturable(bucket: BucketPlan) -> bool:
    """Whether a graph can hold the instructions of a bucket class: calls of libraries, of compiled code, and aten's
    views and arithmetic."""
    return all(
        one.calls is not None or one.provider not in _UNCAPTURABLE or one.target.startswith("aten.")
        for one in bucket.instructions
    )


def graph_arena(steps: Mapping[StepSizes, BucketPlan]) -> int:
    """Bytes that hold everything that lives within any of these steps. The plan knows the largest step of a bucket
    class; of a smaller one all is smaller, by its tokens or its rows of logits, but some numbers for each sequence."""
    return max(
        (math.ceil(_share(size, bucket) * bucket.memory.activations) for size, bucket in steps.items()), default=0
    )


def _share(size: StepSizes, bucket: BucketPlan) -> float:
    dims = {"T": size.T, "L": size.L}
    return min(1.0, max(count / max(1, bucket.memory.sizes.get(dim, 1)) for dim, count in dims.items()))


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
        self._classes = {size: classes[size] for size in sorted(classes, key=lambda size: size.T)}
        self._when = when
        self._seen = 1  # sequences of the last decode step
        self._missed: dict[StepSizes, int] = {}  # steps that wanted this graph in vain

    def serving(self, step: StepSizes, most: int, captured: Collection[StepSizes]) -> StepSizes | None:
        least = self._least(step)
        if least is None or not self._classes[least].holds(least.T, most):
            return None
        larger = self._larger(least, captured)
        if step.T > step.B:
            # Pieces of prompts beside decoding: to launch such a step once takes less than capturing it.
            return larger
        self._seen = step.B
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
        """The missing size that is nearest to the batch seen last; of two, the one that holds it."""
        missing = [size for size in self._classes if size not in captured]
        return min(missing, key=lambda size: (abs(size.B - self._seen), -size.B), default=None)

    def _least(self, step: StepSizes) -> StepSizes | None:
        """The least size that holds a step."""
        return next((size for size in self._classes if size.T >= step.T and size.L >= step.L), None)

    def _larger(self, size: StepSizes, captured: Collection[StepSizes]) -> StepSizes | None:
        """The least captured size that may take the place of `size`: of its class, and at most twice as large."""
        own = self._classes[size]
        if not has_few_tokens(own):
            return None
        among = (other for other, one in self._classes.items() if one == own and size.T <= other.T <= 2 * size.T)
        return next((other for other in among if other in captured), None)


class PromptChoice:
    """Of graphs of steps that feed prompts: one is captured while the host waits, or once several steps have wanted it.
    Until then such steps are launched in the same sizes (`filled_up`). `classes` are the bucket classes by size."""

    def __init__(self, plan: Plan, classes: Mapping[StepSizes, BucketPlan]) -> None:
        self._plan = plan
        self._classes = classes
        self._wanted = dict.fromkeys(sorted(classes, key=lambda size: (size.B, size.T)), 0)
        self._lost = 0  # steps without a graph since the last capture that one waited for

    def serving(self, step: StepSizes, most: int, captured: Collection[StepSizes]) -> StepSizes | None:
        if (served := _serving(self._plan, step.T, most)) is None:
            return None
        size = replace(filled_up(step, self._plan), P=_pages(self._plan))
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
        return filled_up(step, self._plan)

    def next(self, captured: Collection[StepSizes]) -> StepSizes | None:
        """The missing size that was wanted most; of those alike, the one of fewest sequences, then tokens: so a load
        begins."""
        missing = [size for size in self._wanted if size not in captured]
        return max(missing, key=self._wanted.__getitem__, default=None)
