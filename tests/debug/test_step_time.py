"""Predicted times: the arithmetic against cases worked out by hand, and an artifact's step against its own parts."""

import ast
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resign import edit_json
from sm_90 import kernels_artifact, unplug

import ingot.backends.triton.lower
import ingot.debug.step_time.device
from ingot import compile_model
from ingot.cli.main import DONE, INGOT, run
from ingot.debug.explain import explain
from ingot.debug.explained import StepShape
from ingot.debug.requested_step import RequestedStep, StepLimits, serving, step_sizes
from ingot.debug.step_time.clock import StepClock
from ingot.debug.step_time.device import Device, device_of
from ingot.debug.step_time.inputs import step_inputs
from ingot.debug.step_time.launches import Shape
from ingot.debug.step_time.measurement import InstructionTime, StepMeasurement, StepTrace
from ingot.debug.step_time.predict import device_seconds, launched_seconds
from ingot.debug.step_time.programs import Launched
from ingot.debug.step_time.served import computed_size
from ingot.debug.step_time.timed import time_step
from ingot.debug.step_time.work import Work, works
from ingot.ir.artifact.plan import BucketClass, BucketPlan, Plan
from ingot.ir.artifact.tuning import Choice
from ingot.ir.errors import ArtifactError, TargetError
from ingot.ir.machine.gpu_times import H200_TIMES, GpuTimes, HostTime, KernelTime
from ingot.ir.machine.gpus import TYPICAL, Gpu, matmul_rate
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops.registry import Cost
from ingot.ir.parse import parse_programs
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.loader import load_artifact
from ingot.runtime.steps.step import StepLayout, StepSizes

US = 1e-6
# 1 TB/s, and the rate of an H200, which has as many multiprocessors.
SMALL = Gpu("small", 90, 10**9, 132, 10**12)
TIMES = GpuTimes(
    gpu=replace(SMALL, bandwidth=2 * 10**12),
    kernels={
        "moving": KernelTime(2 * US, 0.5),
        "computing": KernelTime(1 * US, 1.0, 0.25),
        "helping": KernelTime(3 * US),
        "logged": KernelTime(3 * US, beyond=0.5 * US),
        "in waves": KernelTime(1 * US, 1.0, 1.0, wave=2 * US),
        "streaming": KernelTime(1 * US, 1.0, 1.0, stream=10**9),
        "decode_attention": KernelTime(5 * US, 1.0),
    },
    other=KernelTime(10 * US, 1.0, 1.0),
    between=7 * US,
    host=HostTime(call=2 * US, kernel=1 * US, library=4 * US, view=0.5 * US, step=20 * US),
)
DEVICE = Device(SMALL, 10**12, TIMES)
PROBLEM: dict[str, bool | int | str] = {"kv_heads": 8, "group": 4, "dim": 64, "page": 16, "tokens": 1}


def no_gpu() -> Gpu:
    raise TargetError("this machine has no GPU that can be used")


def work(*kernels: str | Launched, moved: int = 0, flops: int = 0, kind: str = "rest", **more: object) -> Work:
    facts = {"name": "n", "what": "a call", "dtype": "bf16", "backend": "triton", "compiled": True}
    facts |= more
    cost = Cost(flops, moved)
    launches = tuple(Launched(one) if isinstance(one, str) else one for one in kernels)
    return Work(kind=kind, least=cost, done=cost, launches=launches, **facts)  # type: ignore[arg-type]


