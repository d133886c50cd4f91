"""A compile skips fusions that are a risk: in passes, records, report and key; and it computes right."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn_in_one_of
from risky_weights import GATE, RISKY
from staged import BUCKET, LIMITS, pass_context, staged

from ingot import LLM, SamplingParams, compile_model
from ingot.backends.inductor.emit import Inductor
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.compile.compile_report import CompileReport
from ingot.compile.recorded_request import recorded_request
from ingot.compile.request import Request
from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.trace import trace
from ingot.ir.numerics.contracts import logits_of
from ingot.ir.numerics.harness import rank_params
from ingot.ir.program import Program, Stage
from ingot.ir.recipe import Recipe
from ingot.models.architectures import read_spec
from ingot.passes.manager import run_pipeline
from ingot.passes.pipeline import PIPELINE
from ingot.rounding.check import RoundingCheck, check_rounding
from ingot.runtime.loading.artifact import open_artifact

pytestmark = pytest.mark.one_in_file(3)

PASSES = [one for phase in PIPELINE for one in phase.passes]
OPTIONS: dict[str, Any] = {"target": "cpu", "max_batch": 4, "max_tokens": 64, "max_seq_len": 64, "jobs": 1}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [27, 18, 28]]


def checked(folder: Path) -> tuple[Any, RoundingCheck, Checkpoint]:
    found = Checkpoint.open(folder)
    model = trace(read_spec(found.config), LIMITS, {name: info.dtype for name, info in found.tensors.items()})
    return model, check_rounding(model, PASSES, found.read), found


@pytest.mark.parametrize("planted", RISKY)
def test_passes_skip_the_fusion_and_say_why(planted: str, tmp_path: Path) -> None:
    risky = RISKY[planted]
    model, check, _ = checked(risky.write(tmp_path / "risky"))
    fused, _ = staged(model)
    steps, lowered = staged(model, skipped_fusions=check.skipped())
    by_name = {step.record.name: step.record for step in steps if step.record}
    plain = {step.record.name: step.record for step in fused if step.record}
    assert check.risks
    for one in check.risks:
        # A call that no region may hold gets a backend that computes single calls.
        record = by_name["choose-backends" if one.name == "form-regions" else one.name]
        assert any(refusal.reason.endswith(one.reason) for refusal in record.refusals)
        assert "times as much as the contract for rounding allows" in one.reason and one.tensor in one.reason
    merged = sum(one.name == "merge-linears" for one in check.risks)
    assert by_name["merge-linears"].matches == plain["merge-linears"].matches - merged
    inside = _in_regions(lowered.programs["any"])
    for one in check.risks:
        assert one.name != "form-regions" or inside.isdisjoint(one.origins)


class _CompilesCalls(Inductor):
    """A region compiler that also compiles single calls, as that of Triton does."""

    compiles_calls = True


@pytest.mark.parametrize("planted", ["gains before attention", "columns of the head"])
def test_a_compiler_of_calls_keeps_the_risky_ones_out_of_its_regions(planted: str, tmp_path: Path) -> None:
    model, check, _ = checked(RISKY[planted].write(tmp_path / "risky"))
    context = pass_context(bucket=None, backends=(_CompilesCalls(), Reference(), Rowwise()))
    fused = run_pipeline(model, context, (BUCKET,), upto=Stage.LOWERED)
    context = replace(context, skipped_fusions=check.skipped())
    lowered = run_pipeline(model, context, (BUCKET,), upto=Stage.LOWERED)
    risky = {origin for one in check.risks if one.name == "form-regions" for origin in one.origins}
    assert risky & _in_regions(fused.programs["any"]) and not risky & _in_regions(lowered.programs["any"])
    (formed,) = (run for run in lowered.programs["any"].history if run.name == "form-regions")
    assert any("contract for rounding" in refusal.reason for refusal in formed.refusals)


def _in_regions(program: Program) -> set[str]:
    """The origins of the calls that regions hold."""
    return {str(node.meta.get("origin", "")) for one in program.regions.values() for node in one.body.calls()}


@pytest.mark.parametrize("planted", RISKY)
def test_the_fallback_makes_the_tokens_of_the_definition(planted: str, tmp_path: Path) -> None:
    tokens_are_right(planted, tmp_path, "reference")


@pytest.mark.parametrize("planted", drawn_in_one_of(4, RISKY))
def test_the_fallback_of_compiled_regions_makes_the_tokens_of_the_definition(planted: str, tmp_path: Path) -> None:
    tokens_are_right(planted, tmp_path, "inductor")


def tokens_are_right(planted: str, folder: Path, backend: str) -> None:
    """Compile and serve, and hold each greedy token to the traced program's logits under the interpreter."""
    risky = RISKY[planted]
    model, _, checkpoint = checked(risky.write(folder / "risky"))
    report = compile_model(checkpoint.folder, folder / "m.ingot", backend=backend, **OPTIONS)
    assert {one.name for one in report.rounding.risks} == risky.passes
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    outputs = LLM(str(folder / "m.ingot")).generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    program = model.entries["main"]
    params = rank_params(program, checkpoint.read)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        logits = logits_of(program, params, [[*prompt, *tokens[:-1]]], exact=False)
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == tokens


