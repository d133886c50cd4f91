"""--check-numerics: healthy compiles pass, passes that break their promise are named, and nothing is published then."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from sharded import CASES
from staged import BUCKET, LIMITS, pass_context
from tiny import TINY

from ingot import compile_model
from ingot.compile.numerics import NumericsCheck, NumericsReport, sample_requests
from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.trace import Limits, trace
from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import NumericsError
from ingot.ir.ops import Op
from ingot.ir.program import Model, Program, Stage
from ingot.ir.recipe import affine
from ingot.models.architectures import read_spec
from ingot.passes import manager
from ingot.passes.base import Pass, PassContext
from ingot.passes.dce import eliminate_dead_code
from ingot.passes.manager import run_pipeline
from ingot.passes.merge_linears import MergeLinears
from ingot.passes.pipeline import PIPELINE, Phase, edit_pipeline, pipeline_for
from ingot.passes.quantize import Quantize
from ingot.passes.rewrite import Rewriter
from ingot.runtime.loading.artifact import open_artifact

pytestmark = pytest.mark.one_in_file(3)

Read = Callable[[str], torch.Tensor]
Opened = Callable[..., tuple[Model, Read]]
QUANTIZED = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
COMPILE: dict[str, Any] = {"backend": "reference", "max_batch": 4, "max_tokens": 64, "max_seq_len": 96, "jobs": 1}


@pytest.fixture(autouse=True)
def _passes_of_ingot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes of this file stand for Ingot's own: what another package's break is told as that package's."""
    monkeypatch.setattr(manager, "is_ours", lambda one: True)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """The traced model of a tiny checkpoint with fields of its config changed, and what reads its tensors."""

    @cache
    def get(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Model, Read]:
        found = Checkpoint.open(TINY[name].write(tmp_path_factory.mktemp("numerics") / name, **changes))
        spec = replace(read_spec(found.config), dtype=dtype)
        return trace(spec, LIMITS, {name: info.dtype for name, info in found.tensors.items()}), found.read

    return get


def checked(
    model: Model, read: Read, pipeline: tuple[Phase, ...] = PIPELINE, upto: Stage = Stage.FUSED, **context: Any
) -> NumericsReport:
    check = NumericsCheck(model, LIMITS, read)
    check.begin()
    given = pass_context(**{"bucket": None, **context})
    for entry in model.entries:
        run_pipeline(model, given, (BUCKET,), pipeline, entry=entry, upto=upto, on_pass=check.on_pass)
    return check.report()


# --- passes that break their promise ---------------------------------------------------------------------------------


def wrong(called: str, promise: Numerics, edit: Callable[[Program], None]) -> Phase:
    """A phase of one pass that makes `edit`."""

    @dataclass(frozen=True)
    class Wrong(Pass):
        name: ClassVar[str] = called
        numerics: ClassVar[Numerics] = promise

        def run(self, rewriter: Rewriter, context: PassContext) -> None:
            edit(rewriter.program)

    return Phase(Stage.FUSED, (Wrong(),))


def other_eps(program: Program) -> None:
    norm = list(program.calls(ops.add_rms_norm.overload))[2]
    norm.kwargs = {**norm.kwargs, "eps": norm.kwargs["eps"] * 1.01}


def swapped_arguments(program: Program, layer: int = 1) -> None:
    gated = list(program.calls(ops.silu_mul.overload))[layer]
    gated.args = (gated.args[1], gated.args[0])


def late_cast(program: Program) -> None:
    """The logits are scaled in the model's dtype and widened afterwards."""
    (cast,), (scaled,) = program.calls(ops.cast.overload), program.calls(torch.ops.aten.mul.Tensor)
    scaled.args = (cast.args[0], scaled.args[1])
    scaled.meta["type"] = replace(scaled.meta["type"], dtype=torch.bfloat16)
    with program.graph.inserting_after(scaled):
        later = program.graph.node_copy(cast)
    scaled.replace_all_uses_with(later, delete_user_cb=lambda user: user is not later)
    later.args = (scaled,)


def missing_residual(program: Program) -> None:
    norm = list(program.calls(ops.add_rms_norm.overload))[1]
    norm.args = (norm.args[0], norm.args[0], norm.args[2])