def choice(source: str, microseconds: float | None, kernel: str = "linear", **tiles: int) -> Choice:
    problem = PROBLEM if kernel == "decode_attention" else {"columns": 8}
    return Choice(kernel=kernel, problem=problem, tiles=tiles, source=source, microseconds=microseconds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "microseconds"),
    [
        (work("moving", moved=10**6), 2 + 2),  # 1 MB at half of 1 TB/s
        (work("helping", "moving", moved=10**6), 3 + 2 + 2),  # the first launch carries nothing
        (work("moving", "helping", moved=10**6), 2 + 2 + 3),
        (work("computing", "moving", moved=10**6), 1 + 2 + 2),  # the slower one carries it
        (work("computing", moved=10**6, flops=989 * 10**6), 1 + 4),  # 1 us of flops at a quarter of the rate
        (work("computing", moved=10**7, flops=989 * 10**6), 1 + 10),  # the bytes take longer
        (work("computing", flops=67 * 10**6, dtype="f32"), 1 + 4),
        (work(Launched("in waves", 3), moved=10**6), 1 + 3 * 2 + 1),
        (work(Launched("in waves", 1, 4.0), moved=10**6, flops=989 * 10**6), 1 + 2 + 4),  # on a quarter of the device
        (work(Launched("in waves", 1, 4.0), moved=10**7, flops=989 * 10**6), 1 + 2 + 10),
        (work("streaming", moved=1320 * 10**3), 1 + 10),  # 10 KB of each multiprocessor
        (work(Launched("streaming", 1, 2.0), moved=1320 * 10**3), 1 + 20),
        (work("somebody's", moved=10**6), 10 + 1),
        (work(), 0),
        (work("moving", moved=10**9, choice=choice("measured", 12.5)), 12.5),
        (work("moving", moved=10**9, choice=choice("given", 12.5)), 12.5),
        (work("moving", moved=10**9, choice=choice("table", 12.5)), 25),  # of a device that is twice as fast
        (work("logged", "moving", moved=10**9, choice=choice("measured", 12.5)), 12.5 + 0.5),
        (work("logged", "moving", moved=10**9, choice=choice("table", 12.5)), 25 + 0.5),
        (work("moving", moved=10**6, choice=choice("heuristic", None)), 4),
        # Of attention the log has a time too, of other contexts than these.
        (work("decode_attention", moved=10**6, choice=choice("measured", 99.0, "decode_attention", keys=32)), 5 + 1),
    ],
)
def test_a_call_takes_its_launches_and_what_they_carry(one: Work, microseconds: float) -> None:
    assert device_seconds(one, DEVICE) == pytest.approx(microseconds * US)


def test_every_kernel_of_the_triton_backend_has_constants() -> None:
    launched = set()
    for path in Path(ingot.backends.triton.lower.__path__[0]).rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        imported = {name.asname: name.name for one in nodes if isinstance(one, ast.ImportFrom) for name in one.names}
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "launch":
                name = ast.unparse(node.args[0]).rpartition(".")[2]
                launched.add(imported.get(name, name))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "_one_input":  # launches its third argument
                launched.add(ast.unparse(node.args[2]))
    assert {"linear_tile", "norm", "draw"} < launched
    # These are predicted with the constants of an average kernel: they were not measured yet.
    unmeasured = {"prepare_rows", "quant_tile", "quant_matvec", "dequantize", "scale_by_position"}
    unmeasured |= {"choose", "index_scores", "sparse_attention"}
    unmeasured |= {"route", "sparse_mixer", "group_choices", "list_blocks", "add_choices"}
    unmeasured |= {name for name in launched if name.startswith(("lora_", "experts_", "quant_experts_"))}
    launched.remove("kernel")  # the parameter of `_one_input`
    assert {"experts_up_tile", "sparse_mixer"} < unmeasured & launched
    assert launched - unmeasured <= set(H200_TIMES.kernels)


def test_a_step_waits_for_the_slower_of_host_and_device() -> None:
    # Launched at 21, 22, 23 and run from then on; the second and third wait for the first.
    assert launched_seconds([1, 1, 1], [5, 5, 5], 20) == 21 + 15
    # The device is always done before the next is there; a view takes the host alone.
    assert launched_seconds([10, 10, 10], [1, 0, 1], 0) == 31
    assert launched_seconds([10, 10, 10], [1, 1, 0], 0) == 30
    assert launched_seconds([1, 1, 1], [50, 0, 2], 0) == 53


