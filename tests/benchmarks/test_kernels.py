"""Benchmarks of kernels: what they reckon, that what they time is what they say, and that wrong results become no
figures. On a CPU, by Triton's interpreter and a clock of our own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import peer_flashinfer
import pytest
import torch
from benchmark_scripts import BENCHMARKS
from child_script import script_of
from drawn import drawn
from triton_interpreter import eight_bits_converted, language_patched_once

from ingot.backends.flashinfer.packages import Missing
from ingot.backends.triton.tune import attention as tune_attention
from ingot.backends.triton.tune import device
from ingot.backends.triton.tune import experts as tune_experts
from ingot.backends.triton.tune.device import Launcher, Machine, Pool
from ingot.ir.errors import OptionError
from ingot.ir.machine.target import Target
from ingot.ir.ops import paged_attention

FOLDERS = (BENCHMARKS, BENCHMARKS / "kernels")
MACHINE = Machine(sm=90, cores=4, dependent=False)  # the interpreter knows no dependent launch
SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
Script = Callable[[str], Any]


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    """Imports a script by its bare name, as they import one another."""
    with pytest.MonkeyPatch.context() as patch, language_patched_once():
        for folder in FOLDERS:
            patch.syspath_prepend(folder)
        yield importlib.import_module
    for folder in FOLDERS:
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)


class Replayed:
    """In place of a CUDA graph: calls that run when they are recorded, and again at each replay."""

    def __init__(self, launches: Iterable[Callable[[], object]]) -> None:
        self.launches = list(launches)
        self.replay()

    def replay(self) -> None:
        for launch in self.launches:
            launch()


@pytest.fixture
def on_cpu(script: Script, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Imports a script that runs over a small pool, by a clock that says a millisecond for every graph."""
    monkeypatch.setattr(device, "DEVICE", "cpu")
    monkeypatch.setattr(device, "POOL", 1 << 18)
    monkeypatch.setattr(device, "median_seconds", lambda work, rounds: 1e-3)
    monkeypatch.setattr(tune_attention, "LAUNCHES", (2, 2))
    monkeypatch.setattr(tune_experts, "MOST_CALLS", 2)
    monkeypatch.setattr(script("device_times"), "_seconds", lambda graph: 1e-3)
    monkeypatch.setattr(script("linear"), "TRAFFIC", 1 << 10)

    def imported(name: str) -> ModuleType:
        module = script(name)
        monkeypatch.setattr(module, "captured", Replayed)
        return module

    return imported


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth too much in the first row of each result."""
    right = Launcher.__call__

    def call(self: Launcher, inputs: Any) -> None:
        right(self, inputs)
        self.output[:1] = (self.output[:1] * 1.1).to(self.output.dtype)

    monkeypatch.setattr(Launcher, "__call__", call)


def test_a_share_is_of_what_bounds_the_call(script: Script) -> None:
    figures = script("kernel_figures")
    peak = figures.Peak(copy=1e12, rate=1e14)
    read, reckoned = figures.Call("a", "A", 10**6, 10**7), figures.Call("b", "B", 10**6, 10**9)
    assert read.least(peak) == (1e-6, "of_copy") and reckoned.least(peak) == (1e-5, "of_rate")
    assert reckoned.least(replace(peak, rate=None)) == (1e-6, "of_copy")
    times = {"triton": [4e-6, 2e-6, 9e-6], "flashinfer": [5e-6, 6e-6, 1e-6]}
    found = figures.call_figures("part", read, times, peak, ours="triton", peer="flashinfer")
    values = {name: figure.value for name, figure in found.items()}
    assert values == {
        "part.a.bytes": 1e6,
        "part.a.flop": 1e7,
        "part.a.triton": 4e-6,
        "part.a.triton.of_copy": 0.25,
        "part.a.flashinfer": 5e-6,
        "part.a.flashinfer.of_copy": pytest.approx(0.2),
        "part.a.faster": pytest.approx(1.25),
    }
    assert found["part.a.faster"].values == (1.25, 3.0, 0.1111)
    assert "part.a.faster" not in figures.call_figures("part", read, times, peak, ours="fa3", peer="flashinfer")


def test_what_was_not_measured_is_missing(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = script("kernel_figures")
    monkeypatch.setenv("INGOT_REVISION", "0" * 40)
    now = 0.0
    monkeypatch.setattr(figures.time, "monotonic", lambda: now)

    def measure(seconds: float, error: str = "") -> dict[str, list[float]]:
        nonlocal now
        now += seconds
        if error:
            raise RuntimeError(error)
        return {"triton": [seconds]}

    work = [
        (figures.Call("a", "A", 8), lambda: measure(3)),
        (figures.Call("b", "B", 8), lambda: measure(3, "the result is wrong by 0.5")),
        (figures.Call("c", "C", 8), lambda: measure(3)),
        (figures.Call("d", "D", 8), lambda: measure(3)),
    ]
    found, missing = figures.measure_figures("part", work, figures.Peak(1.0), 8.0)
    assert {name for name in found if name.endswith(".triton")} == {"part.a.triton", "part.c.triton"}
    assert missing == {"part.b": "the result is wrong by 0.5", "part.d": "no time was left for it"}
    asked = figures.kernel_parser("", 8.0).parse_args(["--shape", "1b", "--json", str(tmp_path / "found.json")])
    figures.finish(str(BENCHMARKS / "kernels" / "step.py"), asked, found, missing)
    result = script("results").read_result(tmp_path / "found.json")
    assert result.figures == found and result.missing == missing and result.settings == {"shape": "1b"}
    assert "part.d was not measured: no time was left for it" in capsys.readouterr().out


@interpreted
def test_decode_attention(on_cpu: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and FlashInfer's compute the attention of the steps."""
    attention, contexts = on_cpu("attention"), (20, 1)
    problem = attention.problem_of(SMALL, len(contexts))
    assert (problem.kv_heads, problem.group, problem.dim, problem.tokens, problem.append) == (2, 2, 16, 16, True)
    assert attention.cached_bytes(problem, contexts) == (20 + 1) * 2 * 2 * 16 * 2  # keys and values in bfloat16
    problem = replace(problem, dtype="f32")  # the interpreter's products of bfloat16 are wrong
    peer_flashinfer.install(monkeypatch)
    times = attention.measure(MACHINE, problem, contexts, Pool(), peer=True)
    assert times == {"triton": [1e-3 / 2] * 11, "flashinfer": [1e-3 / 2] * 11}
    narrow = replace(problem, cache_dtype="f8e4m3")
    assert attention.cached_bytes(narrow, contexts) == (20 + 1) * 2 * 2 * 16
    with eight_bits_converted():
        assert attention.measure(MACHINE, narrow, contexts, Pool(), peer=False) == {"triton": [1e-3 / 2] * 11}


