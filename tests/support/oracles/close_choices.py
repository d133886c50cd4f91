"""How close transformers' indexers were to choosing other positions: what rounding may decide is no test."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Of the largest score of a token. With 137 tokens, transformers' scores in float32 differ from those in float64 by some
# 2e-6 of it, and a fifth of prompts have such a choice.
MARGIN = 1e-5


class _Watch(TorchFunctionMode):
    """Notes for each call of `topk` within an indexer the least relative distance of what is chosen and what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.margins = False, list[float]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside and func is torch.Tensor.topk and args[1] < args[0].shape[-1]:
            least = torch.finfo(args[0].dtype).min / 2  # masked scores are below it
            scores = args[0].masked_fill(args[0] < least, -torch.inf)
            best = scores.topk(args[1] + 1, -1).values
            largest = scores.masked_fill(scores == -torch.inf, 0).abs().amax(-1)
            margin = (best[..., -2] - best[..., -1]) / largest
            # Without enough positions that are seen, all of them are chosen.
            self.margins.append(float(margin.masked_fill(best[..., -1] == -torch.inf, torch.inf).min()))
        return func(*args, **(kwargs or {}))


def choices_are_clear(model: torch.nn.Module, tokens: Sequence[int]) -> bool:
    """Whether no indexer of the model was about to choose another position for one of `tokens`.

    True for a model without indexers, which does not run.
    """
    indexers = [one for one in model.modules() if type(one).__name__.endswith("Indexer")]
    if not indexers:
        return True
    watch = _Watch()

    def enter(*_: Any) -> None:
        watch.inside = True

    def leave(*_: Any) -> None:
        watch.inside = False

    hooks = [one.register_forward_pre_hook(enter) for one in indexers]
    hooks += [one.register_forward_hook(leave) for one in indexers]
    try:
        with torch.no_grad(), watch:
            model(torch.tensor([[*tokens]]))
    finally:
        for hook in hooks:
            hook.remove()
    return min(watch.margins, default=torch.inf) >= MARGIN