def test_totals_and_gaps_of_a_step_by_hand() -> None:
    calls = [
        work("moving", moved=10**7, kind="products", what="product", choice=choice("heuristic", None)),
        work("moving", moved=10**7, kind="products", what="product", choice=choice("heuristic", None)),
        work(),
        work("moving", moved=10**6, kind="norms", what="norm"),
    ]
    times, step = time_step(calls, DEVICE, captured=True)
    assert [time.predicted / US for time in times] == pytest.approx([22, 22, 0, 4])
    assert (step.roofline / US, step.predicted / US, step.measured) == pytest.approx((21, 48 + 7, None))
    found = {one.kind: (one.calls, one.roofline / US, one.predicted / US) for one in step.kinds}
    assert found == {
        "products": pytest.approx((2, 20, 44)),
        "norms": pytest.approx((1, 1, 4)),
        "gaps": pytest.approx((0, 0, 7)),
    }
    product, between, norm = step.gaps
    assert (product.what, product.calls, product.seconds / US) == ("product", 2, pytest.approx(24))
    assert "reaches 45% of bandwidth: 12.0 µs a call" in product.closing and "--tune" in product.closing
    assert between.seconds / US == pytest.approx(7) and norm.seconds / US == pytest.approx(3)

    _, launched = time_step(calls, DEVICE, captured=False)
    # Views and kernels: 20 until the first, 3 a call of one kernel, half a microsecond for the view.
    assert launched.predicted / US == pytest.approx(max(20 + 3, 0) + 22 + 22 + 4)
    assert not launched.captured and launched.gaps[1].what == "between calls"
    assert "launches 3 calls one by one" in launched.gaps[1].closing


def test_a_gap_of_many_programs() -> None:
    calls = [work(Launched("in waves", 40), moved=10**6, what="look"), work("moving", moved=10**7, what="move")]
    _, step = time_step(calls, DEVICE, captured=True)
    gaps = {gap.what: gap.closing for gap in step.gaps}
    assert "its programs run in 40 waves" in gaps["look"] and "waves" not in gaps["move"]


@pytest.mark.parametrize(
    ("source", "microseconds", "said"),
    [
        ("heuristic", None, "never timed: --tune"),
        ("table", 20.0, "come from a table"),
        ("measured", 20.0, "were timed, so only a smaller weight helps"),
        ("given", 20.0, "were timed, so only a smaller weight helps"),
        ("given", None, "were given, and not timed"),
    ],
)
def test_who_chose_the_tiles_says_what_to_try(source: str, microseconds: float | None, said: str) -> None:
    product = work("moving", moved=10**7, kind="products", what="product", choice=choice(source, microseconds))
    _, step = time_step([product], replace(DEVICE, times=replace(TIMES, gpu=SMALL)), captured=True)
    gap = next(one for one in step.gaps if one.what == "product")
    assert said in gap.closing and "2.0 µs of it for launching" in gap.closing


def test_measurements_come_before_predictions() -> None:
    calls = [work("moving", moved=10**7, kind="products", what="product"), work()]
    taken = StepMeasurement(30 * US, (InstructionTime(15 * US, 1 * US), InstructionTime(3 * US, 1 * US)))
    times, step = time_step(calls, DEVICE, captured=True, taken=taken)
    assert [time.measured for time in times] == [15 * US, 0], "a view runs nowhere, whatever was timed"
    assert step.measured == 30 * US and step.predicted == pytest.approx(29 * US)
    products, gaps = step.kinds
    assert products.measured == 15 * US and gaps.measured == pytest.approx(15 * US)
    assert [(gap.what, round(gap.seconds / US, 3)) for gap in step.gaps] == [("between calls", 15), ("product", 5)]
    assert all(one.traced is None for one in (step, *times, *step.kinds, *step.gaps))

    # A trace stands beside what was measured and replaces nothing.
    seen = replace(taken, trace=StepTrace((16 * US, 0.0), 32 * US))
    times, traced = time_step(calls, DEVICE, captured=True, taken=seen)
    assert [time.traced for time in times] == [16 * US, 0] and traced.traced == 32 * US
    assert [replace(gap, traced=None) for gap in traced.gaps] == list(step.gaps)
    assert [gap.traced / US for gap in traced.gaps if gap.traced is not None] == pytest.approx([16, 6])
    # Where a call was not found nothing is said of its kind.
    _, partly = time_step(calls, DEVICE, captured=True, taken=replace(taken, trace=StepTrace((None, 0.0), None)))
    assert all(one.traced is None for one in (*partly.kinds, *partly.gaps))


