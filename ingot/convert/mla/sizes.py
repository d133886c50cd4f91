"""The sizes of a converted attention, and the checks of the options that choose them."""

from dataclasses import dataclass, replace

from ingot.convert.mla.source import Heads
from ingot.ir.errors import ConversionError


@dataclass(frozen=True)
class Sizes:
    """The sizes of a converted attention.

    - `rank`: elements of the latent of keys and values
    - `rope_dim`: elements of the rotated key that all heads share
    - `freqfold`: number of adjacent frequencies that one rotation of keys mixes (TransMLA's FreqFold)
    - `width`: elements of a head of the source
    - `keys`: elements of the keys of all heads of the source; values have as many
    """

    rank: int
    rope_dim: int
    freqfold: int
    width: int
    keys: int

    @property
    def rope_heads(self) -> int:
        """The number of parts of the rotated key that have the whole rotary table."""
        return max(1, self.rope_dim // self.width)

    @property
    def stride(self) -> int:
        """The distance between rotary frequencies that are kept: 1 if all are."""
        return max(1, self.width // self.rope_dim)

    @property
    def kept(self) -> int:
        """The number of rotated components of each group of `freqfold` frequencies."""
        return self.rope_dim * self.freqfold // self.width

    @property
    def whole(self) -> int:
        """The rank that keeps all of the keys that are not rotated, and of the values."""
        return 2 * self.keys - self.rope_dim

    @property
    def cache(self) -> float:
        """The elements that the cache has for a token, relative to the source's."""
        return (self.rank + self.rope_dim) / (2 * self.keys)

    def keeping_rank(self) -> "Sizes":
        return replace(self, rank=self.whole)

    def keeping_all(self) -> "Sizes":
        return replace(self, rope_dim=self.keys, rank=self.keys)


def check_sizes(heads: Heads, rank: int | None, rope_dim: int, freqfold: int, where: str) -> Sizes:
    """Return the sizes that the options choose. A rank of None keeps all. `where` is for errors.

    Raises ConversionError.
    """
    width, keys = heads.width, heads.keys
    shown = f"{heads.spec.kv_heads} k/v heads of {width} elements"
    if rope_dim < 2 or rope_dim % 2 or rope_dim > keys or (width % rope_dim and rope_dim % width):
        raise ConversionError(
            f"--rope-dim {rope_dim} with {shown}",
            where=where,
            expected=f"an even divisor of {width}, or a multiple of {width} up to {keys}",
        )
    stride = max(1, width // rope_dim)
    if freqfold < 1 or (width // 2) % freqfold or freqfold % stride:
        raise ConversionError(
            f"--freqfold {freqfold} with {rope_dim} rotated elements and {shown}",
            where=where,
            expected=f"a divisor of the {width // 2} frequencies of a head"
            + (f", and a multiple of {stride}: one of {stride} frequencies is kept" if stride > 1 else ""),
        )
    made = Sizes(1, rope_dim, freqfold, width, keys)
    if rank is not None and not 1 <= rank <= made.whole:
        raise ConversionError(
            f"--rank {rank} with {rope_dim} rotated elements and {shown}",
            where=where,
            expected=f"1 to {made.whole}, the elements of keys and values that are not rotated",
        )
    return replace(made, rank=made.whole if rank is None else rank)
