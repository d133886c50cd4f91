"""One token of float8 weights by tensor cores (`quant_matvec` with CORES), against the op's reference."""

import itertools
from dataclasses import replace

import pytest
import torch
from quant_calls import FORMS, check, check_region, drawn
from triton_schedules import run_lowering, some

from ingot.backends.triton.lower.linear.matmul import LOWERINGS
from ingot.backends.triton.lower.quant import matvec
from ingot.backends.triton.lower.quant.tiles import QuantMatvecTiles
from ingot.backends.triton.lower.refused import Refused
from ingot.ir import ops
from ingot.ir.formats import find_format

FORMATS = (
    *("fp8", "fp8_per_channel_per_token", "fp8_block128", "f8e4m3/*x*:f32/x=f8e4m3:static"),
    *("f8e4m3/1x*:f32/ordered/x=f8e4m3:*", "f8e4m3/1x*:f32/x=f8e4m3:64:f8e8m0", "f8e4m3/1x*:f32/x=f8e4m3:*:bound1.5"),
)
TILES = QuantMatvecTiles(rows=4, block_k=512, warps=1, held=4, programs=1, cores=1)


@pytest.fixture
def on_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor cores multiply. The interpreter has no assembly."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(matvec, "one_token_elements", lambda form, *_: replace(form.elements, assembly=False))
    monkeypatch.setattr(matvec, "matvec_tiles", lambda *given: TILES)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("depth", (128, 384, 512))
@pytest.mark.parametrize("n", (8, 21))
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("on_cores")
def test_formats(name: str, n: int, depth: int) -> None:
    """Two programs share groups of four rows. The last group may end after the last row."""
    check(name, 1, n, depth, torch.bfloat16, bias=True, cores=2)


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
@pytest.mark.parametrize("name", ("fp8", "fp8_block128"))
@pytest.mark.usefixtures("on_cores")
def test_numbers_that_are_not_finite(name: str, bad: float) -> None:
    x, parts = drawn(find_format(name), 1, 9, 384, torch.bfloat16)
    x[0, 200] = bad
    args = [x, parts["weight"], parts["scales"], None]
    lowering = LOWERINGS["quant_linear"]
    (found,) = run_lowering(ops.quant_linear, lowering, args, {"format": name}, tokens=(1, 1), dims={"T": 1})
    assert bool(found.isnan().all())


@pytest.mark.usefixtures("on_cores")
def test_rows_of_zeros() -> None:
    check("fp8_block128", 1, 9, 384, torch.bfloat16, x=torch.zeros(1, 384, dtype=torch.bfloat16))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("form", "format"), some(6, itertools.product(FORMS, ("fp8", "fp8_block128"))))
@pytest.mark.usefixtures("on_cores")
def test_regions(form: str, format: str) -> None:
    """In float32: rounding to bf16 before the rounding to f8e4m3 may change a code."""
    schedule = check_region(form, format, 1, torch.float32, cores=5)
    assert [choice.tiles["cores"] for choice in schedule.choices] == [1]


@pytest.mark.parametrize(
    ("name", "tiles"),
    [
        ("fp8", replace(TILES, held=3)),  # rows are pairs
        ("fp8", replace(TILES, rows=1)),
        ("fp8", replace(TILES, block_k=256)),  # a row has several blocks
        ("fp8", replace(TILES, warps=2)),  # threads would have the same chunks
        ("f8e4m3/1x*:f32", TILES),  # x has no codes
        ("int8_w8a8", TILES),
    ],
)
def test_tile_sizes_that_tensor_cores_do_not_fit(
    name: str, tiles: QuantMatvecTiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matvec, "matvec_tiles", lambda *given: tiles)
    with pytest.raises(Refused, match="tensor cores cannot multiply one token with the tile sizes"):
        check(name, 1, 8, 384, torch.float32)
