"""The base class of the blocks of a model, which also say how many rewrites passes must apply to them."""

from collections import Counter
from collections.abc import Mapping

from torch import nn


class Block(nn.Module):
    """A part of a model, such as attention or a norm."""

    def matches(self) -> Mapping[str, int]:
        """Return how many rewrites each pass must apply to this block: pass name -> count.

        Sub-blocks are not counted. Compiling fails if a pass applies fewer.
        """
        return {}


def expected_matches(module: nn.Module) -> dict[str, int]:
    """Return how many rewrites each pass must apply to a module and its sub-modules: pass name -> count."""
    total: Counter[str] = Counter()
    for one in module.modules():
        if isinstance(one, Block):
            total.update(one.matches())
    return dict(total)