BREACHES: Mapping[str, tuple[str, Phase, list[str]]] = {
    "changed eps, declared exact": (
        "llama-plain",
        wrong("other-eps", Numerics.EXACT, other_eps),
        [
            "pass other-eps broke its numerics contract, exact: the meaning changed: max error ",
            "program main; first at %item_13 (layer 1, getitem)",
            "made by add_rms_norm_2",
            "expected: an error of at most ",
        ],
    ),
    "changed eps, declared rounding": (
        "llama-plain",
        wrong("other-eps", Numerics.ROUNDING, other_eps),
        ["other-eps broke its numerics contract, rounding: the meaning changed", "made by add_rms_norm_2"],
    ),
    "swapped arguments": (
        "llama-plain",
        wrong("swap", Numerics.ROUNDING, swapped_arguments),
        ["the meaning changed", "first at %silu_mul_1 (layer 1, ingot.silu_mul)"],
    ),
    "cast behind the scale": (
        "cohere-normed",
        wrong("late-cast", Numerics.EXACT, late_cast),
        ["late-cast broke its numerics contract, exact: declared exact, but values differ", "%mul (aten.mul.Tensor)"],
    ),
    "missing residual": (
        "llama-plain",
        wrong("no-residual", Numerics.ROUNDING, missing_residual),
        ["the meaning changed", "first at %item_11 (layer 1, getitem)", "made by add_rms_norm_1"],
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", BREACHES)
def test_a_broken_contract_is_named(name: str, opened: Opened) -> None:
    checkpoint, phase, said = BREACHES[name]
    model, read = opened(checkpoint, torch.bfloat16 if checkpoint == "cohere-normed" else torch.float32)
    with pytest.raises(NumericsError) as caught:
        checked(model, read, (*PIPELINE[:3], phase))
    assert all(part in str(caught.value) for part in said), str(caught.value)


@dataclass(frozen=True)
class _ExactMerge(MergeLinears):
    """The real pass, which adds up products in another order, with a promise that it cannot keep."""

    numerics: ClassVar[Numerics] = Numerics.EXACT


def test_a_rounding_pass_declared_exact_is_named(opened: Opened) -> None:
    model, read = opened("llama-scaled")
    phases = (*PIPELINE[:2], Phase(Stage.FUSED, (_ExactMerge(),)))
    with pytest.raises(
        NumericsError, match=r"merge-linears broke .*, exact: declared exact, but values differ"
    ) as caught:
        checked(model, read, phases)
    assert "first at %" in caught.value.where and "layer 0" in caught.value.where
    assert caught.value.hint == "--passes default,-merge-linears compiles without it" and caught.value.exit_code == 1
    honest = checked(model, read, PIPELINE[:3]).passes
    assert {one.name: one.error > 0 for one in honest if one.changed}["merge-linears"]


def rounded_linears(program: Program) -> None:
    """Every product of a layer's output is rounded to bf16 and widened again."""
    for node in list(program.calls(ops.linear.overload)):
        users = list(node.users)
        with program.graph.inserting_after(node):
            narrow = program.graph.call_function(ops.cast.overload, (node,), {"dtype": torch.bfloat16})
        with program.graph.inserting_after(narrow):
            wide = program.graph.call_function(ops.cast.overload, (narrow,), {"dtype": torch.float32})
        narrow.meta.update(type=replace(node.meta["type"], dtype=torch.bfloat16), origin=node.meta["origin"])
        wide.meta.update(type=node.meta["type"], origin=node.meta["origin"])
        for user in users:
            user.replace_input_with(node, wide)


def test_rounding_has_a_bound(opened: Opened) -> None:
    """The float64 meaning stays, and the error against it grows too far."""
    phase = wrong("rounded", Numerics.ROUNDING, rounded_linears)
    with pytest.raises(NumericsError, match=r"rounding: the error is [\d.e-]+, before ") as caught:
        checked(*opened("llama-scaled"), (*PIPELINE[:2], phase))
    assert "first at %" in caught.value.where and "layer 0" in caught.value.where


# --- quantization ----------------------------------------------------------------------------------------------------


def test_each_format_keeps_its_contract(opened: Opened) -> None:
    model, read = opened("llama-biased", **QUANTIZED)
    for format in ("int8", "int4_g32_asym"):
        text = f"default,quantize{{format={format},lm_head=true}}"  # the head is tied to the embedding
        report = checked(model, read, edit_pipeline(text))
        lossy = {one.name: one for one in report.passes if one.kl is not None}
        assert list(lossy) == ["quantize"] and 0 < lossy["quantize"].kl < 1
        behind = [one for one in report.passes[3:] if one.changed]
        assert behind and all(one.meaning < 1e-10 for one in behind), "later passes stand on the quantized program"


def scaled_step(program: Program) -> None:
    spec = program.params["layers.1.attention.k.scales"]
    program.params["layers.1.attention.k.scales"] = replace(spec, recipe=affine(spec.recipe, 1.02, 0.0))


def exchanged_weights(program: Program) -> None:
    k, v = (next(iter(program.find(f"layers.1.attention.{name}.qweight").users)) for name in "kv")
    k.args, v.args = (k.args[0], *v.args[1:]), (v.args[0], *k.args[1:])


def changed_norm(program: Program) -> None:
    norm = list(program.calls(ops.rms_norm.overload))[3]
    norm.kwargs = {**norm.kwargs, "eps": 0.1}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (scaled_step, r"(?s)lossy: a value is off by 2\.\d+ steps of .*param layers\.1\.attention\.k\.scales"),
        (exchanged_weights, r"(?s)lossy: besides the rounding of weights, the meaning changed.*first at %.*layer 1"),
        (changed_norm, r"(?s)lossy: besides the rounding of weights, .*first at %rms_norm_3 \(layer 1"),
    ],
)
def test_a_wrong_quantization_is_named(edit: Callable[[Program], None], said: str, opened: Opened) -> None:
    @dataclass(frozen=True)
    class Wrong(Quantize):
        def run(self, rewriter: Rewriter, context: PassContext) -> None:
            super().run(rewriter, context)
            edit(rewriter.program)

    model, read = opened("llama-plain", **QUANTIZED)
    phase = Phase(Stage.QUANTIZED, (Wrong(),))
    with pytest.raises(NumericsError, match=said):
        checked(model, read, (PIPELINE[0], phase), Stage.QUANTIZED)


