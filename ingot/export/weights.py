"""Make the tensors of params one by one, so that an export holds few of them in memory."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ingot.ir.errors import CheckpointError
from ingot.ir.program import ParamSpec
from ingot.ir.recipe import Recipe, Results


def made_in_turn(
    groups: Sequence[Sequence[ParamSpec]], read: Callable[[str], torch.Tensor]
) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors of each group of params, in order. `read` returns a checkpoint tensor by name.

    A recipe step with several results (a quantized weight, its scales and zeros) runs once. Its results are kept until
    the last group that needs one. Raises CheckpointError if a tensor does not have the type of its param.
    """
    memo: dict[Recipe, Results] = {}
    waiting = Counter(step for group in groups for spec in group for step in spec.recipe.shared_steps())
    for group in groups:
        yield [_made(spec, spec.recipe.execute(read, memo)) for spec in group]
        for spec in group:
            waiting.subtract(spec.recipe.shared_steps())
        memo = {step: results for step, results in memo.items() if waiting[step] > 0}


def _made(spec: ParamSpec, tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    if problem := spec.type.mismatch(tensor):
        raise CheckpointError(f"a weight has {problem}", where=str(spec.recipe)[:500])
    return tensor


def total_bytes(params: Mapping[str, ParamSpec]) -> int:
    """Return the bytes of all params together."""
    total = 0
    for spec in params.values():
        size = spec.type.dtype.itemsize
        for length in spec.type.bind({}):
            size *= length
        total += size
    return total
