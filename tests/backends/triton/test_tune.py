"""The search for tile sizes: what is tried, what is taken, and what it does with tiles that do not work."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ingot.backends.triton.emit import Triton
from ingot.backends.triton.lower.linear.choice import known_tiles
from ingot.backends.triton.lower.linear.problem import LINEAR, LinearProblem
from ingot.backends.triton.lower.linear.tiles import MatvecTiles, Tiles
from ingot.backends.triton.lower.shared_memory import shared_memory
from ingot.backends.triton.tiles import check_tiles
from ingot.backends.triton.tune import search
from ingot.backends.triton.tune.device import Machine
from ingot.backends.triton.tune.linear import TimedLinear, make_schedule
from ingot.backends.triton.tune.linear_candidates import AnyTiles, candidates, more_candidates
from ingot.ir.artifact.tuning import Choice
from ingot.ir.errors import BackendError
from ingot.ir.machine import device_clock
from ingot.ir.machine.target import Target

H200 = Machine(sm=90, cores=132)
SM_90 = Target.named("sm_90")
PROBLEMS = [
    LinearProblem(6144, 4096, 1, "bf16", "bf16", norm=True),
    LinearProblem(14336, 4096, 1, "bf16", "bf16", gated=True, norm=True),
    LinearProblem(14336, 4096, 16, "f16", "f16", gated=True, norm=True),
    LinearProblem(1024, 3072, 64, "bf16", "bf16", residual=True),
    LinearProblem(151936, 1024, 32, "f32", "f32", norm=True),
    LinearProblem(37, 101, 16, "bf16", "f32"),
]
PROBLEM = PROBLEMS[3]


def choice_of(problem: LinearProblem, tiles: AnyTiles) -> Choice:
    return Choice(kernel=LINEAR, problem=problem.fields(), tiles=asdict(tiles), source="heuristic")


def first_choice(problem: LinearProblem) -> Choice:
    return choice_of(problem, known_tiles(problem.product(), problem.tokens, 90)[0])


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("machine", [H200, Machine(sm=89, cores=128, dependent=False)], ids=str)
def test_candidates_are_tiles_that_fit(problem: LinearProblem, machine: Machine) -> None:
    found = candidates(problem, machine)
    assert found[0] == known_tiles(problem.product(), problem.tokens, machine.sm)[0]
    assert len(set(found)) == len(found)
    for tiles in [*found, *more_candidates(problem, found[0])]:
        check_tiles([choice_of(problem, tiles)])
        assert isinstance(tiles, problem.tiles_kind)
        schedule, _ = make_schedule(machine, problem, tiles)
        constants = schedule.launches[-1].constants
        assert (constants["BLOCK_N"], constants["BLOCK_K"]) == (tiles.block_n, tiles.block_k), "they are what runs"
        if isinstance(tiles, Tiles):
            rows = tiles.block_n * (2 if problem.gated else 1) + problem.tokens
            size = {"f32": 4}.get(problem.dtype, 2)
            assert tiles.stages * rows * tiles.block_k * size <= shared_memory(machine.sm)


def test_large_products_have_something_to_try() -> None:
    assert all(len(candidates(problem, H200)) > 5 for problem in PROBLEMS[:4])


@dataclass
class FakeBench:
    """In place of a GPU: the time is that of a formula; some tiles do not run."""

    broken: tuple[int, ...] = ()
    timed: list[AnyTiles] = field(default_factory=list)

    def measure(self, machine: Machine, problem: LinearProblem, tiles: AnyTiles) -> TimedLinear:
        assert machine == H200 and problem == PROBLEM
        assert isinstance(tiles, Tiles)
        self.timed.append(tiles)
        if tiles.block_n in self.broken:
            raise RuntimeError("the result is wrong by 0.5")
        return TimedLinear(
            problem, tiles, float(tiles.block_n + tiles.stages - tiles.lines / 100 + abs(tiles.warps - 8)), 0.5
        )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBench]:
    bench = FakeBench()
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(search, "_bench", lambda kernel: bench)
        monkeypatch.setattr(search, "_compilers", lambda: pool)
        monkeypatch.setattr(search, "SUBJECTS", {LINEAR: replace(search.SUBJECTS[LINEAR], compile_all=lambda *_: None)})
        yield bench


def test_the_fastest_is_taken(bench: FakeBench) -> None:
    found = search.measure(first_choice(PROBLEM), SM_90, seconds=60.0)
    tried = candidates(PROBLEM, H200)
    least = min(tiles.block_n for tiles in tried if isinstance(tiles, Tiles))
    # The candidates have four warps, and at most 16 lines ahead: more of both are variants of the best.
    assert found.tiles["block_n"] == least and (found.tiles["warps"], found.tiles["lines"]) == (8, 16)
    assert set(tried) <= set(bench.timed) and bench.timed[0] == tried[0]
    assert found.source == "measured" and found.key == first_choice(PROBLEM).key
    assert found.microseconds == pytest.approx(least + found.tiles["stages"] - 0.16)


def test_tiles_that_do_not_work_are_left_out(bench: FakeBench) -> None:
    known = first_choice(PROBLEM).tiles["block_n"]
    tried = sorted({tiles.block_n for tiles in candidates(PROBLEM, H200) if isinstance(tiles, Tiles)} - {known})
    bench.broken = (tried[0],)
    assert search.measure(first_choice(PROBLEM), SM_90, seconds=60.0).tiles["block_n"] == min(known, tried[1])


def test_without_time_the_known_ones_are_timed(bench: FakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100000, 100))
    monkeypatch.setattr(search.time, "monotonic", lambda: float(next(clock)))
    found = search.measure(first_choice(PROBLEM), SM_90, seconds=1.0)
    assert len(bench.timed) <= 3, "the known ones, and what was compiled when each of the two rounds began"
    assert found.source == "measured" and found.microseconds is not None


def test_what_else_is_compiled_takes_no_time_of_the_candidates(
    bench: FakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, prepared = [0.0], []

    def prepare(machine: Machine, problem: LinearProblem) -> None:
        assert not bench.timed, "kernels are compiled before a graph with them is captured"
        prepared.append((machine, problem))
        now[0] += 100.0

    monkeypatch.setattr(search.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(search, "SUBJECTS", {LINEAR: replace(search.SUBJECTS[LINEAR], prepare=prepare)})
    search.measure(first_choice(PROBLEM), SM_90, seconds=60.0)
    assert prepared == [(H200, PROBLEM)] and set(candidates(PROBLEM, H200)) <= set(bench.timed)


def test_the_sources_of_the_search_are_named() -> None:
    """They are not among those of compiled code, so that a change of the search compiles no kernel again."""
    folder = Path(search.__file__).parent
    named = {path.name for path in Triton().tuning_sources() if path.parent == folder}
    assert named == {path.name for path in folder.iterdir() if path.suffix == ".py"} >= {"search.py", "device.py"}
    assert Path(device_clock.__file__) in Triton().tuning_sources()
    assert not {*Triton().tuning_sources()} & {*Triton().sources()}


def test_what_does_not_even_run_as_known_is_an_error(bench: FakeBench) -> None:
    bench.broken = (first_choice(PROBLEM).tiles["block_n"],)
    with pytest.raises(BackendError, match=r"linear\(columns=1024, .* could not be timed: RuntimeError"):
        search.measure(first_choice(PROBLEM), SM_90, seconds=60.0)


def test_a_matvec_has_its_own_tiles() -> None:
    assert {type(tiles) for tiles in candidates(PROBLEMS[0], H200)} == {MatvecTiles}
    assert {type(tiles) for tiles in candidates(PROBLEMS[2], H200)} == {Tiles}


def test_every_problem_is_read_back() -> None:
    for problem in PROBLEMS:
        read = Choice.model_validate_json(first_choice(problem).model_dump_json())
        assert LinearProblem.of(read) == problem
        tiles: Any = LinearProblem.of(read).tiles_kind
        assert tiles(**read.tiles) == known_tiles(problem.product(), problem.tokens, 90)[0]
