"""How programs fall to multiprocessors, by hand and by counting what each of them does."""

import math
from dataclasses import replace

import pytest

from ingot.backends.triton.launches import Launch, Term
from ingot.debug.step_time.device import Device
from ingot.debug.step_time.library_product import product_seconds
from ingot.debug.step_time.programs import Contexts, Launched, Prompts, launched, uneven
from ingot.ir.artifact.tuning import Choice
from ingot.ir.machine.gpu_times import H200_TIMES, KernelTime
from ingot.ir.machine.gpus import TYPICAL, Gpu, resident_blocks
from ingot.ir.ops.registry import Cost

H200 = TYPICAL["sm_90"]
FOUR = Gpu("four", 90, 10**9, 4, 10**12)


def launch(warps: int, shared: int) -> Launch:
    grid = ("T", Term(op="cdiv", left="B", right=4), 1)
    return Launch(kernel="k.cubin", entry="k", grid=grid, arguments=(), warps=warps, shared=shared, dependent=True)


@pytest.mark.parametrize(
    ("target", "warps", "shared", "blocks"),
    [
        ("sm_90", 8, 0, 8),  # of 64 warps
        ("sm_90", 1, 0, 32),  # the most blocks
        ("sm_90", 4, 100 << 10, 2),  # 101 KB each, with what is reserved, of 228
        ("sm_90", 4, 227 << 10, 1),
        ("sm_86", 8, 0, 6),
        ("sm_86", 4, 100 << 10, 1),  # more than there is: a kernel that was compiled runs nevertheless
    ],
)
def test_blocks_that_find_room(target: str, warps: int, shared: int, blocks: int) -> None:
    assert resident_blocks(TYPICAL[target], warps, shared) == blocks


def test_a_launch_has_waves_and_a_busiest_multiprocessor() -> None:
    # 3 x 2 programs on 4 multiprocessors: two have two each, and the mean is one and a half.
    assert launched(launch(8, 0), {"T": 3, "B": 5}, FOUR) == Launched("k", 1, 2 / 1.5)
    # One at a time: 4 and then 2.
    assert launched(launch(8, 200 << 10), {"T": 3, "B": 5}, FOUR) == Launched("k", 2, 2 / 1.5)
    assert launched(launch(8, 0), {"T": 0, "B": 5}, FOUR).waves == 0
    assert uneven(1, 132) == 132 and uneven(264, 132) == 1 and uneven(265, 132) == pytest.approx(3 * 132 / 265)


def test_tiles_of_prompts_by_hand() -> None:
    """Two heads, four multiprocessors, tiles of four rows."""
    # Both tiles see 4 positions each: 16 of a mean of 2 heads * (1 + 2 + 3 + 4) / 4.
    assert Prompts(1, 4, 4, 2).uneven(4, 4) == pytest.approx(4 * 4 / (2 * 10 / 4))
    # Behind 8 positions: 12 for each row of a tile, of 9 + 10 + 11 + 12.
    assert Prompts(1, 4, 12, 2).uneven(4, 4) == pytest.approx(12 * 4 / (2 * 42 / 4))
    # Half a tile stands empty.
    assert Prompts(1, 2, 2, 2).uneven(4, 4) == pytest.approx(2 * 4 / (2 * 3 / 4))
    # Tiles of 8, 8, 4 and 4 positions, two multiprocessors: 12 each.
    assert Prompts(1, 8, 8, 2).uneven(4, 2) == pytest.approx(12 * 4 / (2 * 36 / 2))
    # A row sees 2 positions, a tile of four 5.
    assert Prompts(1, 8, 8, 2, "window_2").uneven(4, 4) == pytest.approx(5 * 4 / (2 * (1 + 7 * 2) / 4))


def test_long_prompts_fall_evenly() -> None:
    """Of many tiles every multiprocessor has the same, and what is lost are the corners of the tiles."""
    assert 1 < Prompts(1, 8192, 8192, 32).uneven(128, 132) < 1.05
    assert Prompts(1, 128, 128, 8).uneven(128, 132) == pytest.approx(132 / 8 * 128 / 64.5)


