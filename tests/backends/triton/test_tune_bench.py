"""What is timed computes the product: the launches, their inputs and the check of results, by Triton's interpreter."""

from collections.abc import Callable, Iterable

import pytest
import torch
from drawn import drawn

from ingot.backends.triton.lower.linear.problem import LinearProblem
from ingot.backends.triton.lower.linear.tiles import MatvecTiles, Tiles
from ingot.backends.triton.tune import device, linear
from ingot.backends.triton.tune.device import Launcher, Machine, Pool
from ingot.backends.triton.tune.linear import LinearBench
from ingot.backends.triton.tune.linear_candidates import AnyTiles

MACHINE = Machine(sm=90, cores=4, dependent=False)  # the interpreter knows no dependent launch
MATVEC, TILE, SPLIT = MatvecTiles(4, 64, 4), Tiles(16, 32, 1, 4, 2), Tiles(16, 32, 2, 4, 2)
CASES = [
    (LinearProblem(300, 96, 1, "f32", "f32", norm=True), MATVEC),
    (LinearProblem(40, 96, 1, "f32", "f32", gated=True), MATVEC),
    (LinearProblem(40, 96, 1, "f32", "f32", residual=True), MATVEC),
    (LinearProblem(300, 96, 16, "f32", "f32", gated=True, norm=True), TILE),
    (LinearProblem(40, 96, 32, "f32", "f32", residual=True), SPLIT),
]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> LinearBench:
    """A bench on the CPU, with a small pool, whose clock says a millisecond for whatever runs."""

    def seconds(work: Callable[[], object], rounds: int = 7) -> float:
        work()
        return 1e-3

    def graph_seconds(launches: Iterable[Callable[[], None]]) -> float:
        return seconds(lambda: [launch() for launch in launches])

    monkeypatch.setattr(device, "DEVICE", "cpu")
    monkeypatch.setattr(device, "POOL", 1 << 18)
    monkeypatch.setattr(linear, "MOST_LAUNCHES", 4)
    monkeypatch.setattr(device, "median_seconds", seconds)
    monkeypatch.setattr(device, "graph_seconds", graph_seconds)
    return LinearBench(Pool())


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize(("problem", "tiles"), drawn(2, CASES), ids=str)
def test_what_runs_is_the_product(bench: LinearBench, problem: LinearProblem, tiles: AnyTiles) -> None:
    found = bench.measure(MACHINE, problem, tiles)
    assert (found.problem, found.tiles, found.microseconds) == (problem, tiles, pytest.approx(1000 / 4))
    assert bench.pool.copy == pytest.approx((1 << 18) / 1e-3)
    assert found.fraction == pytest.approx(problem.bytes / 250e-6 / bench.pool.copy)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize(("problem", "tiles"), CASES[2:4], ids=str)
def test_wrong_results_are_found(
    bench: LinearBench, problem: LinearProblem, tiles: AnyTiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Launcher.__call__

    def wrong(self: Launcher, inputs: list[torch.Tensor]) -> None:
        right(self, inputs)
        self.output[0, 3] += 20

    monkeypatch.setattr(Launcher, "__call__", wrong)
    with pytest.raises(RuntimeError, match="the result is wrong by"):
        bench.measure(MACHINE, problem, tiles)


def test_weights_go_round_in_the_pool(bench: LinearBench) -> None:
    problem = LinearProblem(100, 96, 16, "f32", "f32")
    places = [bench.weight(problem).data_ptr() for _ in range(20)]
    assert len(set(places)) == (1 << 18) // problem.bytes == 6 and places[:6] == places[6:12]
    large = LinearProblem(1000, 96, 16, "bf16", "bf16")
    assert large.bytes * 2 > 1 << 18
    assert [bench.weight(large).shape for _ in range(3)] == [(1000, 96)] * 3
    assert bench.weight(large).dtype is torch.bfloat16
