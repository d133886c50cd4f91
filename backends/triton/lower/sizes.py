"""Round sizes up to those that Triton's tiles can have: powers of two."""

# The least size of an axis of an operand of `tl.dot`: narrower tiles are padded with zeros.
LEAST = 16


def power_of_two(size: int) -> int:
    """Return the least power of two >= `size`. The sizes of Triton's tiles are powers of two."""
    return 1 << (size - 1).bit_length()


def tile_width(numbers: int) -> int:
    """Return the width of a tile that holds a key or a value of `numbers` elements."""
    return max(LEAST, power_of_two(numbers))