# --- the model itself ------------------------------------------------------------------------------------------------


def overflowing(read: Read, layer: int) -> Read:
    """The weights with gate and up of one layer so large that their product leaves float16."""

    def changed(name: str) -> torch.Tensor:
        large = f"layers.{layer}.mlp.gate_proj.weight", f"layers.{layer}.mlp.up_proj.weight"
        return read(name) * (300.0 if name.endswith(large) else 1.0)

    return changed


def test_an_overflow_of_the_model_is_no_pass_s_fault(opened: Opened) -> None:
    model, read = opened("llama-plain", torch.float16, num_hidden_layers=4)
    report = checked(model, overflowing(read, 2))
    (overflow,) = report.overflows.values()
    assert (overflow.layer, overflow.op, overflow.dtype) == (2, "ingot.silu_mul", "f16")
    assert overflow.largest > overflow.limit == 65504
    assert str(overflow).startswith("%silu_mul_2 (ingot.silu_mul) in layer 2 overflows f16: values reach ")
    assert not checked(model, read).overflows


# --- entries, meshes, limits -----------------------------------------------------------------------------------------


def test_each_entry_is_checked(opened: Opened) -> None:
    """Here a draft that stops after the first of two layers, over the weights of `main`."""
    model, read = opened("llama-plain", num_hidden_layers=2)
    main = model.entries["main"]
    draft = main.copy()
    draft.name = "draft"
    first, second = (node for node in draft.calls(torch.ops.aten.add.Tensor) if "down" in str(node.args[1].args[1]))
    second.replace_all_uses_with(first)
    eliminate_dead_code(draft)
    both = replace(model, entries={"main": main, "draft": draft}, expected={"main": model.expected["main"]})
    report = checked(both, read)
    names = [one.name for phase in PIPELINE[:3] for one in phase.passes]
    assert [(one.entry, one.name) for one in report.passes] == [
        (entry, name) for entry in both.entries for name in names
    ]
    spoiled = (*PIPELINE[:3], wrong("swap", Numerics.ROUNDING, partial(swapped_arguments, layer=0)))
    with pytest.raises(NumericsError, match="pass swap broke") as caught:
        checked(replace(both, entries={"draft": draft}), read, spoiled)
    assert caught.value.where.startswith("program draft; first at %silu_mul (layer 0")


