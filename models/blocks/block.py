"""The base class of parts of a definition, and the number of matches that passes must have in them."""

from collections import Counter
from collections.abc import Mapping

from torch import nn


class Block(nn.Module):
    """A part of a definition."""

    def matches(self) -> Mapping[str, int]:
        """Return how often each pass must match in this block, by the pass's name, without its sub-blocks.

        Fewer matches are an error: otherwise a pass that silently does nothing would cost speed.
        """
        return {}


def expected_matches(module: nn.Module) -> dict[str, int]:
    """Return how often each pass must match in a module and all of its sub-modules."""
    total: Counter[str] = Counter()
    for one in module.modules():
        if isinstance(one, Block):
            total.update(one.matches())
    return dict(total)
