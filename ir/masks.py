"""Attention masks: each defines the positions of a sequence that a query token sees.

A mask has a kind and, except for `causal`, `bidirectional` and `tree`, a size; its name holds both. A query sees one
range of positions, from `first` (inclusive) to `end` (exclusive), clipped to the sequence:

causal           its own position and all before it
window_N         the last N positions, including its own
chunked_N        the positions up to its own in its chunk of N, as in the local layers of Llama 4
bidirectional    every position, as in an encoder
block_causal_N   every position of its block of N and of the blocks before it, as in block diffusion
tree             all positions before the step, its own, and its ancestors among the step's tokens, which
                 `paged_attention` takes as an argument. The bounds are those of `causal`, with gaps between them

`first` and `end` never decrease with the query's position. So a range of queries sees from `first` of its first query
to `end` of its last one.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from ingot.ir.errors import VerifyError

if TYPE_CHECKING:  # so that `--help` does not import torch
    import torch

# Compiled kernels use the index into this tuple.
KINDS = ("causal", "window", "chunked", "bidirectional", "block_causal", "tree")
_SIZED = ("window", "chunked", "block_causal")
_NAME = re.compile(r"([a-z_]+?)(?:_([1-9]\d{0,8}))?")
_FAR = 1 << 30  # above every position of a sequence

Positions = TypeVar("Positions", int, "torch.Tensor")


@dataclass(frozen=True)
class Mask:
    """An attention mask: which positions of its sequence a query token sees.

    `kind` is one of `KINDS`, such as "causal" or "window". `size` is the number of positions of the window, chunk or
    block. It is 0 for kinds without one.
    """

    kind: str = "causal"
    size: int = 0

    @staticmethod
    @cache
    def named(name: str) -> "Mask":
        """Parse a mask's name, such as "causal" or "window_1024". Raises VerifyError if there is no such mask."""
        found = _NAME.fullmatch(name)
        kind, size = (found[1], found[2]) if found else (name, None)
        if kind not in KINDS or (size is None) == (kind in _SIZED):
            kinds = ", ".join(f"{one}_N" if one in _SIZED else one for one in KINDS)
            raise VerifyError(f"unknown mask '{name:.80}'", expected=f"{kinds}, with N from 1 to 999999999")
        return Mask(kind, int(size or 0))

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.size}" if self.size else self.kind

    @property
    def forgets(self) -> bool:
        """Return whether later queries stop seeing old positions, as with windows and chunks.

        Pages of such positions can be freed.
        """
        return self.kind in ("window", "chunked")

    @property
    def looks_ahead(self) -> bool:
        """Return whether a query sees positions after its own."""
        return self.kind in ("bidirectional", "block_causal")

    @property
    def granule(self) -> int:
        """Return the number of consecutive positions that all see each other, such as 32 for blocks of 32.

        It is 1 for a causal mask. A step must process a sequence up to a multiple of it, or up to the sequence's end.
        """
        if self.kind == "bidirectional":
            return _FAR
        return self.size if self.kind == "block_causal" else 1

    def first(self, position: Positions) -> Positions:
        """Return the first position that a query at `position` sees.

        It is negative for a window that starts before 0.
        """
        if self.kind == "window":
            return position - (self.size - 1)
        if self.kind == "chunked":
            return position // self.size * self.size
        return position * 0

    def end(self, position: Positions) -> Positions:
        """Return one more than the last position that a query at `position` sees.

        It may exceed the sequence's length.
        """
        if self.kind == "bidirectional":
            return position * 0 + _FAR
        if self.kind == "block_causal":
            return (position // self.size + 1) * self.size
        return position + 1

    def seen(self, queries: "torch.Tensor", keys: "torch.Tensor") -> "torch.Tensor":
        """Return bool[n, m]: whether query i sees key j of the same sequence, by the range from `first` to `end`.

        `queries` [n] and `keys` [m] hold positions in the sequence. For the mask "tree", this includes keys that the
        query does not see, because they are not its ancestors.
        """
        positions = keys[None, :]
        return (positions >= self.first(queries)[:, None]) & (positions < self.end(queries)[:, None])


CAUSAL = Mask()
