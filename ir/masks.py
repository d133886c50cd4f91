"""Masks of attention: which positions of its sequence a query sees.

A mask has a kind and, but for `causal`, `bidirectional` and `tree`, a size; its name says both. What a query sees is
one range, from `first` to below `end`, cut where the sequence begins and where it ends:

causal           itself and all positions before it
window_N         the last N positions, its own among them
chunked_N        those before it in its chunk of N positions, as in the local layers of Llama 4
bidirectional    every position, as in an encoder
block_causal_N   every position of its block of N and of the blocks before it, as in diffusion over blocks
tree             all positions before the step, and of those that the step feeds the ancestors that `paged_attention` is
                 given for each token, itself among them: between its bounds, which are those of `causal`, it has gaps

Neither bound falls while the position of the query rises, so a range of queries sees from the first bound of its first
query to the last bound of its last one.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from ingot.ir.errors import VerifyError

if TYPE_CHECKING:  # `--help` loads no torch
    import torch

# In the order in which compiled kernels number them.
KINDS = ("causal", "window", "chunked", "bidirectional", "block_causal", "tree")
_SIZED = ("window", "chunked", "block_causal")
_NAME = re.compile(r"([a-z_]+?)(?:_([1-9]\d{0,8}))?")
_FAR = 1 << 30  # above every position: sequences are shorter

Positions = TypeVar("Positions", int, "torch.Tensor")


@dataclass(frozen=True)
class Mask:
    """`size`: the positions of a window, a chunk or a block; 0 where the kind has none."""

    kind: str = "causal"
    size: int = 0

    @staticmethod
    @cache
    def named(name: str) -> "Mask":
        """The mask of a name. Raises VerifyError for a name that is none."""
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
        """Whether what a query does not see any more is seen by none after it."""
        return self.kind in ("window", "chunked")

    @property
    def looks_ahead(self) -> bool:
        """Whether a query sees positions after its own."""
        return self.kind in ("bidirectional", "block_causal")

    @property
    def granule(self) -> int:
        """Positions of which a query sees all or none: what a step feeds ends with a multiple, or with the sequence."""
        if self.kind == "bidirectional":
            return _FAR
        return self.size if self.kind == "block_causal" else 1

    def first(self, position: Positions) -> Positions:
        """The first position that a query at `position` sees; of a window it may lie below 0."""
        if self.kind == "window":
            return position - (self.size - 1)
        if self.kind == "chunked":
            return position // self.size * self.size
        return position * 0

    def end(self, position: Positions) -> Positions:
        """The position after the last one that it sees, where the sequence does not end before."""
        if self.kind == "bidirectional":
            return position * 0 + _FAR
        if self.kind == "block_causal":
            return (position // self.size + 1) * self.size
        return position + 1

    def seen(self, queries: "torch.Tensor", keys: "torch.Tensor") -> "torch.Tensor":
        """bool[n, m]: whether the queries at positions [n] see the keys at positions [m] of the same sequence."""
        places = keys[None, :]
        return (places >= self.first(queries)[:, None]) & (places < self.end(queries)[:, None])


CAUSAL = Mask()
