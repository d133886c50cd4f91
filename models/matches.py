"""How often passes must match in a definition: each block says it of itself, and an entry sums it up."""

from collections import Counter
from collections.abc import Mapping

from torch import nn


class Block(nn.Module):
    """A part of a definition."""

    def matches(self) -> Mapping[str, int]:
        """How often each pass must match in this block, apart from what its parts say of themselves.

        Fewer matches are an error: a pass that does nothing without a word is lost speed.
        """
        return {}


def expected_matches(module: nn.Module) -> dict[str, int]:
    """How often each pass must match in a module and all of its parts, by the pass's name."""
    total: Counter[str] = Counter()
    for one in module.modules():
        if isinstance(one, Block):
            total.update(one.matches())
    return dict(total)