def test_rates_scale_by_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingot.debug.step_time.device, "find_gpu", no_gpu)
    assert matmul_rate(TYPICAL["sm_90"], "bf16") == 989e12
    assert matmul_rate(replace(TYPICAL["sm_90"], cores=66), "f16") == pytest.approx(989e12 / 2)
    assert matmul_rate(replace(TYPICAL["sm_100"], sm=103), "i8") == matmul_rate(TYPICAL["sm_100"], "f32")
    for target in TYPICAL:
        device = device_of(target)
        assert device is not None and device.times is H200_TIMES
        assert ("scaled" in device.basis) == (target != "sm_90")
    assert device_of("cpu") is None
    # What the driver says of this machine's GPU comes first, unless it is the very product.
    other = replace(TYPICAL["sm_90"], product="NVIDIA H100", bandwidth=3_350 * 10**9)
    for here, found in ((other, other), (replace(TYPICAL["sm_90"], bandwidth=1), TYPICAL["sm_90"])):
        monkeypatch.setattr(ingot.debug.step_time.device, "find_gpu", lambda here=here: here)
        device = device_of("sm_90")
        assert device is not None and device.gpu == found


def test_classes_that_hold_equal_tokens() -> None:
    """Steps of one token each have a class of their own, in front of the one that prompts share its sizes with."""
    wide, prompts = BucketClass(name="wide", tokens=(65, 512), q_max=1), BucketClass(name="prompts", tokens=(65, 2048))
    limits = StepLimits(max_seq_len=4096, max_batch=512, page_size=16, max_tokens=2048)
    for asked, expected in (
        (RequestedStep(128), {wide: StepShape(128, 128, 1024), prompts: StepShape(128, 1, 1024)}),
        (RequestedStep(128, sequences=128), {wide: StepShape(128, 128, 1024)}),
        (RequestedStep(128, sequences=2, context=64), {prompts: StepShape(128, 2, 64)}),
        (RequestedStep(), {wide: StepShape(512, 512, 1024), prompts: StepShape(512, 1, 1024)}),
    ):
        found = {one: asked.step(one, limits) for one in (wide, prompts) if asked.in_class(one)}
        assert {one: step for one, step in found.items() if serving(step, (wide, prompts)) == one} == expected


def test_prompts_are_filled_up_where_the_host_launches_them_too() -> None:
    """By what the executor fills them up to: few sizes of tokens, and 64 rows of logits."""
    plan = Plan.model_construct(dims={"T": (1, 4096), "B": (1, 200)})

    def computed(step: StepShape, **bucket: Any) -> StepSizes:
        return computed_size(plan, BucketPlan.model_construct(bucket=BucketClass(name="b", **bucket)), step)

    assert computed(StepShape(3000, 2, 4000), tokens=(65, 4096)) == StepSizes(3072, 64, 64, 1)
    assert computed(StepShape(300, 150, 4000), tokens=(65, 4096)) == StepSizes(384, 200, 200, 1)
    assert computed(StepShape(40, 3, 4000), tokens=(17, 64)) == StepSizes(40, 3, 3, 1), (
        "kernels for few tokens need no padding"
    )
    assert computed(StepShape(70, 70, 4000), tokens=(65, 512), q_max=1) == StepSizes(70, 70, 70, 1)