@interpreted
def test_wrong_attention_is_no_figure(on_cpu: Script, wrong: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither ours nor FlashInfer's, which computes nothing here."""
    attention, pool = on_cpu("attention"), Pool()
    problem = replace(attention.problem_of(SMALL, 1), dtype="f32")
    with pytest.raises(RuntimeError, match="the result is wrong by"):
        attention.measure(MACHINE, problem, (40,), pool, peer=False)
    peer_flashinfer.install(monkeypatch)
    monkeypatch.setattr(peer_flashinfer.Wrapper, "run", lambda self, q, kv, out: out)
    with pytest.raises(RuntimeError, match="wrong by nan"):
        attention.flashinfers(attention.Steps(replace(problem, append=False), attention.Mix((40,)), pool))


def test_what_attention_over_latents_has_to_do(script: Script) -> None:
    """576 numbers of a row are read once for all heads, and 512 of them are values."""
    latents = script("latents")
    for (groups, group), itemsize, cache_dtype in (((1, 16), 2, "auto"), ((4, 32), 1, "f8e4m3")):
        problem = latents.problem_of((groups, group), 3, cache_dtype)
        call = latents.attention_call(problem, "3 x 100", (100,) * 3)
        assert call.bytes == 300 * 576 * itemsize
        assert call.flop == 300 * groups * group * 2 * (576 + 512)
    assert [latents.class_of(tokens) for tokens in (1, 2, 17, 64, 65)] == [
        (1, 1),
        (2, 16),
        (17, 32),
        (33, 64),
        (65, 8192),
    ]
    assert len({case.call.name for case in latents.cases()}) == len(list(latents.cases())) == 24


@interpreted
def test_attention_over_latents(on_cpu: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    latents = on_cpu("latents")
    for name, size in (("LATENT", 16), ("ROTATED", 8)):
        monkeypatch.setattr(latents, name, size)
    problem = replace(latents.problem_of((2, 2), 2, "auto"), dtype="f32")
    assert latents.measure_attention(MACHINE, problem, (20, 1), Pool()) == {"triton": [1e-3 / 2] * 11}


def test_what_a_sparse_step_has_to_do(script: Script) -> None:
    """The indexer reads every key of 128 numbers, and attention 2048 rows of 576 for each token."""
    latents = script("latents")
    (choose, _, step), *attentions = latents.sparse_steps()
    read = 32 * 16384 * 128 * 2
    least = step.call(choose, "x")
    assert read < least.bytes < 1.01 * read and least.flop == 2 * 32 * 16384 * 64 * 128
    for (op, _, step), heads in zip(attentions, (16, 128), strict=True):
        call = step.call(op, "x")
        rows = 32 * 2048 * 576 * 2
        assert call.bytes == rows + 32 * (heads * (576 + 512) * 2 + 2048 * 4)
        assert call.flop == 32 * 2048 * heads * 2 * (576 + 512)


@interpreted
@pytest.mark.parametrize("op", ["paged_choose_positions", "sparse_attention"])
def test_sparse_steps(on_cpu: Script, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts above and below what is chosen."""
    sparse = on_cpu("sparse_decode")
    step = sparse.SparseStep((41, 9), 3, 20, 2, 8, 16, 8, dtype="f32", bucket=(2, 16))
    assert sparse.measure(MACHINE, step, op) == {"triton": [1e-3 / 4] * 11}


@interpreted
@pytest.mark.parametrize("op", ["paged_choose_positions", "sparse_attention"])
def test_wrong_sparse_steps_are_no_figure(on_cpu: Script, wrong: None, op: str) -> None:
    sparse = on_cpu("sparse_decode")
    step = sparse.SparseStep((41,), 3, 20, 2, 8, 16, 8, dtype="f32", bucket=(2, 16))
    with pytest.raises(RuntimeError, match="the result is wrong by"):
        sparse.measure(MACHINE, step, op)


@interpreted
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("tokens", [1, 70])
def test_matmuls_of_heads(on_cpu: Script, tokens: int, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    latents = on_cpu("latents")
    monkeypatch.setattr(latents, "TRAFFIC", 1 << 10)
    case = latents.Case(2, 24, 40, tokens, turned, "f32")
    assert latents.measure_matmul(MACHINE, case) == dict.fromkeys(("triton", "cublas"), [1e-3 / 4] * 11)


@pytest.mark.parametrize(("fed", "before"), drawn(1, [(70, 0), (40, 30)]))
def test_what_latent_attention_of_prompts_has_to_do(script: Script, fed: int, before: int) -> None:
    """Against counting every pair."""
    case = script("latent_prompts").Case("x", 3, fed, before, 24, 10, 6, 12)
    pairs = sum(key <= before + query for query in range(fed) for key in range(before + fed))
    assert case.call.flop == 2 * 3 * (pairs * (10 + 6 + 12) + fed * 24 * (10 + 12))
    assert case.call.bytes == 2 * ((fed + before) * 30 + fed * 3 * (10 + 6 + 12))


@interpreted
@pytest.mark.parametrize(("fed", "before"), [(70, 0), (40, 30)])
def test_latent_attention_of_prompts(on_cpu: Script, fed: int, before: int) -> None:
    """Both forms, without and with tokens before the step."""
    prompts = on_cpu("latent_prompts")
    case = prompts.Case("x", 3, fed, before, 24, 10, 6, 12, torch.float32)
    assert prompts.measure(MACHINE, case) == dict.fromkeys(("latents", "expanded"), [1e-3 / 4] * 11)


@interpreted
def test_wrong_kernels_of_latents_are_no_figure(on_cpu: Script, wrong: None, monkeypatch: pytest.MonkeyPatch) -> None:
    latents = on_cpu("latents")
    monkeypatch.setattr(latents, "TRAFFIC", 1 << 10)
    problem = replace(latents.problem_of((1, 2), 1, "auto"), dtype="f32")
    with pytest.raises(RuntimeError, match="the result is wrong by"):
        latents.measure_attention(MACHINE, problem, (40,), Pool())
    with pytest.raises(RuntimeError, match="the result is wrong by"):
        latents.measure_matmul(MACHINE, latents.Case(2, 24, 40, 3, True, "f32"))


@pytest.mark.parametrize("shape", ["1b", "8b", "qwen3-0.6b"])
def test_products_are_those_of_the_checkpoint(script: Script, shape: str) -> None:
    linear, checkpoints = script("linear"), script("random_checkpoint")
    config = checkpoints.SHAPES[shape]
    layer = {name: sizes for name, sizes in checkpoints.layer_shapes(config).items() if len(sizes) == 2}
    elements = sum(rows * depth for rows, depth in layer.values())
    cases = list(linear.cases(linear.Decoder.of(shape)))
    for tokens in (1, 8, 32, 64, 512, 2048):
        own = {case.part: case.call for case in cases if case.tokens == tokens}
        assert own.keys() - {"head"} == {"qkv", "o", "gate_up", "down"} and ("head" in own) == (tokens <= 64)
        head = config["vocab_size"] * config["hidden_size"] if "head" in own else 0
        assert sum(call.bytes for call in own.values()) == 2 * (elements + head)
        assert sum(call.flop for call in own.values()) == 2 * tokens * (elements + head)
    assert len({case.call.name for case in cases}) == len(cases)


def small_product(linear: Any, tokens: int, part: str) -> Any:
    """In float32."""
    decoder = linear.Decoder("small", 1, 32, 48, 32, 40, 64)
    case = next(case for case in linear.cases(decoder) if (case.tokens, case.part) == (tokens, part))
    problem = case.problem and replace(case.problem, dtype="f32", result="f32")
    return replace(case, bare=replace(case.bare, dtype="f32", result="f32"), problem=problem)


@interpreted
@pytest.mark.parametrize(("tokens", "part"), [(1, "gate_up"), (8, "down"), (512, "qkv")])
def test_products(on_cpu: Script, tokens: int, part: str) -> None:
    linear = on_cpu("linear")
    times = linear.measure(MACHINE, linear.LinearBench(Pool()), small_product(linear, tokens, part))
    assert times == dict.fromkeys(["triton", "cublas"] if tokens <= 64 else ["cublas"], [1e-3 / 4] * 11)


@interpreted
def test_wrong_products_are_no_figure(on_cpu: Script, wrong: None) -> None:
    linear = on_cpu("linear")
    with pytest.raises(RuntimeError, match="the result is wrong by"):
        linear.measure(MACHINE, linear.LinearBench(Pool()), small_product(linear, 1, "o"))


@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"])
def test_experts_are_those_that_a_step_needs(on_cpu: Script, shape: str) -> None:
    experts = on_cpu("experts")
    found = list(experts.cases(shape, [1, 8, 32, 128, 512, 4096], ["same", "uniform", "random"]))
    assert len({case.call.name for case in found}) == len(found) == 16
    mixture = experts.MODELS[shape]
    each = 3 * mixture.hidden * mixture.ffn + mixture.biases * (2 * mixture.ffn + mixture.hidden)
    for case in found:
        rows = case.tokens * (4 * mixture.hidden + 8 * mixture.top_k)  # x and the result, weights and indices
        different, left = divmod(case.call.bytes - rows, 2 * each)
        most = min(mixture.experts, case.tokens * mixture.top_k)
        least = {"same": mixture.top_k, "uniform": most, "random": most // 2}[case.routing]
        assert left == 0 and least <= different <= (mixture.top_k if case.routing == "same" else most), case.what
        assert case.call.flop == case.tokens * mixture.top_k * 3 * 2 * mixture.hidden * mixture.ffn


def small_experts(experts: Any, tokens: int, routing: str, block: int | None = None, format: str = "plain") -> Any:
    """In float32."""
    mixture = experts.Mixture(32, 32, 8, 2, dtype="f32", biases=True, activation="clamped", formats=(format, format))
    return experts.Case("small", mixture, tokens, routing, block)


@interpreted
@pytest.mark.parametrize(
    ("tokens", "routing", "block"),
    drawn(1, [(1, "same", None), (8, "random", None), (8, "random", 1), (65, "uniform", None)]),
)
def test_experts(on_cpu: Script, tokens: int, routing: str, block: int | None) -> None:
    experts = on_cpu("experts")
    bench = experts.Bench(MACHINE, sweep=False)
    assert bench.measure(small_experts(experts, tokens, routing, block)) == {"triton": [1e-3 / 2] * 11}


@interpreted
def test_experts_in_a_format(on_cpu: Script) -> None:
    experts = on_cpu("experts")
    case = small_experts(experts, 3, "random", 16, "mxfp4")
    assert case.what == "small, mxfp4, 3 tokens, random, blocks of 16"
    assert experts.Bench(MACHINE, sweep=False).measure(case) == {"triton": [1e-3 / 2] * 11}
    plain, stored = (next(experts.cases("gpt-oss-20b", [1], ["same"], format=one)) for one in ("plain", "mxfp4"))
    assert 3.7 < plain.call.bytes / stored.call.bytes < 3.77  # 16 bits, and 4 + 8 / 32; biases stay floats
    with pytest.raises(OptionError, match="format 'int4_g128' does not fit gpt-oss-20b: rows of 2880"):
        next(experts.cases("gpt-oss-20b", [1], ["same"], format="int4_g128"))


@interpreted
def test_tile_sizes_of_experts_are_tried(on_cpu: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both products of the step, and no others of its class; sizes that do not run are left out."""
    experts = on_cpu("experts")
    monkeypatch.setattr(experts, "candidates", lambda *asked: tune_experts.candidates(*asked)[:2])
    for block in (None, 1):
        case = small_experts(experts, 2, "same", block)
        found = experts.Bench(MACHINE, sweep=True).best_tiles(case)
        assert [(problem.gated, problem.block) for problem in found] == [(True, block or 16), (False, block or 16)]


@interpreted
def test_wrong_experts_are_no_figure(on_cpu: Script, wrong: None) -> None:
    experts = on_cpu("experts")
    with pytest.raises(RuntimeError, match="the result is wrong by"):
        experts.Bench(MACHINE, sweep=False).measure(small_experts(experts, 1, "same"))


STEPS = (((300, 0), (1, 40), (20, 30)), ((7, 9),))


@pytest.mark.parametrize("sequences", STEPS)
def test_what_attention_of_prompts_has_to_do(script: Script, sequences: tuple[tuple[int, int], ...]) -> None:
    """Against counting every pair."""
    prefill = script("prefill")
    call = prefill.Case("x", prefill.Heads(4, 2, 16), sequences).call
    pairs = sum(
        key <= before + query for fed, before in sequences for query in range(fed) for key in range(before + fed)
    )
    assert call.flop == pairs * 4 * (16 + 16) * 2  # a product and a sum for each element of a key, and of a value
    read = sum(fed * 4 * 16 * 2 + (before + fed) * 2 * 2 * 16 for fed, before in sequences)
    assert call.bytes == read * 2


@pytest.mark.parametrize("sequences", STEPS)
def test_attention_of_prompts(
    on_cpu: Script, sequences: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer's wrapper computes the attention of the steps, and so does what stands in for our kernel."""
    prefill = on_cpu("prefill")
    peer_flashinfer.install(monkeypatch)
    case = prefill.Case("x", prefill.Heads(4, 2, 16), sequences, scattered=len(sequences) > 1)
    kept: dict[torch.Tensor, torch.Tensor] = {}

    def run(q: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
        result = kept.setdefault(q, torch.empty_like(q))  # where a graph's memory is
        return [result.copy_(paged_attention.reference(q, *rest, scale=16**-0.5))]

    times = prefill.measure(case, {"triton": run}, True, 1)
    assert times == {"triton": [1e-3 / 2] * 11, "flashinfer": [1e-3 / 2] * 11}
    with pytest.raises(RuntimeError, match="the result is wrong by"):
        prefill.measure(case, {"triton": lambda *inputs: [run(*inputs)[0].mul_(1.1)]}, True, 1)


def test_results_that_are_not_compared_are_computed(on_cpu: Script) -> None:
    """Of a long chunk the first tokens are not compared; to leave them out is found all the same."""
    prefill = on_cpu("prefill")
    case, kept = prefill.Case("x", prefill.Heads(2, 1, 16), ((prefill.CHECKED + 40, 0),)), {}

    def run(q: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
        result = kept.setdefault(q, torch.zeros_like(q))
        result[40:] = paged_attention.reference(q, *rest, scale=16**-0.5)[40:]
        return [result]

    with pytest.raises(RuntimeError, match="a part of the result was not computed"):
        prefill.measure(case, {"triton": run}, False, 1)


def test_a_kernel_that_is_refused_is_missing(script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builds, target = script("prefill_builds"), Target.named("sm_80")
    monkeypatch.setattr(builds.Target, "detect", lambda device: target)
    monkeypatch.setattr("ingot.backends.flashinfer.emit.find_packages", lambda: Missing("nvcc was not found"))
    monkeypatch.setattr(builds, "contenders", lambda sm: ("fa2",))
    for _ in range(2):  # the second one finds what the first one left
        builds.emit(builds.Heads(32, 8, 128), "fa2", tmp_path / "fa2")
    assert builds.load_all(80, tmp_path) == ({}, {"fa2": "nvcc was not found"})


def small_cases(step: Any) -> dict[str, Any]:
    sizes = step.Sizes(vocab=90, hidden=32, ffn=48, heads=2, head_dim=16)
    return {case.name: case for case in step.cases(sizes, 3, "cpu")}


MEASURED = (
    "feed, decode",
    "advance",
    "embedding",
    "count_tokens, nothing asked",
    "sample, greedy",
    "sample, greedy, penalized",
)


@interpreted
@pytest.mark.parametrize("name", MEASURED)
def test_small_kernels(on_cpu: Script, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = on_cpu("step")
    monkeypatch.setattr(step, "CALLS", (3, 2))
    times = step.measure(small_cases(step)[f"{name}, 3 rows"], MACHINE, cache=1 << 20)
    assert times == {"triton": [1e-3 / 3] * 11}


@interpreted
def test_wrong_small_kernels_are_no_figure(on_cpu: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed while it was timed does not count: a result and a state are computed once more."""
    step = on_cpu("step")
    monkeypatch.setattr(step, "CALLS", (2, 1))
    check_once = step.check_once

    def without_launches(*given: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Launcher, "__call__", lambda self, inputs: None)
            check_once(*given)

    monkeypatch.setattr(step, "check_once", without_launches)
    for name in ("embedding", "sample, greedy", "advance"):
        with pytest.raises(RuntimeError, match="the result is wrong"):
            step.measure(small_cases(step)[f"{name}, 3 rows"], MACHINE, cache=1)


def test_every_small_kernel_has_a_name_and_bytes(script: Script) -> None:
    step = script("step")
    found = small_cases(step)
    assert len({step.slug(name) for name in found}) == len(found) > 20
    row = 3 * 90 * 4  # bytes of all logits
    for what, asked in (("sample, greedy", row), ("sample, greedy, penalized", 3 * row), ("soft_cap, logits", 2 * row)):
        case = found[f"{what}, 3 rows"]
        assert 0 <= step.bytes_of(case, case.draw()) - asked < 600  # of what the rows ask for, and their tokens


@pytest.mark.gpu
def test_kernels_of_a_gpu_take_what_they_can(script: Script) -> None:
    """Nothing is wrong, and nothing is read faster than memory can be: a copy comes to nine tenths of its bandwidth."""
    attention, linear, step, times = (script(name) for name in ("attention", "linear", "step", "device_times"))
    figures, config = script("kernel_figures"), script("random_checkpoint").SHAPES["1b"]
    machine, pool, contexts = times.this_machine(), Pool(), (16384,) * 8
    peak = figures.Peak(script("copy_bandwidth").copy_bandwidth("cuda"), times.product_rate())
    assert 2e11 < peak.copy < 1e13 and 1e13 < peak.rate < 3e15
    problem = attention.problem_of(config, len(contexts))
    call = figures.Call("a", "A", attention.cached_bytes(problem, contexts))
    found = figures.call_figures("part", call, attention.measure(machine, problem, contexts, pool, False), peak)
    bench, decoder = linear.LinearBench(pool), linear.Decoder.of("1b")
    for case in linear.cases(decoder):
        if (case.tokens, case.part) in ((1, "down"), (8, "head"), (2048, "gate_up")):
            found |= figures.call_figures("part", case.call, linear.measure(machine, bench, case), peak)
    shares = [figure.value for name, figure in found.items() if ".of_" in name]
    assert len(shares) == 6 and all(0.1 < share < 1.12 for share in shares)
    for name, case in {case.name: case for case in step.cases(step.Sizes.of(config), 32, "cuda")}.items():
        if case.op in ("embedding", "count_tokens", "add_rms_norm"):
            assert all(1e-7 < took < 1e-3 for took in step.measure(case, machine, 1 << 26)["triton"]), name


def test_one_call_measures_all(script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With parts of our own: one works, one says what it missed, one fails; the last one's kernels do not compile."""
    kernels, results = script("gpu_kernels"), script("results")
    monkeypatch.setenv("INGOT_REVISION", "0" * 40)
    machine = {"processor": "p", "features": [], "cores": 1, "memory": 1, "system": "s", "load": 0.0}
    answer = {
        "name": "answer",
        "script": "answer.py",
        "revision": "r",
        "date": "2026-01-01",
        "machine": machine,
        "settings": {},
    }
    answer |= {"versions": {"triton": "1"}, "figures": {"linear.copy": {"value": 1.0, "unit": "B/s", "what": "a copy"}}}
    missed = {**answer, "figures": {}, "missing": {"step.feed": "no time was left for it"}}
    for name, value in (("linear", answer), ("step", missed)):
        script_of(tmp_path, f"json.dump({value!r}, open(sys.argv[-1], 'w'))").rename(tmp_path / f"{name}.py")
    (tmp_path / "attention.py").write_text("raise RuntimeError('out of memory')")
    (tmp_path / "prefill.py").write_text("import sys\nassert '--build' not in sys.argv, 'no nvcc'")
    monkeypatch.setattr(kernels, "KERNELS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_kernels.py", "--shape", "qwen3-0.6b", "--out", str(tmp_path / "out")])
    kernels.main()
    found = results.read_result(tmp_path / "out" / "kernels_qwen3_0_6b.json")
    assert found.figures.keys() == {"linear.copy"} and found.versions["triton"] == "1"
    assert found.missing.keys() == {"step.feed", "attention", "prefill"}
    assert "out of memory" in found.missing["attention"] and "no nvcc" in found.missing["prefill"]
    for skip in ("nothing", ",".join(kernels.PARTS)):
        monkeypatch.setattr(sys, "argv", ["gpu_kernels.py", "--shape", "1b", "--out", "x", "--skip", skip])
        with pytest.raises(SystemExit, match="choose from linear"):
            kernels.main()


def test_parts_have_the_options_that_they_are_asked_with(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of those that the call for all gives them, none is unknown."""
    for part in script("gpu_kernels").PARTS:
        asked = ["--shape", "1b", "--seconds", "3", "--json", "answer.json"]
        asked += ["--work", "folder", "--build"] if part == "prefill" else []
        monkeypatch.setattr(sys, "argv", [f"{part}.py", *asked, "--nothing"])
        with pytest.raises(SystemExit):
            script(part).main()
        assert capsys.readouterr().err.endswith("unrecognized arguments: --nothing\n")
