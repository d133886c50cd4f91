"""Pipeline stages: which layers each stage has, and which stage computes a call."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache

from torch import fx

from ingot.ir import ops
from ingot.ir.errors import OptionError
from ingot.ir.mesh import STAGES
from ingot.ir.ops import op_of
from ingot.ir.origin import layer_of
from ingot.ir.program import Model, Program
from ingot.passes.plan_memory import weight_bytes


def first_layers(model: Model, stages: int) -> tuple[int, ...]:
    """Return the number of the first layer of each of `stages` pipeline stages.

    The largest number of bytes of weights that a stage reads in a step is as low as possible. A look-up in an embedding
    reads a few rows, so its table does not count. Raises OptionError if the model cannot be cut into so many stages.
    """
    if len(model.entries) > 1:
        raise OptionError(
            f"{STAGES}={stages} for a model of several programs ({', '.join(model.entries)})",
            where="mesh",
            expected=f"{STAGES}=1: only a model of one program is cut into stages",
        )
    main = model.entries["main"]
    layers = [layer for node in main.calls() if (layer := layer_of(str(node.meta.get("origin", "")))) is not None]
    count = max(layers, default=-1) + 1
    if count < stages:
        raise OptionError(
            f"{STAGES}={stages} for a model of {count} layers", where="mesh", expected=f"{STAGES} of at most {count}"
        )
    costs, after = _costs(main, count)
    return _balanced(costs, after, stages)


def _costs(program: Program, layers: int) -> tuple[list[int], int]:
    """Return the bytes of weights that each layer reads in a step, and those that are read after all layers."""
    costs, after = [0] * layers, 0
    for param in program.placeholders("param"):
        users = [node for node in param.users if op_of(node.target) is not ops.embedding]
        found = [layer for node in users if (layer := layer_of(str(node.meta.get("origin", "")))) is not None]
        size = weight_bytes([program.params[str(param.target)]])
        if found:
            costs[min(found)] += size
        elif users:
            after += size
    return costs, after


def _balanced(costs: Sequence[int], after: int, stages: int) -> tuple[int, ...]:
    """Cut layers of these costs into `stages` runs so that the largest cost is least. No run is empty.

    `after` is the cost of what the last run has besides its layers. Return the first layer of each run.
    """
    count = len(costs)

    @cache
    def best(first: int, runs: int) -> tuple[int, tuple[int, ...]]:
        """Return (largest cost, first layers) of the best cut of the layers from `first` on into `runs` runs."""
        if runs == 1:
            return sum(costs[first:]) + after, (first,)
        found = []
        for end in range(first + 1, count - runs + 2):
            cost, others = best(end, runs - 1)
            found.append((max(sum(costs[first:end]), cost), (first, *others)))
        return min(found)

    return best(0, stages)[1]


def stage_of_calls(program: Program, firsts: Sequence[int]) -> dict[fx.Node, int]:
    """Return the stage of each call: that of its layer, but no earlier than the stages of its arguments.

    `firsts` has the first layer of each stage. Calls of no layer, such as those of the head, follow their arguments.
    """
    stages: dict[fx.Node, int] = {}
    for node in program.calls():
        layer = layer_of(str(node.meta.get("origin", "")))
        own = 0 if layer is None else max(0, bisect_right(firsts, layer) - 1)
        stages[node] = max([own, *(stages.get(source, 0) for source in node.all_input_nodes)])
    return stages
