"""Round sizes up to those that Triton's tiles can have: powers of two."""

# The least size of an axis of an operand of `tl.dot`: narrower tiles are padded with zeros.
LEAST = 16
# Most elements of a row with a fused norm. One program norms a row in registers: 64 KB of float32, 128 bytes for each
# of 512 threads.
MOST_NORMED = 16384


def power_of_two(size: int) -> int:
    """Return the least power of two >= `size`. The sizes of Triton's tiles are powers of two."""
    return 1 << (size - 1).bit_length()


def tile_width(numbers: int) -> int:
    """Return the width of a tile that holds a key or a value of `numbers` elements."""
    return max(LEAST, power_of_two(numbers))


def padded_tokens(most: int) -> int:
    """Return how many rows of x a kernel is compiled for, if x has up to `most` rows.

    The number is 1, or a power of two from 16 on, the least size of an operand of `tl.dot`.
    """
    return 1 if most == 1 else max(16, power_of_two(most))