def contexts(tokens: int, context: int, most: int, **tiles: int) -> Contexts:
    """Over eight heads; tiles of 64 keys, programs of four warps."""
    problem = {"kv_heads": 8, "group": 4, "dim": 128, "page": 16, "dtype": "bf16", "tokens": most, "append": True}
    sizes = {"keys": 64, "stages": 5, "programs": 2, "warps": 4, "ahead": 0, "early": 1, **tiles}
    return Contexts(tokens, context, Choice(kernel="decode_attention", problem=problem, tiles=sizes, source="table"))


@pytest.mark.parametrize(
    ("of", "places", "busiest"),
    [
        (contexts(1, 512, 1), 1, 0),  # 32 splits may be, 8 have the one tile that is on the way already
        (contexts(1, 8192, 1), 2, 3 * 64),  # 4 tiles each, the first for nothing
        (contexts(1, 512, 1, early=0), 1, 64),
        (contexts(8, 512, 16), 2, 2 * 64),  # 4 splits of 2 tiles: 256 programs, and there is room for 264
        (contexts(4, 512, 16), 2, 64),  # 8 splits, of which 2 are for certain
        (contexts(16, 128, 16), 2, 0),  # 2 splits of a tile
        (contexts(32, 512, 32), 2, 7 * 64),
        (contexts(3, 2048, 16), 2, 3 * 64),  # 2048 positions of shares of 187: 11 splits, of 3 tiles
        (contexts(64, 2048, 64), 2, 63 * 64),  # 512 programs of 32 tiles, one behind the other
        (contexts(64, 2048, 64, warps=2), 4, 31 * 64),  # they are beside each other
        (contexts(96, 2048, 512, warps=1), 6, 31 * 64),  # eight could be; 768 programs fall to 132 multiprocessors
        (contexts(256, 512, 512), 2, 63 * 64),  # 2048 programs of 8 tiles: eight times one behind the other
        (contexts(2, 40, 16, keys=128), 1, 0),
    ],
)
def test_contexts_by_hand(of: Contexts, places: int, busiest: int) -> None:
    """So many programs of a multiprocessor are there at a time, and the longest goes over so many positions."""
    found = of.launched("decode_attention", 132)
    mean = of.tokens * 8 * of.context / (132 * places)
    assert found == Launched("decode_attention", int(busiest > 0), pytest.approx(busiest / mean))


def test_a_product_takes_its_fastest_cut() -> None:
    """Against every cut tried one by one, tile after tile dealt to the multiprocessors."""
    kernel = KernelTime(1e-6, 0.9, 0.8, wave=2e-6, stream=100e9)
    device = Device(H200, 4_800 * 10**9, replace(H200_TIMES, kernels={"cublas linear": kernel}))
    for rows, columns, depth in ((1, 4096, 4096), (128, 1024, 3072), (130, 2048, 8192), (2048, 6144, 4096)):
        done = Cost(2 * rows * columns * depth, 2 * (rows * depth + columns * depth + rows * columns))
        found = product_seconds((rows, columns, depth), done, "bf16", kernel, device)
        assert found == pytest.approx(_fastest(rows, columns, depth, kernel))
        assert found >= max(done.bytes / 0.9 / 4.8e12, done.flops / 0.8 / 989e12) * 0.999
    # Few tiles of a deep product are cut along the depth: eight times as much takes some four times as long.
    shallow, deep = (product_seconds((128, 2048, depth), Cost(0, 1), "bf16", kernel, device) for depth in (1024, 8192))
    assert shallow < deep < 5 * shallow


def _fastest(rows: int, columns: int, depth: int, kernel: KernelTime) -> float:
    times = []
    for high, wide in ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 128)):
        for parts in (1, 2, 3, 4, 6, 8):
            busy = [0.0] * 132
            tiles = [1 for _ in range(0, rows, high) for _ in range(0, columns, wide) for _ in range(parts)]
            for place, _ in enumerate(tiles):
                bytes_read = (high + wide) * depth / parts * 2
                busy[place % 132] += max(
                    bytes_read / kernel.stream, 2 * high * wide * depth / parts / (kernel.rate * 989e12 / 132)
                )
            moved = 2 * (rows * depth + columns * depth + rows * columns) / (kernel.bandwidth * 4.8e12)
            adding = kernel.wave + 8 * rows * columns * parts / (kernel.bandwidth * 4.8e12) if parts > 1 else 0
            times.append(max(max(busy), moved) + adding)
    assert len(times) == 42 and not math.isclose(min(times), max(times))
    return min(times)
