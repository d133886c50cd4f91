"""A part of a definition, and how often passes must match in it."""

from collections import Counter
from collections.abc import Mapping

from torch import nn


class Block(nn.Module):
    """A part of a definition."""

    def matches(self) -> Mapping[str, int]:
        """How often each pass must match in this block, by the pass's name, apart from what its parts say.

        Fewer matches are an error: a pass that does nothing without a word is lost speed.
        """
        return {}


def expected_matches(module: nn.Module) -> dict[str, int]:
    """How often each pass must match in a module and all of its parts."""
    total: Counter[str] = Counter()
    for one in module.modules():
        if isinstance(one, Block):
            total.update(one.matches())
    return dict(total)
