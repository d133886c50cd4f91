"""The base class of the blocks of a model, which also say how many rewrites passes must apply to them."""

from collections import Counter
from collections.abc import Mapping

from torch import nn


class Block(nn.Module):
    """A part of a model, such as attention or a norm."""

    def matches(self) -> Mapping[str, int]:
        """Return how many rewrites each pass must apply to this block, without its sub-blocks, by the pass's name.

        Fewer are an error. Otherwise a pass that silently does nothing would cost speed.
        """
        return {}


def expected_matches(module: nn.Module) -> dict[str, int]:
    """Return how many rewrites each pass must apply to a module with all sub-modules, by the pass's name."""
    total: Counter[str] = Counter()
    for one in module.modules():
        if isinstance(one, Block):
            total.update(one.matches())
    return dict(total)
