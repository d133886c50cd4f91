"""Sizes that tiles can have."""

# The least side of a tensor-core product in Triton: what is narrower is filled up with zeros.
LEAST = 16


def power_of_two(size: int) -> int:
    """The least power of two that is no less: Triton's tiles have such sizes only."""
    return 1 << (size - 1).bit_length()


def tile_width(numbers: int) -> int:
    """Of a tile that holds the numbers of a key or a value."""
    return max(LEAST, power_of_two(numbers))
