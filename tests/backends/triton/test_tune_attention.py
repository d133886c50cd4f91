"""Timing attention of few tokens: what is timed is the attention, by Triton's interpreter; and which sizes are best."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from triton_schedules import some

from ingot.backends.triton.lower.attention.choice import known_tiles
from ingot.backends.triton.lower.attention.decode import schedule_decode
from ingot.backends.triton.lower.attention.problem import DECODE_ATTENTION, MOST_DECODED, DecodeProblem
from ingot.backends.triton.lower.attention.split_limits import split_limits
from ingot.backends.triton.lower.attention.tiles import (
    DECODE_TILES,
    EIGHT_BIT_TILES,
    LATENT_EIGHT_BIT_TILES,
    LATENT_TILES,
    DecodeTiles,
)
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.linear.problem import LinearProblem
from ingot.backends.triton.schedule import Schedule, Value
from ingot.backends.triton.tiles import check_tiles
from ingot.backends.triton.tune import attention, attention_matmuls, device, linear
from ingot.backends.triton.tune.attention import AttentionBench, Mix, TimedAttention, best, make_schedule, mixes_of
from ingot.backends.triton.tune.attention_candidates import candidates, more_candidates
from ingot.backends.triton.tune.attention_matmuls import LEAST, Matmuls, matmuls_of
from ingot.backends.triton.tune.device import Launcher, Machine, Pool
from ingot.backends.triton.tune.linear import LinearBench
from ingot.backends.triton.tune.search import SUBJECTS
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.tuning import Choice
from ingot.ir.types import TensorType

MACHINE = Machine(sm=90, cores=4, dependent=False)  # the interpreter knows no dependent launch
H200 = Machine(sm=90, cores=132)
ONE = DecodeProblem(2, 2, 16, 16, "f32", 1, True)
SEVERAL = DecodeProblem(1, 3, 16, 8, "f32", 16, True)
APART = replace(SEVERAL, append=False)
EIGHT_BITS = replace(SEVERAL, cache_dtype="f8e4m3")
INT8 = replace(SEVERAL, cache_dtype="i8")
PER_TOKEN = replace(SEVERAL, cache_dtype="i8", form="equal_per_token")
TWO_WIDTHS = replace(APART, form="values_20", cache_dtype="f8e4m3")
# Two groups of heads read one head of the cache.
LATENT = DecodeProblem(2, 36, 24, 8, "f32", 16, False, form="latent_16", sharing=2)
DEEPSEEK = DecodeProblem(2, 64, 576, 16, "bf16", 32, False, "f8e4m3", "latent_512", 2)
OTHERS = [EIGHT_BITS, INT8, PER_TOKEN, TWO_WIDTHS, LATENT]
PROBLEMS = [ONE, SEVERAL, APART, *(DecodeProblem(8, 4, dim, 16, "bf16", 32, True) for dim in (64, 128, 256))]
PROBLEMS += [*OTHERS, DEEPSEEK, replace(PROBLEMS[4], cache_dtype="f8e4m3")]
ATTENTION = "decode_attention"  # the kernel
TILES = DecodeTiles(32, 3, 2)
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")


@dataclass
class Clock:
    """In place of a GPU: the time of a graph is the sum over its launches, in milliseconds by kind. Notes the graphs.

    A kind is the name of the first kernel, with a + if it adds a residual stream.
    """

    attention: float = 1.0
    matmul: float = 10.0
    graphs: list[tuple[str, ...]] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)  # of the matmuls of the graphs
    loaded: list[Launcher] = field(default_factory=list)

    def graph_seconds(self, launches: Iterable[Callable[[], object]]) -> float:
        kinds = []
        for launch in launches:
            assert isinstance(launch, partial) and isinstance(launch.func, Launcher)
            assert any(one is launch.func for one in self.loaded), "a kernel is loaded while the graph is captured"
            kinds.append(kind_of(launch.func))
            if kinds[-1] != ATTENTION:
                self.weights.append(launch.args[0][1])
            launch()
        self.graphs.append(tuple(kinds))
        return sum(self.attention if kind == ATTENTION else self.matmul for kind in kinds) * 1e-3


def kind_of(call: Launcher) -> str:
    launch = call.schedule.launches[0]
    return launch.kernel.__name__ + ("+" if launch.arguments.get("residual") is not None else "")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bench(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> AttentionBench:
    """On the CPU, over a small pool and short contexts, by a clock that says a millisecond for attention."""
    right = Launcher.__call__

    def call(self: Launcher, inputs: list[torch.Tensor]) -> None:
        right(self, inputs)
        clock.loaded.append(self)

    monkeypatch.setattr(Launcher, "__call__", call)
    monkeypatch.setattr(device, "DEVICE", "cpu")
    monkeypatch.setattr(device, "POOL", 1 << 18)
    monkeypatch.setattr(device, "median_seconds", lambda work, rounds: 1e-3)
    monkeypatch.setattr(device, "graph_seconds", clock.graph_seconds)
    monkeypatch.setattr(attention, "LAUNCHES", (2, 2))
    monkeypatch.setattr(attention_matmuls, "MOST_LAYERS", 2)
    monkeypatch.setattr(attention, "MIXES", {1: (Mix((70,)), Mix((1,))), 16: (Mix((20, 90, 1)),)})
    return AttentionBench(Pool())


@interpreted
@pytest.mark.parametrize("problem", some(2, [ONE, SEVERAL, APART, *OTHERS]), ids=str)
def test_what_runs_is_the_attention(bench: AttentionBench, problem: DecodeProblem) -> None:
    tiles = DecodeTiles(32, 3, 2, early=int(problem is ONE))
    found = bench.measure(MACHINE, problem, tiles)
    assert found == TimedAttention(problem, tiles, (pytest.approx(1e3),) * len(mixes_of(problem)))


@interpreted
@pytest.mark.parametrize("problem", [ONE, APART], ids=str)
def test_wrong_results_are_found(
    bench: AttentionBench, problem: DecodeProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Launcher.__call__

    def wrong(self: Launcher, inputs: list[torch.Tensor]) -> None:
        right(self, inputs)
        self.output[0] *= 1.1

    monkeypatch.setattr(Launcher, "__call__", wrong)
    with pytest.raises(RuntimeError, match="the result is wrong by"):
        bench.measure(MACHINE, problem, DecodeTiles(32, 3, 2))


@interpreted
@pytest.mark.parametrize(("problem", "kernel"), [(ONE, "linear_matvec"), (SEVERAL, "linear_tile")], ids=str)
def test_attention_is_timed_between_the_matmuls_of_a_step(
    bench: AttentionBench, clock: Clock, problem: DecodeProblem, kernel: str
) -> None:
    """Each layer has other weights. The matmuls alone are timed once for all candidates."""
    for tiles in (TILES, replace(TILES, keys=16)):
        bench.measure(MACHINE, problem, tiles)
    alone, between = (kernel, f"{kernel}+") * 2, (kernel, ATTENTION, f"{kernel}+") * 2
    assert clock.graphs == [alone, *[between] * 2 * len(mixes_of(problem))]
    clock.graphs.clear()
    bench.measure(MACHINE, APART, TILES)
    bench.measure(MACHINE, problem, TILES)
    assert clock.graphs.count(alone) == 0, "all tiles of a problem have one time to subtract"
    matmuls = matmuls_of(problem)
    assert matmuls is not None
    assert [weight.shape for weight in clock.weights[:2]] == [(one.columns, one.depth) for one in matmuls]
    assert len({weight.data_ptr() for weight in clock.weights[:4]}) == 4


@interpreted
@pytest.mark.parametrize("matmul", [10.0, 0.1])
def test_the_time_is_what_attention_adds_to_the_matmuls(bench: AttentionBench, clock: Clock, matmul: float) -> None:
    clock.attention, clock.matmul = 3.0, matmul
    assert bench.measure(MACHINE, SEVERAL, TILES).times == (pytest.approx(3e3),)


@pytest.fixture
def matmuls(monkeypatch: pytest.MonkeyPatch) -> Matmuls:
    """Layers of matmuls that compute nothing, without weights."""
    around = matmuls_of(PROBLEMS[4])
    assert around is not None
    monkeypatch.setattr(linear, "launcher", lambda *_: repr)
    monkeypatch.setattr(LinearBench, "__init__", lambda *_: None)
    monkeypatch.setattr(LinearBench, "inputs", lambda *_: [])
    return Matmuls(H200, around, LinearBench(None), {})  # type: ignore[arg-type]


def test_matmuls_alone_are_timed_for_each_number_of_layers(matmuls: Matmuls, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[int] = []

    def graph_seconds(launches: Iterable[Callable[[], object]]) -> float:
        graphs.append(len(list(launches)))
        return float(graphs[-1])

    monkeypatch.setattr(device, "graph_seconds", graph_seconds)
    for count in (1, 3, 1, 3, 9):
        assert matmuls.added([print] * count) == 1.0, "of three launches, one is attention"
    most = attention_matmuls.MOST_LAYERS
    assert most > 9 and graphs == [2, 3, 6, 9, 3, 9, 18, 27]
    graphs.clear()
    assert matmuls.added([print] * (most + 1)) == 1.0, "it is a mean over the launches that are timed"
    assert graphs == [2 * most, 3 * most]


def test_noise_below_the_matmuls_makes_no_tiles_the_best(matmuls: Matmuls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph with attention may by chance be no slower than one without. Such times are equal, and the first wins."""
    times: Iterator[float] = iter([20.0, 20.1, 20.0, 17.0, 23.0])
    monkeypatch.setattr(device, "graph_seconds", lambda launches: next(times))
    found = [matmuls.added([print]) for _ in range(4)]
    assert found == [pytest.approx(LEAST * 20.0)] * 3 + [3.0]
    problem = replace(PROBLEMS[4], tokens=16)
    monkeypatch.setattr(attention, "MIXES", {16: (Mix((20,)),)})
    timed = [TimedAttention(problem, DecodeTiles(16 << at, 3, 1), (time,)) for at, time in enumerate(found)]
    assert best(timed) is timed[0]


