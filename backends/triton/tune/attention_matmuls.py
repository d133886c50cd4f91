"""Time what attention adds to a decode step: the time of a CUDA graph with it, less that of the matmuls around it.

In a decode step, attention runs between two matmuls: the one of q, k and v, and the output matmul. With programmatic
dependent launch, programs of attention begin while the first matmul still runs. They can only begin if the shared
memory of a multiprocessor holds both. For one token of an 8B on an H200, tiles with three stages took 3.6 us there and
tiles with five stages 5.3 us, while alone both took equally long.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ingot.backends.triton.lower.attention.problem import DecodeProblem
from ingot.backends.triton.lower.linear.problem import LinearProblem
from ingot.backends.triton.lower.sizes import MOST_NORMED, padded_tokens
from ingot.backends.triton.tune import device, linear
from ingot.backends.triton.tune.device import Machine
from ingot.backends.triton.tune.linear import STEPS, LinearBench

MOST_LAYERS = 40  # most launches of attention in a graph: recording a launch takes longer than running it
# The least time of attention, as a share of the time of both matmuls. A measured difference below it is noise: a launch
# that does nothing adds about 1 us, which is 0.05 of the 20 us of the matmuls of an 8B.
LEAST = 0.02
_DTYPES = ("bf16", "f16", "f32")  # those of the matmul kernels

KernelCall = Callable[[], object]


def matmuls_of(problem: DecodeProblem) -> tuple[LinearProblem, LinearProblem] | None:
    """Return the matmuls before and after a decode attention, or None if it is to be timed alone.

    It is timed alone if a step has other launches there:

    - without `append`, attention follows other kernels, which norm and rotate q and k and write the cache
    - steps over caches of unequal widths have more and other matmuls
    - matmuls of more than 64 tokens, of other dtypes, and of very long normed rows do not use the matmul kernels

    The problem contains neither the hidden size nor the format of weights. The hidden size is assumed to be the width
    of all q heads, and weights to be plain. With one token, the first matmul norms its input. With more, the norm is a
    launch before the matmul, which is left out.
    """
    heads, tokens, form = problem.kv_heads * problem.group, padded_tokens(problem.tokens), problem.cache_form
    hidden, norm = heads * problem.dim, tokens == 1
    if not (problem.append and form.equal and tokens in STEPS and problem.dtype in _DTYPES):
        return None
    if norm and hidden > MOST_NORMED:
        return None
    columns, dtype = (heads + 2 * problem.cache_heads) * problem.dim, problem.dtype
    before = LinearProblem(columns, hidden, tokens, dtype, dtype, norm=norm)
    return before, LinearProblem(hidden, heads * form.value_width, tokens, dtype, dtype, residual=True)


def compile_matmuls(machine: Machine, problem: DecodeProblem) -> None:
    """Compile the matmuls around attention into Triton's cache on disk, without using the GPU."""
    for one in matmuls_of(problem) or ():
        linear.compile_all(machine, one, None)


class Matmuls:
    """The matmuls before and after attention, of successive layers with different weights. `bench` has the weights.

    `alone` maps numbers of layers to the mean seconds of both matmuls without attention. Missing ones are measured and
    added. The matmuls are launched once here: a kernel cannot be loaded while a CUDA graph is captured.
    """

    def __init__(
        self,
        machine: Machine,
        problems: tuple[LinearProblem, LinearProblem],
        bench: LinearBench,
        alone: dict[int, float],
    ) -> None:
        before, after = (linear.launcher(machine, one, None) for one in problems)
        first, last = problems
        self._layers: list[tuple[KernelCall, KernelCall]] = [
            (partial(before, bench.inputs(first)), partial(after, bench.inputs(last))) for _ in range(MOST_LAYERS)
        ]
        for launch in self._layers[0]:
            launch()
        self._alone = alone

    def added(self, attention: Sequence[KernelCall]) -> float:
        """Return the mean seconds that a launch of attention adds between the two matmuls.

        `attention` are launches of successive steps. The first `MOST_LAYERS` are timed. Their kernels must have run
        before. The result is the difference of two medians, and at least a share of the time of the matmuls (`LEAST`).
        So tiles whose differences are below this share are equal, and noise does not choose among them.
        """
        attention = attention[:MOST_LAYERS]
        alone = self._alone_seconds(len(attention))
        between = device.graph_seconds(self._launches(attention)) / len(attention)
        return max(between - alone, LEAST * alone)

    def _alone_seconds(self, layers: int) -> float:
        """Return the mean seconds of both matmuls without attention, measured once for each number of layers."""
        if layers not in self._alone:
            launches = (launch for layer in self._layers[:layers] for launch in layer)
            self._alone[layers] = device.graph_seconds(launches) / layers
        return self._alone[layers]

    def _launches(self, attention: Sequence[KernelCall]) -> Iterator[KernelCall]:
        for (before, after), own in zip(self._layers, attention, strict=False):
            yield from (before, own, after)