@pytest.mark.xdist_group("parity-llama-plain")
def test_a_step_is_as_it_is_asked_for(artifact: Callable[..., Path]) -> None:
    """Each of two sequences computes what it computes alone, on pages of its own."""
    loaded = load_artifact(artifact("llama-plain", backend="reference"), num_pages=8)
    limits = loaded.limits

    def logits(step: StepShape) -> torch.Tensor:
        handle = loaded.executor.launch(step_inputs(step, limits.page_size, limits.vocab_size, StepLayout.usual()))
        return handle.outputs["logits"].clone()

    both, first = logits(StepShape(40, 2, 20)), logits(StepShape(20, 1, 20))
    assert both.shape[0] == 2 and not torch.allclose(both[1:], first, atol=0.01)
    assert compare(both[:1], first, torch.float32) is None


# An artifact for sm_90, which the tests of targets compile too.
kernels = pytest.mark.xdist_group("sm-90-kernels")


@pytest.fixture
def for_gpu(artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ingot.debug.step_time.device, "find_gpu", no_gpu)
    return kernels_artifact(artifact, monkeypatch)


@kernels
def test_every_call_of_an_artifact_has_its_time(for_gpu: Path) -> None:
    (bucket,) = explain(for_gpu, RequestedStep(tokens=2, context=40)).buckets
    assert bucket.bucket == "decode-16" and (bucket.step.sequences, bucket.step.context) == (2, 40)
    step = bucket.time
    assert step is not None and step.captured and step.measured is None and step.device == "NVIDIA H200"
    calls = [call for call in bucket.calls if not call.region]
    assert all(call.time is None for call in bucket.calls if call.region)
    # A call is a view and takes nothing, or takes at least what the device's numbers allow.
    for call in calls:
        assert call.time is not None
        assert (call.time.predicted == 0) == (call.op.startswith("aten.") and call.flops == 0)
        assert call.time.roofline == max(call.bytes / 4.8e12, call.flops / 989e12) <= call.time.predicted
    kinds = {one.kind: one for one in step.kinds}
    assert list(kinds) == ["products", "attention", "sampling", "rest", "gaps"]
    assert kinds["products"].calls == 4 * 3 + 1 and kinds["attention"].calls == 3  # of three layers, and the head
    assert sum(one.predicted for one in step.kinds) == pytest.approx(step.predicted)
    # By the constants: a product that no table knows is a norm and a product that moves its weight.
    clock = StepClock.of(open_artifact(for_gpu), measure=False)
    assert clock is not None
    at = next(place for place, call in enumerate(calls) if call.time is not None and call.time.kind == "products")
    launches = clock.kernels[str(clock.stages[0].plans["main"].buckets[1].instructions[at].calls)]
    names = [launch.entry for launch in launches]
    assert len(names) == 2 and names[1] == "linear_tile"
    tile, product = H200_TIMES.of("linear_tile"), calls[at]
    begun = sum(H200_TIMES.of(name).latency + H200_TIMES.of(name).wave for name in names)
    carried = max(product.bytes / (tile.bandwidth * 4.8e12), product.flops / 989e12 / tile.rate)
    assert product.time is not None and product.time.predicted == pytest.approx(begun + carried, rel=1e-6)