def test_the_report_the_artifact_and_the_key_hold_the_decision(tmp_path: Path) -> None:
    risky = RISKY["columns of the gate"]
    report = compile_model(risky.write(tmp_path / "risky"), tmp_path / "a.ingot", backend="reference", **OPTIONS)
    again = compile_model(tmp_path / "risky", tmp_path / "b.ingot", backend="reference", **OPTIONS)
    assert isinstance(report, CompileReport) and report.rounding == again.rounding
    assert (report.build_id, report.request_key) == (again.build_id, again.request_key)
    artifact = open_artifact(tmp_path / "a.ingot")
    identity = artifact.read_json("request.json")["identity"]
    assert {one["pass"] for one in identity["skipped_fusions"]} == risky.passes
    assert {one["location"] for one in identity["skipped_fusions"]} == {"layer 2, feed-forward"}
    (merged,) = (run for run in artifact.trace if run.name == "merge-linears")
    assert [GATE in refusal.reason for refusal in merged.refusals] == [True]


def test_another_decision_is_another_request(tmp_path: Path) -> None:
    """Even where nothing else of the compile differed."""
    request = Request.read(RISKY["columns of the head"].write(tmp_path / "risky"), backend="reference")
    model = request.trace()
    found = request.rounding(model)
    other = request.identity(model, RoundingCheck(()))
    mine = request.identity(model)
    assert mine == request.identity(model, found) and json.dumps(mine) == json.dumps(request.identity(model))
    assert mine != other and {**mine, "skipped_fusions": []} == other


def test_risky_fusions_are_kept_on_request(tmp_path: Path) -> None:
    folder = RISKY["columns of the gate"].write(tmp_path / "risky")
    kept = Request.read(folder, backend="reference", keep_risky_fusions=True)
    plain = Request.read(folder, backend="reference")
    model = kept.trace()
    assert kept.rounding(model).skipped() == {} and plain.rounding(model).skipped()
    assert kept.identity(model)["skipped_fusions"] == [] and kept.key(model) != plain.key(model)
    report = compile_model(folder, tmp_path / "a.ingot", backend="reference", keep_risky_fusions=True, **OPTIONS)
    artifact = open_artifact(tmp_path / "a.ingot")
    assert not report.rounding.scores and artifact.read_json("request.json")["options"]["keep_risky_fusions"] is True
    again = recorded_request(artifact)
    assert again.key(again.trace()) == report.request_key
    (merged,) = (run for run in artifact.trace if run.name == "merge-linears")
    assert not merged.refusals and merged.matches == 6


def test_a_mesh_has_no_score(tmp_path: Path) -> None:
    folder = RISKY["columns of the gate"].write(tmp_path / "risky")
    request = Request.read(folder, backend="reference", mesh={"tp": 2})
    assert any("shard" in one for one in request.rounding(request.trace()).unscored)


def test_quantized_weights_have_no_score(tmp_path: Path) -> None:
    model, check, checkpoint = checked(RISKY["columns of the gate"].write(tmp_path / "risky"))
    params = model.entries["main"].params
    (name,) = (name for name, spec in params.items() if GATE in spec.recipe.sources())
    params[name] = replace(params[name], recipe=Recipe("dequantize", (params[name].recipe,)))
    again = check_rounding(model, PASSES, checkpoint.read)
    assert check.risks and not again.risks and len(again.scores) == len(check.scores) - 2
    assert again.unscored[0].startswith("main: 1 of ") and name.replace("2", "*") in again.unscored[0]


def test_scores_do_not_depend_on_threads(tmp_path: Path) -> None:
    folder = RISKY["columns of the head"].write(tmp_path / "risky")
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(checked(folder)[1])
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]