def test_on_a_mesh(opened: Opened) -> None:
    case = CASES["key-value groups"]
    model, read = opened(case.checkpoint, **case.changes)
    passes = checked(model, read, pipeline_for(case.mesh), mesh=case.mesh).passes
    assert {"shard", "insert-collectives", "insert-paged-kv"} <= {one.name for one in passes if one.changed}


@pytest.mark.parametrize(
    ("op", "said"),
    [
        (ops.all_reduce, r"(?s)rounding: the meaning changed.*first at %add_2 \(layer 1, aten\.add\.Tensor\)"),
        (ops.all_gather, r"(?s)no logits: ranks 0 and 1 return different.*first at %sample "),
    ],
)
def test_a_dropped_collective_is_named(op: Op, said: str, opened: Opened) -> None:
    case = CASES["key-value groups"]
    model, read = opened(case.checkpoint, **case.changes)
    check = NumericsCheck(model, LIMITS, read)

    def on_pass(before: Program, after: Program) -> None:
        if after.history[-1].name == "merge-linears":
            first = list(after.calls(op.overload))[-2 if op is ops.all_reduce else -1]
            first.replace_all_uses_with(first.args[0])
            after.graph.erase_node(first)
        check.on_pass(before, after)

    with pytest.raises(NumericsError, match=said):
        context = pass_context(bucket=None, mesh=case.mesh)
        run_pipeline(model, context, (), pipeline_for(case.mesh), upto=Stage.FUSED, on_pass=on_pass)


def test_the_sample_stays_within_limits() -> None:
    requests = sample_requests(50, Limits(max_seq_len=20, max_batch=2, max_tokens=64))
    assert [len(request) for request in requests] == [20, 17]
    assert all(0 <= token < 50 for request in requests for token in request)
    assert len(sample_requests(50, Limits(8, 1, 1))) == 1


# --- compile_model ---------------------------------------------------------------------------------------------------


def test_the_artifact_keeps_what_was_measured(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    seen: list[str] = []
    report = compile_model(
        checkpoint("llama-biased"),
        tmp_path / "checked.ingot",
        check_numerics=True,
        on_pass=lambda before, after: seen.append(after.history[-1].name),
        **COMPILE,
    )
    plain = compile_model(checkpoint("llama-biased"), tmp_path / "plain.ingot", **COMPILE)
    assert report.request_key == plain.request_key and plain.numerics is None and report.numerics is not None
    assert [one.name for one in report.numerics.passes] == seen, "other hooks see the passes as well"
    artifact = open_artifact(tmp_path / "checked.ingot")
    assert "trace/numerics.json" in {entry.path for entry in artifact.manifest.files}
    kept: Any = artifact.read_json("trace/numerics.json")
    assert kept == json.loads(json.dumps(report.numerics.to_json()))
    contracts = {one.name: one for phase in PIPELINE for one in phase.passes}
    for one in kept["passes"]:
        assert one["numerics"] == contracts[one["name"]].numerics.value
        assert one["allowed"] is None or one["error"] <= one["allowed"]
    assert any(one["changed"] and one["error"] > 0 for one in kept["passes"])


def test_nothing_is_published_on_a_breach(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    def spoil(before: Program, after: Program) -> None:
        if after.history[-1].name == "merge-linears":
            swapped_arguments(after)

    output = tmp_path / "broken.ingot"
    with pytest.raises(NumericsError, match="pass merge-linears broke its numerics contract, rounding") as caught:
        compile_model(checkpoint("llama-biased"), output, check_numerics=True, on_pass=spoil, **COMPILE)
    assert "%silu_mul_1 (layer 1, ingot.silu_mul)" in caught.value.where
    assert list(tmp_path.iterdir()) == []