@pytest.mark.slow  # it compiles for a GPU
@kernels
def test_stages_are_predicted_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[[str], Path]
) -> None:
    unplug(monkeypatch)
    monkeypatch.setattr(ingot.debug.step_time.device, "find_gpu", no_gpu)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    limits: dict[str, Any] = {"target": "sm_90", "dtype": "bfloat16", "max_batch": 2, "max_tokens": 2}
    compile_model(checkpoint("llama-plain"), tmp_path / "two.ingot", mesh={"pp": 2}, **limits)
    (bucket,) = explain(tmp_path / "two.ingot", RequestedStep(tokens=2, context=40)).buckets
    assert bucket.time is not None and bucket.mesh is None
    runs = [call.time for call in bucket.calls if call.time is not None]
    assert len(runs) == sum(not call.region for call in bucket.calls), "calls of both stages"
    between = next(one for one in bucket.time.kinds if one.kind == "gaps")
    assert bucket.time.predicted == pytest.approx(sum(one.predicted for one in runs) + between.predicted)


@kernels
def test_rows_of_padding_are_computed_and_have_no_cache(for_gpu: Path) -> None:
    artifact = open_artifact(for_gpu)
    clock = StepClock.of(artifact, measure=False)
    assert clock is not None
    program = list(parse_programs(artifact.read_text("program.ir")))[1]
    plan = clock.stages[0].plans["main"].buckets[1]
    one, two = (step_sizes(StepShape(rows, rows, 40), program, clock.page_size) for rows in (1, 2))
    found = works(program, [plan], Shape(one, two, 40, SMALL), {}, clock.kernels)
    shapes = (Shape(sizes, sizes, 40, SMALL) for sizes in (one, two))
    smaller, larger = (works(program, [plan], shape, {}, clock.kernels) for shape in shapes)
    assert [work.least for work in found] == [work.least for work in smaller]
    for work, small, large in zip(found, smaller, larger, strict=True):
        assert work.done == (small.done if work.kind == "attention" else large.done)
    assert any(small.done != large.done for small, large in zip(smaller, larger, strict=True))


@kernels
def test_the_command_says_it_in_tables_and_as_json(for_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(INGOT, ["explain", str(for_gpu), "--step", "T=2,context=40", "--sort", "time"]) == DONE
    text = capsys.readouterr().out
    assert "\nkind " in text and "\nproducts " in text and "\ngaps " in text and "\nstep " in text
    assert "replayed from a captured graph" in text and "NVIDIA H200: 4.8 TB/s, 989 Tflop/s" in text
    heads = [line.split() for line in text.splitlines() if line.startswith(("call ", "kind "))]
    assert "what would close it" in text and all("predicted" in head and "measured" not in head for head in heads)

    assert run(INGOT, ["explain", str(for_gpu), "--step", "T=2,context=40", "--json"]) == DONE
    (bucket,) = json.loads(capsys.readouterr().out)["buckets"]
    time = bucket["time"]
    assert set(time) == {
        *("device", "bandwidth", "rate", "basis", "captured", "roofline", "predicted", "measured", "traced"),
        *("kinds", "gaps"),
    }
    assert set(time["kinds"][0]) == {"kind", "calls", "roofline", "predicted", "measured", "traced"}
    assert set(time["gaps"][0]) == {"what", "calls", "seconds", "closing", "traced"}
    assert set(bucket["calls"][0]["time"]) == {"kind", "bound", "roofline", "predicted", "measured", "traced"}


@kernels
def test_measuring_needs_the_gpu(for_gpu: Path) -> None:
    with pytest.raises(TargetError, match="the artifact was compiled for a GPU, sm_90"):
        explain(for_gpu, RequestedStep(tokens=1), measure=True)


@kernels
def test_files_that_do_not_belong_together(for_gpu: Path, tmp_path: Path) -> None:
    def main(file: Any) -> Any:
        return file["positions"]["all"]["plans"]["main"]

    def shortened(file: Any) -> None:
        main(file)["buckets"][0]["instructions"].pop()

    for name, edit, message in (
        ("short", shortened, "the plan has .* instructions"),
        ("without", lambda file: main(file)["buckets"].pop(), "there is no plan for decode-16"),
    ):
        copy = Path(shutil.copytree(for_gpu, tmp_path / name))
        edit_json(copy, "plan.json", edit)
        with pytest.raises(ArtifactError, match=message):
            explain(copy)
