"""Tuning experts: what is tried fits, and what is timed computes the op `experts`, by Triton's interpreter."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch

from ingot.backends.triton.lower.experts.problem import EXPERTS, ExpertsProblem
from ingot.backends.triton.lower.experts.tiles import GroupTiles, RowTiles, ranges_of
from ingot.backends.triton.lower.shared_memory import shared_memory
from ingot.backends.triton.tiles import check_tiles
from ingot.backends.triton.tune import device, experts
from ingot.backends.triton.tune.device import Launcher, Machine, Pool
from ingot.ir.artifact.tuning import Choice

H200 = Machine(sm=90, cores=132)
HERE = Machine(sm=90, cores=4, dependent=False)  # the interpreter knows no dependent launch
# Of Qwen3-30B-A3B and GPT-OSS-20B, in each of its matmuls and blocks, and of a tiny one.
SIZES = [(128, 8, 2048, 768), (32, 4, 2880, 2880), (4, 2, 48, 20)]
PROBLEMS = [
    ExpertsProblem(count, top_k, *((ffn, hidden) if gated else (hidden, ffn)), gated=gated, block=block, dtype="bf16")
    for count, top_k, hidden, ffn in SIZES
    for gated in (True, False)
    for block in (1, 16, 32, 64, 128)
    if gated or block < 128 or ffn % 64  # `experts_warpgroups` has no tile sizes
]
QUANTIZED = [
    ExpertsProblem(128, 8, *sizes, gated=gated, block=block, dtype="bf16", packing=packing)
    for packing in ("mxfp4", "fp8_block128", "int4_g128", "int8")
    for gated, sizes in ((True, (768, 2048)), (False, (2048, 768)))
    for block in (1, 16, 64, 128)
    if (gated, block, packing) != (False, 128, "mxfp4")  # `experts_warpgroups` has no tile sizes
]
SMALL = [
    (ExpertsProblem(8, 2, 20, 48, gated=True, block=1, dtype="f32"), RowTiles(2, 32, 4)),
    (ExpertsProblem(8, 2, 48, 20, gated=False, block=1, dtype="f32"), RowTiles(4, 16, 4)),
    (ExpertsProblem(8, 2, 20, 48, gated=True, block=16, dtype="f32"), GroupTiles(16, 16, 4, 2)),
    (ExpertsProblem(8, 2, 48, 20, gated=False, block=16, dtype="f32"), GroupTiles(32, 32, 4, 2, together=2)),
    (ExpertsProblem(8, 2, 32, 64, True, 16, "f32", "mxfp4"), GroupTiles(16, 32, 4, 2)),
    (ExpertsProblem(8, 2, 64, 32, False, 16, "f32", "int8"), GroupTiles(32, 32, 4, 2, together=2)),
]


def choice_of(problem: ExpertsProblem, tiles: experts.AnyTiles) -> Choice:
    return Choice(kernel=EXPERTS, problem=problem.fields(), tiles=asdict(tiles), source="heuristic")


@pytest.mark.parametrize("depth", [32, 96, 160, 2880])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_tiles_of_every_depth_are_powers_of_two(depth: int, block: int) -> None:
    problem = ExpertsProblem(8, 2, 96, depth, gated=True, block=block, dtype="bf16", packing="mxfp4")
    tiles = experts.known(problem, H200)
    assert isinstance(tiles, GroupTiles) and tiles.block_k.bit_count() == 1 and tiles.block_k <= max(32, depth)
    check_tiles([choice_of(problem, tiles)])


def rows_of(constants: Mapping[str, Any], problem: ExpertsProblem) -> int:
    """The results that a program of a kernel for quantized weights computes."""
    if "TILES" in constants:
        return int(constants["TILES"]) * (16 if problem.gated else 32)
    return int(constants["ROWS" if problem.block == 1 else "BLOCK_N"])


@pytest.mark.parametrize("problem", QUANTIZED, ids=str)
def test_candidates_of_quantized_weights(problem: ExpertsProblem) -> None:
    found = experts.candidates(problem, H200)
    assert found[0] == experts.known(problem, H200) and 5 < len(set(found)) == len(found)
    for tiles in [*found, *experts.more_candidates(problem, found[0])]:
        choice = choice_of(problem, tiles)
        check_tiles([choice])
        assert ExpertsProblem.of(choice) == problem and isinstance(tiles, problem.tiles_kind)
    last = found[-1]
    schedule, _ = experts.make_schedule(
        H200, experts.mixture_of(problem), experts.tokens_of(problem, H200.sm), {problem: last}
    )
    name = "quant_experts_up" if problem.gated else "quant_experts_down"
    runs = [
        rows_of(launch.constants, problem)
        for launch in schedule.launches
        if launch.kernel.fn.__name__.startswith(name) and launch.constants.get("TOKENS", 1) == problem.block
    ]
    assert runs == [last.block_n if isinstance(last, GroupTiles) else last.rows]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_candidates_are_tiles_that_fit(problem: ExpertsProblem) -> None:
    found = experts.candidates(problem, H200)
    assert found[0] == experts.known(problem, H200) and len(set(found)) == len(found)
    assert len(found) > 5 or problem.depth < 64
    for tiles in [*found, *experts.more_candidates(problem, found[0])]:
        choice = choice_of(problem, tiles)
        check_tiles([choice])
        assert ExpertsProblem.of(choice) == problem and isinstance(tiles, problem.tiles_kind)
        if isinstance(tiles, GroupTiles):
            rows = tiles.block_n * (2 if problem.gated else 1) + problem.block
            assert tiles.stages * rows * tiles.block_k * 2 <= shared_memory(90)
    last = found[-1]
    schedule, _ = experts.make_schedule(
        H200, experts.mixture_of(problem), experts.tokens_of(problem, H200.sm), {problem: last}
    )
    name = "experts_up" if problem.gated else "experts_down"
    runs = [
        (launch.constants["BLOCK_N"], launch.constants["BLOCK_K"])
        for launch in schedule.launches
        if launch.kernel.fn.__name__.startswith(name) and launch.constants.get("TOKENS", 1) == problem.block
    ]
    assert runs == [(last.block_n, last.block_k)]


@pytest.mark.parametrize(
    ("block", "reason"),
    [(2, "block 2"), (4, "block 4"), (8, "block 8"), (48, "block 48"), (0, "block is 0"), (True, "block is True")],
)
def test_blocks_that_no_kernel_has(block: int, reason: str) -> None:
    choice = choice_of(PROBLEMS[1], GroupTiles(64, 64, 4, 3))
    with pytest.raises(ValueError, match=reason):
        ExpertsProblem.of(choice.model_copy(update={"problem": {**choice.problem, "block": block}}))


@pytest.mark.parametrize(
    ("least", "most", "sizes", "f32", "expected"),
    [
        (1, 1, (128, 8), False, [(1, 1, 1)]),
        (2, 16, (128, 8), False, [(2, 4, 1), (5, 16, 16)]),
        (2, 16, (8, 2), False, [(2, 16, 16)]),
        (17, 32, (128, 8), False, [(17, 32, 32)]),
        (65, 8192, (128, 8), False, [(65, 384, 32), (385, 1536, 64), (1537, 8192, 128)]),
        (65, 8192, (8, 4), False, [(65, 192, 64), (193, 8192, 128)]),
        (65, 8192, (128, 8), True, [(65, 8192, 32)]),
        (65, 100, (128, 8), False, [(65, 100, 32)]),
        (1, 8192, (512, 10), False, [(1, 8, 1), (9, 1228, 32), (1229, 4915, 64), (4916, 8192, 128)]),
        (5, 5, (1, 1), False, [(5, 5, 16)]),
    ],
)
def test_ranges_cover_all_steps(
    least: int, most: int, sizes: tuple[int, int], f32: bool, expected: list[tuple[int, int, int]]
) -> None:
    assert [(one.least, one.most, one.block) for one in ranges_of(least, most, *sizes, f32)] == expected


def test_ranges_with_kernels_for_few_choices() -> None:
    few = ((4, 8), (12, 16))
    found = [
        [(one.least, one.most, one.block) for one in ranges_of(least, most, 32, 4, False, few=few)]
        for least, most in ((2, 16), (17, 32), (33, 64), (65, 8192), (90, 100))
    ]
    assert found == [
        [(2, 2, 1), (3, 16, 8)],
        [(17, 32, 8)],
        [(33, 64, 16)],
        [(65, 96, 16), (97, 192, 32), (193, 768, 64), (769, 8192, 128)],
        [(90, 96, 16), (97, 100, 32)],
    ]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> experts.ExpertsBench:
    """A bench on the CPU, whose clock says a millisecond for whatever runs."""

    def seconds(launches: Iterable[Callable[[], None]]) -> float:
        for launch in launches:
            launch()
        return 1e-3

    monkeypatch.setattr(device, "DEVICE", "cpu")
    monkeypatch.setattr(device, "POOL", 1 << 10)
    monkeypatch.setattr(device, "median_seconds", lambda work, rounds: 1e-3)
    monkeypatch.setattr(device, "graph_seconds", seconds)
    monkeypatch.setattr(experts, "MOST_CALLS", 2)
    return experts.ExpertsBench(Pool())


@pytest.mark.one_in(3)
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize(("problem", "tiles"), SMALL, ids=str)
def test_what_runs_is_the_op(
    bench: experts.ExpertsBench, problem: ExpertsProblem, tiles: experts.AnyTiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.measure(HERE, problem, tiles) == experts.TimedExperts(problem, tiles, pytest.approx(500.0))
    right = Launcher.__call__

    def wrong(self: Launcher, inputs: list[torch.Tensor]) -> None:
        right(self, inputs)
        self.output[0, 3] += 20

    monkeypatch.setattr(Launcher, "__call__", wrong)
    with pytest.raises(RuntimeError, match="the result is wrong by"):
        bench.measure(HERE, problem, tiles)


def test_routings(bench: experts.ExpertsBench) -> None:
    mixture, g = experts.Mixture(4, 4, 12, 3), torch.Generator().manual_seed(1)
    counts = {
        name: experts.chosen_by(name, 8, mixture, g).flatten().bincount(minlength=12) for name in experts.ROUTINGS
    }
    assert counts["same"].tolist() == [8] * 3 + [0] * 9 and counts["uniform"].tolist() == [2] * 12
    assert counts["random"].sum() == 24 and len(counts["random"].unique()) > 2
    assert all(len(set(row)) == 3 for row in experts.chosen_by("random", 8, mixture, g).tolist())
