"""Benchmarks of kernels: figures, matmuls, experts and small kernels, and the call that measures all."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import BENCHMARKS
from child_script import script_of
from drawn import drawn
from kernel_benchmarks import MACHINE, Script, interpreted

from ingot.backends.triton.tune import experts as tune_experts
from ingot.backends.triton.tune.device import Launcher, Pool
from ingot.ir.errors import OptionError

pytestmark = pytest.mark.one_in_file(3)


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