def test_what_is_timed_between_which_matmuls() -> None:
    """Q and k/v heads are columns of the first, and values of all q heads the depth of the second."""
    llama = DecodeProblem(8, 4, 128, 16, "bf16", 1, True)
    after = LinearProblem(4096, 4096, 1, "bf16", "bf16", residual=True)
    assert matmuls_of(llama) == (LinearProblem(6144, 4096, 1, "bf16", "bf16", norm=True), after)
    tokens = {size: matmuls_of(replace(llama, tokens=size)) for size in (3, 16, 20, 64, 65, MOST_DECODED)}
    assert {size: found and found[0].tokens for size, found in tokens.items()} == {
        3: 16, 16: 16, 20: 32, 64: 64, 65: None, MOST_DECODED: None,
    }  # fmt: skip
    assert tokens[64] == (
        LinearProblem(6144, 4096, 64, "bf16", "bf16"), LinearProblem(4096, 4096, 64, "bf16", "bf16", residual=True),
    )  # fmt: skip
    assert matmuls_of(replace(llama, cache_dtype="f8e4m3", form="equal_per_token")) == matmuls_of(llama)
    shared = matmuls_of(replace(llama, sharing=2))
    assert shared is not None and shared[0].columns == (32 + 2 * 4) * 128
    for other in ({"append": False}, {"form": "values_64"}, {"dtype": "f8e4m3"}, {"kv_heads": 64}):
        assert matmuls_of(replace(llama, **other)) is None, other


