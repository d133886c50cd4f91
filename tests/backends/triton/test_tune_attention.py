"""Timing attention of few tokens: what is timed is the attention, by Triton's interpreter; and which sizes are best."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch

from ingot.backends.triton.lower.attention_choice import known_tiles
from ingot.backends.triton.lower.attention_problem import DECODE_ATTENTION, MOST_DECODED, DecodeProblem
from ingot.backends.triton.lower.attention_tiles import DECODE_TILES, DecodeTiles
from ingot.backends.triton.tiles import check_tiles
from ingot.backends.triton.tune import attention, device
from ingot.backends.triton.tune.attention import Bench, Mix, Timed, best, make_schedule, mixes_of
from ingot.backends.triton.tune.attention_candidates import candidates, more_candidates
from ingot.backends.triton.tune.device import Launcher, Machine, Pool
from ingot.ir.tuning import Choice

MACHINE = Machine(sm=90, cores=4, dependent=False)  # the interpreter knows no dependent launch
H200 = Machine(sm=90, cores=132)
ONE = DecodeProblem(2, 2, 16, 16, "f32", 1, True)
SEVERAL = DecodeProblem(1, 3, 16, 8, "f32", 16, True)
APART = replace(SEVERAL, append=False)
PROBLEMS = [ONE, SEVERAL, APART, *(DecodeProblem(8, 4, dim, 16, "bf16", 32, True) for dim in (64, 128, 256))]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """On the CPU, over a small pool and short contexts, by a clock that says a millisecond for whatever runs."""

    def graph_seconds(launches: Iterable[Callable[[], None]]) -> float:
        return 1e-3 * sum(launch() is None for launch in launches)

    monkeypatch.setattr(device, "DEVICE", "cpu")
    monkeypatch.setattr(device, "POOL", 1 << 18)
    monkeypatch.setattr(device, "median_seconds", lambda work, rounds: 1e-3)
    monkeypatch.setattr(device, "graph_seconds", graph_seconds)
    monkeypatch.setattr(attention, "LAUNCHES", (2, 2))
    monkeypatch.setattr(attention, "MIXES", {1: (Mix((70,)), Mix((1,))), 16: (Mix((20, 90, 1)),)})
    return Bench(Pool())


@interpreted
@pytest.mark.parametrize("problem", [ONE, SEVERAL, APART], ids=str)
def test_what_runs_is_the_attention(bench: Bench, problem: DecodeProblem) -> None:
    tiles = DecodeTiles(32, 3, 2, early=int(problem is ONE))
    found = bench.measure(MACHINE, problem, tiles)
    assert found == Timed(problem, tiles, (pytest.approx(1e3),) * len(mixes_of(problem)))


@interpreted
@pytest.mark.parametrize("problem", [ONE, APART], ids=str)
def test_wrong_results_are_found(bench: Bench, problem: DecodeProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Launcher.__call__

    def wrong(self: Launcher, inputs: list[torch.Tensor]) -> None:
        right(self, inputs)
        self.output[0] *= 1.1

    monkeypatch.setattr(Launcher, "__call__", wrong)
    with pytest.raises(RuntimeError, match="the result is wrong by"):
        bench.measure(MACHINE, problem, DecodeTiles(32, 3, 2))


def test_steps_own_different_pages(bench: Bench) -> None:
    steps = attention.Steps(SEVERAL, Mix((20, 90, 1)), bench.pool)
    first, second = (inputs[7] for inputs in steps.inputs)
    owned = [{int(page) for row, count in zip(table, steps.needed, strict=True) for page in row[:count]}
             for table in (first, second)]  # fmt: skip
    assert [len(pages) for pages in owned] == [3 + 12 + 1] * 2 and not owned[0] & owned[1]


def test_the_best_loses_least_over_all_mixes() -> None:
    """Not the fastest at the longest mix, though that takes most of the time."""
    problem = PROBLEMS[4]
    count = len(mixes_of(problem))
    short = Timed(problem, DecodeTiles(32, 3, 1), (10.0,) * (count - 1) + (300.0,))
    long = Timed(problem, DecodeTiles(64, 3, 1), (20.0,) * (count - 1) + (200.0,))
    good = Timed(problem, DecodeTiles(128, 3, 1), (10.5,) * (count - 1) + (210.0,))
    assert best([long, short, good]) is good and best([long, short]) is short
    heavy = Timed(problem, DecodeTiles(16, 3, 1), (10.0,) + (13.0,) * (count - 1))
    light = Timed(problem, DecodeTiles(16, 5, 1), (13.0,) + (10.0,) + (13.0,) * (count - 2))
    assert [mix.weight for mix in mixes_of(problem)][:2] == [2, 2] and best([heavy, light]) is heavy


def test_mixes_are_no_larger_than_steps() -> None:
    assert {len(mix.contexts) for mix in mixes_of(replace(SEVERAL, tokens=3))} == {3}
    assert all(len(mix.contexts) <= size for size, mixes in attention.MIXES.items() for mix in mixes)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_candidates_are_tiles_that_run(problem: DecodeProblem) -> None:
    found = candidates(problem, H200)
    assert found[0] == known_tiles(problem)[0] and len(set(found)) == len(found) > 5
    for tiles in [*found, *more_candidates(problem, found[0])]:
        choice = Choice(kernel=DECODE_ATTENTION, problem=problem.fields(), tiles=vars(tiles), source="measured")
        check_tiles([choice])
        assert DecodeProblem.of(choice) == problem
        (launch,) = make_schedule(H200, problem, tiles)[0].launches
        chunk = launch.constants["SPLITS"].chunk
        assert (chunk, launch.stages, launch.warps) == (tiles.keys, tiles.stages, tiles.warps)


def test_known_tiles_are_by_steps_and_heads() -> None:
    problem = PROBLEMS[4]
    measured = DECODE_TILES[32][256]
    assert known_tiles(problem) == (measured, "table")
    assert known_tiles(replace(problem, tokens=20))[0] == measured, "steps of 17 to 32 tokens are one class"
    assert known_tiles(replace(problem, tokens=33))[0] == DECODE_TILES[64][256]
    assert known_tiles(replace(problem, tokens=MOST_DECODED))[0] == DECODE_TILES[max(DECODE_TILES)][256]
    wide, source = known_tiles(replace(problem, dim=256))
    assert source == "heuristic" and wide.keys * 512 == measured.keys * 256, "tiles of as many bytes"
    assert known_tiles(replace(problem, dim=14))[0] == DECODE_TILES[32][128]
    assert known_tiles(replace(problem, append=False))[1] == "heuristic"
