"""Tile sizes of the kernels of linear: the measured ones where there are, and such as fit for every other product."""

import random

import pytest
import torch

from ingot.backends.triton.lower.linear.choice import known_microseconds, matvec_tiles, tiles
from ingot.backends.triton.lower.linear.tiles import MATVEC, TILES, Product


def test_measured_products_get_what_was_measured() -> None:
    assert all(matvec_tiles(product) == found.tiles for product, found in MATVEC.items())
    for tokens, measured in TILES.items():
        assert all(tiles(product, tokens, sm=90) == found.tiles for product, found in measured.items())


def test_times_are_those_of_the_device_that_was_measured() -> None:
    """No product can be read faster than an H200's memory gives it (4.8 TB/s), and none of these is far off."""
    for tokens, measured in {1: MATVEC, **TILES}.items():
        for product in measured:
            taken = known_microseconds(product, tokens, sm=90)
            floor = product.columns * (2 if product.gated else 1) * product.depth * 2 / 4.8e6
            assert taken is not None and floor < taken < 2.5 * floor + 6, (tokens, product)
            assert known_microseconds(product, tokens, sm=100) is None
    assert known_microseconds(Product(100, 100), 1, sm=90) is None


# Of a block, from the same table of the CUDA C++ programming guide, in bytes.
@pytest.mark.parametrize(("sm", "shared"), [(80, 166912), (89, 101376), (90, 232448), (103, 232448), (121, 101376)])
def test_tiles_fit(sm: int, shared: int) -> None:
    draw = random.Random(sm)
    for _ in range(300):
        dtype = draw.choice((torch.bfloat16, torch.float16, torch.float32))
        product = Product(draw.randint(1, 300000), draw.randint(1, 30000), draw.random() < 0.5, dtype)
        tokens = draw.choice(tuple(TILES))
        found = tiles(product, tokens, sm)
        rows = found.block_n * (2 if product.gated else 1) + tokens
        assert rows * found.block_k * found.stages * dtype.itemsize <= shared, (product, found)
        for size in (found.block_n, found.block_k, matvec_tiles(product).block_n, matvec_tiles(product).block_k):
            assert size & (size - 1) == 0
        assert min(found.block_n, found.block_k) >= 16 and found.stages >= 1
        # Each split has something to do, and a block is not twice what there is.
        assert found.splits == 1 or found.splits * found.block_k <= product.depth
        assert max(found.block_k, matvec_tiles(product).block_k) < 2 * max(16, product.depth)