@interpreted
@pytest.mark.parametrize("problem", [APART, TWO_WIDTHS], ids=str)
def test_other_attention_is_timed_alone(bench: AttentionBench, clock: Clock, problem: DecodeProblem) -> None:
    bench.measure(MACHINE, problem, TILES)
    assert clock.graphs == [(ATTENTION,) * 2]


@interpreted
@pytest.mark.parametrize(("problem", "pools"), [(SEVERAL, 1), (EIGHT_BITS, 2)], ids=str)
def test_memory_is_filled_once_for_each_dtype(
    bench: AttentionBench, problem: DecodeProblem, pools: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in the dtype of q and a cache of another dtype would refill one pool in turns."""
    filled: list[torch.dtype] = []
    fill = Pool._fill

    def noted(self: Pool, part: torch.Tensor) -> None:
        filled.append(part.dtype)
        fill(self, part)

    monkeypatch.setattr(Pool, "_fill", noted)
    for one in (problem, problem, replace(problem, group=2)):
        bench.measure(MACHINE, one, TILES)
    assert len(filled) == len(set(filled)) == pools


@pytest.mark.parametrize(("problem", "kernels"), [
    (ONE, ["linear_matvec", "linear_matvec"]),
    (PROBLEMS[4], ["linear_tile", "linear_tile"]),
    (APART, []),
], ids=str)  # fmt: skip
def test_matmuls_are_compiled_before_they_are_timed(
    problem: DecodeProblem, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for all candidates, and for the step's number of tokens."""
    compiled: list[tuple[str, int]] = []

    def compile_launches(schedule: Schedule, sizes: dict[str, int]) -> None:
        compiled.extend((launch.kernel.__name__, sizes["T"]) for launch in schedule.launches)

    for module in (attention, linear):
        monkeypatch.setattr(module, "compile_launches", compile_launches)
    subject = SUBJECTS[DECODE_ATTENTION]
    subject.prepare(H200, problem)
    assert compiled == [(name, linear.STEPS[problem.tokens]) for name in kernels]
    subject.compile_all(H200, problem, TILES)
    assert [name for name, _ in compiled] == [*kernels, ATTENTION]


def test_steps_own_different_pages(bench: AttentionBench) -> None:
    steps = attention.Steps(SEVERAL, Mix((20, 90, 1)), bench.pool)
    first, second = (inputs[7] for inputs in steps.inputs)
    owned = [{int(page) for row, count in zip(table, steps.needed, strict=True) for page in row[:count]}
             for table in (first, second)]  # fmt: skip
    assert [len(pages) for pages in owned] == [3 + 12 + 1] * 2 and not owned[0] & owned[1]


def test_the_best_loses_least_over_all_mixes() -> None:
    """Not the fastest at the longest mix, though that takes most of the time."""
    problem = PROBLEMS[4]
    count = len(mixes_of(problem))
    short = TimedAttention(problem, DecodeTiles(32, 3, 1), (10.0,) * (count - 1) + (300.0,))
    long = TimedAttention(problem, DecodeTiles(64, 3, 1), (20.0,) * (count - 1) + (200.0,))
    good = TimedAttention(problem, DecodeTiles(128, 3, 1), (10.5,) * (count - 1) + (210.0,))
    assert best([long, short, good]) is good and best([long, short]) is short
    heavy = TimedAttention(problem, DecodeTiles(16, 3, 1), (10.0,) + (13.0,) * (count - 1))
    light = TimedAttention(problem, DecodeTiles(16, 5, 1), (13.0,) + (10.0,) + (13.0,) * (count - 2))
    assert [mix.weight for mix in mixes_of(problem)][:2] == [2, 2] and best([heavy, light]) is heavy


def test_mixes_are_no_larger_than_steps() -> None:
    assert {len(mix.contexts) for mix in mixes_of(replace(SEVERAL, tokens=3))} == {3}
    assert all(len(mix.contexts) <= size for size, mixes in attention.MIXES.items() for mix in mixes)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_candidates_are_tiles_that_run(problem: DecodeProblem) -> None:
    found = candidates(problem, H200)
    assert found[0] == known_tiles(problem, 90)[0] and len(set(found)) == len(found) > 5
    assert len(found) <= 48, "all are to be timed in a few seconds"
    for tiles in [*found, *more_candidates(problem, found[0])]:
        choice = Choice(kernel=DECODE_ATTENTION, problem=problem.fields(), tiles=vars(tiles), source="measured")
        check_tiles([choice])
        assert DecodeProblem.of(choice) == problem
        launch, *_ = make_schedule(H200, problem, tiles)[0].launches
        chunk = launch.constants["SPLITS"].chunk
        assert (chunk, launch.stages, launch.warps) == (tiles.keys, tiles.stages, tiles.warps)


@pytest.mark.parametrize("problem", [one for one in PROBLEMS if one.append], ids=str)
def test_three_stages_are_tried_with_early_loads(problem: DecodeProblem) -> None:
    """They leave the most shared memory of those that load before the previous kernel has ended."""
    tried = {(tiles.keys, tiles.programs) for tiles in candidates(problem, H200) if tiles.stages == 3 and tiles.early}
    assert tried >= {(32, 1), (32, 2), (64, 1), (64, 2), (128, 1)}


def test_known_tiles_are_by_steps_and_heads() -> None:
    problem = PROBLEMS[4]
    measured = DECODE_TILES[32][256]
    assert known_tiles(problem, 90) == (measured, "table")
    assert known_tiles(replace(problem, tokens=20), 90)[0] == measured, "steps of 17 to 32 tokens are one class"
    assert known_tiles(replace(problem, tokens=33), 90)[0] == DECODE_TILES[64][256]
    assert known_tiles(replace(problem, tokens=MOST_DECODED), 90)[0] == DECODE_TILES[max(DECODE_TILES)][256]
    wide, source = known_tiles(replace(problem, dim=256), 90)
    assert source == "heuristic" and wide.keys * 512 == measured.keys * 256, "tiles of as many bytes"
    assert known_tiles(replace(problem, dim=14), 90)[0] == DECODE_TILES[32][128]
    assert known_tiles(replace(problem, append=False), 90)[1] == "heuristic"
    eight_bits = replace(problem, cache_dtype="f8e4m3")
    timed = EIGHT_BIT_TILES[32][128]
    assert known_tiles(eight_bits, 90) == (timed, "table")
    assert known_tiles(replace(eight_bits, cache_dtype="i8"), 90) == (timed, "heuristic")
    for untimed in ({"form": "equal_per_token"}, {"append": False}, {"dtype": "f32"}):
        assert known_tiles(replace(eight_bits, **untimed), 90)[1] == "heuristic"
    assert known_tiles(replace(eight_bits, tokens=16), 90) == (EIGHT_BIT_TILES[16][128], "table")
    assert known_tiles(replace(eight_bits, tokens=64, dim=64), 90) == (DECODE_TILES[64][128], "heuristic")


def test_caches_of_other_dtypes_and_forms_are_other_problems() -> None:
    """Each has tiles of its own, known and tuned."""
    keys = {Choice(kernel=DECODE_ATTENTION, problem=one.fields(), tiles={}, source="table").key for one in PROBLEMS}
    assert len(keys) == len(PROBLEMS)
    assert (EIGHT_BITS.row_bytes, SEVERAL.row_bytes) == (16, 64)
    assert [one.position_bytes for one in (SEVERAL, EIGHT_BITS, TWO_WIDTHS, LATENT)] == [128, 32, 36, 96]
    for changes, why in (
        ({"form": "values_0"}, "form is 'values_0'"),
        ({"form": "latent_17"}, "form is 'latent_17'"),
        ({"form": "values_16"}, "form is 'values_16'"),  # which is "equal"
        ({"form": "wide"}, "form is 'wide'"),
        ({"cache_dtype": "i4"}, "over i4"),
        ({"sharing": 2}, "sharing is 2, which does not divide kv_heads, 1"),
    ):
        choice = Choice(
            kernel=DECODE_ATTENTION, problem=replace(APART, **changes).fields(), tiles={}, source="measured"
        )
        with pytest.raises(ValueError, match=why):
            DecodeProblem.of(choice)


@pytest.mark.parametrize(("heads", "group"), [(1, 128), (1, 34), (2, 40), (1, 37)])
def test_a_call_and_the_problem_that_it_chooses_tiles_by_are_one(heads: int, group: int) -> None:
    """Tuning makes a call of the problem: it must come to the same problem, with the tiles that it is given."""
    q, kv = (
        TensorType(torch.bfloat16, ("T", heads * group, 576)),
        TensorType(torch.float8_e4m3fn, ("pages", 1, 16, heads, 576)),
    )
    lens = {name: TensorType(torch.int32, ("B",)) for name in ("q_starts", "q_lens", "kv_lens")}
    types = {"q": q, "kv": kv, "page_table": TensorType(torch.int32, ("B", "P")), **lens}
    values: dict[str, Value | None] = {name: Value(one, input=at) for at, (name, one) in enumerate(types.items())}
    result = TensorType(torch.bfloat16, ("T", heads * group, 512))
    schedule = Schedule(90, 132, BucketClass(name="few", tokens=(17, 32)))
    schedule_decode(
        Call("paged_attention", values, {"scale": 1.0, "value_width": 512}, (result,)), schedule, append=False
    )
    (choice,) = schedule.choices
    problem = DecodeProblem.of(choice)
    assert (problem.cache_dtype, problem.form) == ("f8e4m3", "latent_512")
    assert problem.cache_heads == heads and problem.kv_heads * problem.group == heads * group
    other, _ = make_schedule(H200, problem, DecodeTiles(16, 3, 2, warps=8, early=0))
    launch, *_ = other.launches
    assert launch.constants["FORM"] == schedule.launches[0].constants["FORM"]
    assert (launch.constants["SPLITS"].chunk, launch.warps) == (16, 8)


def test_known_tiles_of_latents_are_by_heads_and_steps() -> None:
    """Other widths, dtypes and devices, for which nothing was timed, get the largest tiles that fit."""
    problem = replace(DEEPSEEK, cache_dtype="auto")
    assert known_tiles(problem, 90) == (LATENT_TILES[64][2], "table")
    assert known_tiles(replace(problem, group=40), 90) == (LATENT_TILES[64][2], "table")
    assert known_tiles(replace(problem, tokens=2), 90) == (LATENT_TILES[64][2], "table"), "steps of up to two tokens"
    few = replace(problem, kv_heads=1, group=16, sharing=1)
    assert known_tiles(few, 90) == (LATENT_TILES[16][16], "table")
    assert known_tiles(replace(few, group=6), 90) == (LATENT_TILES[16][16], "table")
    assert known_tiles(replace(few, tokens=1), 90) == (LATENT_TILES[16][1], "table")
    assert known_tiles(DEEPSEEK, 90) == (LATENT_EIGHT_BIT_TILES[64][2], "table")
    one = replace(DEEPSEEK, kv_heads=4, group=32, tokens=1, sharing=4)
    assert known_tiles(one, 90)[1] == "heuristic", "32 heads over 8 bits were not timed"
    for other in ({"dtype": "f32"}, {"form": "latent_256"}, {"cache_dtype": "i8"}, {"form": "latent_512_per_token"}):
        assert known_tiles(replace(problem, **other), 90)[1] == "heuristic"
    assert known_tiles(problem, 89)[1] == "heuristic", "99 KB of shared memory do not hold 64 latents twice"


@pytest.mark.parametrize(("cache_dtype", "table"), [("auto", LATENT_TILES), ("f8e4m3", LATENT_EIGHT_BIT_TILES)])
def test_programs_that_share_a_multiprocessor_fit_into_its_memory(
    cache_dtype: str, table: dict[int, dict[int, DecodeTiles]]
) -> None:
    """A multiprocessor of compute capability 9.0 holds those that were timed there. One with less memory may not."""
    most = 101376  # 99 KB: compute capability 8.9 and 12.0
    for heads, by_tokens in table.items():
        problem = replace(DEEPSEEK, kv_heads=128 // heads, group=heads, sharing=128 // heads, cache_dtype=cache_dtype)
        for tokens, tiles in by_tokens.items():
            here = replace(problem, tokens=tokens)
            assert known_tiles(here, 90) == (tiles, "table")
            # Queries, two tiles of latents and the weights of the keys.
            items = 2 * tiles.keys * 576 * (2 if cache_dtype == "auto" else 1)
            needed = tiles.programs * (2 * heads * 576 + items + 2 * heads * tiles.keys)
            for sm in (89, 120):
                found, source = known_tiles(here, sm)
                assert (found, needed <= most) == (tiles, True) if source == "table" else found.programs == 1
    sixteen = replace(DEEPSEEK, kv_heads=1, group=16, sharing=1, cache_dtype="auto")
    assert [known_tiles(replace(sixteen, tokens=tokens), 89)[1] for tokens in (1, 16)] == ["table", "heuristic"]


def test_splits_that_are_known_early_fit_on_the_device() -> None:
    """All programs of the largest step run at once, unless a context has no more splits than it has at least."""
    tiles, cores = DecodeTiles(64, 3, 2), 132

    def base(problem: DecodeProblem) -> int:
        limits = split_limits(problem, tiles, cores)
        least = 2 if 1 < problem.tokens <= 16 else 1
        assert limits.base == least or limits.base * problem.tokens * problem.kv_heads <= tiles.programs * cores
        return limits.base

    problem = DecodeProblem(8, 4, 128, 16, "bf16", 32, True)
    assert [base(replace(problem, kv_heads=heads)) for heads in (8, 4, 2, 1)] == [1, 2, 4, 4]
    assert [base(replace(problem, kv_heads=heads, tokens=16)) for heads in (32, 8, 4, 1)] == [2, 2, 4, 4]
    assert base(replace(problem, tokens=512)) == 1
    # One token: 32 splits, and more only if each still has a multiprocessor of its own.
    assert [base(replace(problem, kv_heads=heads, tokens=1)) for heads in (32, 8, 4, 3, 2, 1)] == [
        8,
        32,
        32,
        32,
        64,
        64,
    ]
    # Another launch merges the splits, so that many of them cost less.
    apart = replace(DEEPSEEK, kv_heads=4, group=32, sharing=4)
    assert split_limits(apart, tiles, cores).apart and not split_limits(problem, tiles, cores).apart
    assert [base(replace(apart, tokens=tokens)) for tokens in (1, 16, 32, 512)] == [64, 4, 2, 1]
    assert base(replace(apart, kv_heads=1, sharing=1, tokens=1)) == 128
    for each in (problem, apart):
        for heads in range(1, 133):
            for tokens in (1, 2, 16, 17, 32, 64, 512):
                base(replace(each, kv_heads=heads, tokens=tokens, sharing=1))
