"""sequence-parallel: ranks add and norm their own rows, bit by bit as before; and which sums stay all-reduces."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import CASES
from staged import logits_of, pass_context, staged, traced
from tiny import TINY

from ingot import compile_model
from ingot.backends.gloo.emit import Gloo
from ingot.backends.nccl.emit import NcclBackend
from ingot.backends.peer.emit import Peer
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.backends.triton.emit import Triton
from ingot.compile.merged_plans import merged_plans
from ingot.frontend.trace import Limits
from ingot.ir import ops
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.record import Numerics, PassRecord
from ingot.ir.errors import IngotError, OptionError
from ingot.ir.interpret import interpret_ranks
from ingot.ir.machine.target import Target
from ingot.ir.numerics.harness import rank_params, step_inputs
from ingot.ir.numerics.recording import is_part_of_rows, record
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, Stage, op_counts, target_name, tensor_type
from ingot.passes.manager import run_pass, run_pipeline
from ingot.passes.pipeline import PIPELINE, edit_pipeline, pipeline_for
from ingot.passes.sequence_parallel import SequenceParallel
from ingot.runtime.loading.check_plan import check_plan

BEFORE = (Path(__file__).parent / "goldens" / "sequence-parallel.before.ir").read_text(encoding="utf-8")
MESH = {"tp": 2}
ON_GPU = "default,sequence-parallel"
ALL_STEPS = "default,sequence-parallel{steps=all}"


def apply_to(text: str, fuel: int | None = None, steps: str = "long", **changes: Any) -> tuple[Program, PassRecord]:
    program = parse_program(text)
    context = pass_context(**{"bucket": program.bucket, "mesh": program.mesh, **changes})
    return run_pass(SequenceParallel(steps), program, context, under=Stage.FUSED, fuel=fuel)


def outputs(program: Program, tokens: int) -> list[dict[str, Any]]:
    """What each of two ranks returns. The sums round, and depend on the order of their terms."""
    g = torch.Generator().manual_seed(tokens)
    up, down, x = (torch.randn(*shape, generator=g) for shape in ((12, 4), (4, 12), (tokens, 4)))
    bias, gain, last = (torch.randn(4, generator=g) for _ in range(3))
    rows = torch.arange(tokens - 1, -1, -3, dtype=torch.int32)
    shared = {"tokens": torch.zeros(tokens, dtype=torch.int32), "x": x, "logit_rows": rows}
    shared |= {"bias": bias, "gain": gain, "last_gain": last}
    return interpret_ranks(
        program, [{**shared, "up": up[at : at + 6].clone(), "down": down[:, at : at + 6].clone()} for at in (0, 6)]
    )


def check_equal(found: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine["y"], theirs["y"])


def test_golden(golden: Callable[..., PassRecord]) -> None:
    record = golden(SequenceParallel(), mesh=MESH)
    assert record.matches == 2 and record.numerics is Numerics.EXACT and not record.refusals


@pytest.mark.parametrize("fuel", [0, 1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 17, 64])
def test_bits_stay_with_any_fuel_and_number_of_rows(tokens: int, fuel: int) -> None:
    after, record = apply_to(BEFORE, fuel)
    assert record.matches == fuel
    assert op_counts(after).get("ingot.reduce_scatter", 0) == fuel
    check_equal(outputs(after, tokens), outputs(parse_program(BEFORE), tokens))


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if case.slow else name for name, case in CASES.items()]
)
def test_logits_of_models_keep_their_bits(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, read = case.open(tmp_path)
    steps, _ = staged(model, edit_pipeline(ALL_STEPS, pipeline_for(case.mesh)), mesh=case.mesh)
    place = next(place for place, step in enumerate(steps) if step.name == SequenceParallel.name)
    vocab = model.spec.vocab_size
    requests = [[(7 * place + 3 * length) % vocab for place in range(length)] for length in (1, 17, 33)]
    before, after = (logits_of(step.program, read, requests) for step in steps[place - 1 : place + 1])
    assert torch.equal(before.found, after.found) and torch.equal(before.exact, after.exact)


def test_a_residual_stream_is_split_to_its_end() -> None:
    """In long steps: each sum is followed by one gather, and one more gathers the residual. Decode stays as it is."""
    case = CASES["key-value groups"]
    model = traced({**TINY[case.checkpoint].config, **case.changes})
    classes = (BucketClass(name="decode", tokens=(1, 16)), BucketClass(name="extend", tokens=(17, 200)))
    pipeline = edit_pipeline("default,sequence-parallel", pipeline_for(case.mesh))
    context = pass_context(bucket=None, mesh=case.mesh, backends=(Reference(), Rowwise(), Gloo()))
    lowered = run_pipeline(model, context, classes, pipeline)
    counts = {name: op_counts(program) for name, program in lowered.programs.items()}
    assert "ingot.reduce_scatter" not in counts["decode"] and counts["extend"]["ingot.reduce_scatter"] == 3
    program = lowered.programs["extend"]
    by_row = [node for node in program.calls() if str(node.meta["type"]).startswith("f32[T_tp")]
    assert {str(node.meta["placement"][0]) for node in by_row} == {"tp=shard(0)"}
    assert not [node for node in program.calls(ops.all_reduce.overload) if tensor_type(node).shape[0] == "T"]
    gathers = [node for node in program.calls(ops.all_gather.overload) if node.kwargs["dim"] == 0]
    assert len(gathers) == 4
    plan = merged_plans({"main": lowered}).plans["main"]
    check_plan(plan)
    assert plan.dims["T_tp"] == (1, 128), "of 256 tokens, the limit of all steps"
    assert plan.buckets[1].memory.sizes["T_tp"] == 100, "of 200 tokens, the limit of the class"


def test_recorded_values_are_whole(tmp_path: Path) -> None:
    """Faults are located by values of the same name: those of split rows are joined, without the rows that pad them."""
    case = CASES["key-value groups"]
    model, read = case.open(tmp_path)
    steps, _ = staged(model, edit_pipeline(ALL_STEPS, pipeline_for(case.mesh)), mesh=case.mesh)
    place = next(place for place, step in enumerate(steps) if step.name == SequenceParallel.name)
    before, after = (step.program for step in steps[place - 1 : place + 1])
    inputs = step_inputs(before.input_types(), [[5, 6, 7, 9], [8]])
    old, new = (record(one, rank_params(one, read), inputs).steps[0] for one in (before, after))
    shared = old.keys() & new.keys()
    split = {name for name in shared if is_part_of_rows(new[name].node)}
    assert len(split) >= 6 and {tuple(new[name].measured.found.shape) for name in split} == {(5, 54)}
    for name in shared:
        one, other = old[name].measured.found, new[name].measured.found
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=name)  # unused cache rows are NaN


# --- what stays as it is ----------------------------------------------------------------------------------------------


def test_more_gathers_than_sums_are_refused() -> None:
    """A sum that two norms read. The residual stream, a larger group, is split all the same."""
    twice = BEFORE.replace(
        "return y=%last",
        '%apart = ingot.all_reduce(%part_0, axis="tp") : f32[T, 4]\n'
        "%left = ingot.rms_norm(%apart, %gain, eps=1e-05) : f32[T, 4]\n"
        "%right = ingot.rms_norm(%apart, %last_gain, eps=1e-05) : f32[T, 4]\n"
        "return y=%last, left=%left, right=%right",
    )
    after, record = apply_to(twice)
    assert record.matches == 2
    assert [(one.node, one.reason) for one in record.refusals] == [("apart", "1 sums of rows would need 2 gathers")]
    check_equal(outputs(after, 19), outputs(parse_program(BEFORE), 19))


def test_a_sum_without_adds_and_norms_is_refused() -> None:
    text = BEFORE.partition("%biased")[0] + "return y=%sum_0\n"
    after, record = apply_to(text.replace("input logit_rows: i32[L]\n", "").replace("dim L in [1, 64]\n", ""))
    assert [one.reason for one in record.refusals] == ["no add or norm of whole rows reads the sum"]
    assert record.matches == 0 and "ingot.reduce_scatter" not in op_counts(after)


def test_rows_are_gathered_before_other_calls() -> None:
    """A soft cap is neither an add nor a norm: it reads whole rows, and the add after it takes parts of its result."""
    text = BEFORE.replace("%post = ingot.rms_norm(%sum_1, %gain, eps=1e-05)", "%post = ingot.soft_cap(%sum_1, cap=2.0)")
    after, record = apply_to(text, steps="all")
    assert record.matches == 1 and [one.node for one in record.refusals] == ["sum_1"]
    assert op_counts(after)["ingot.take_part"] == 2, "of x and of the capped sum"
    check_equal(outputs(after, 21), outputs(parse_program(text), 21))


def test_matmuls_read_whole_rows() -> None:
    """Also one whose weight every rank has whole, such as the router of experts: it reads the gathered rows."""
    text = BEFORE.replace(
        "%up_1 =",
        "%router = ingot.linear(%normed_0, %shared) : f32[T, 3]  # layer 1\n%up_1 =",
    ).replace("param bias", 'param shared: f32[3, 4] = source(name="shared")\nparam bias')
    after, record = apply_to(text.replace("return y=%last", "return y=%last, routed=%router"))
    assert record.matches == 2 and op_counts(after)["ingot.all_gather"] == 2
    (router,) = (node for node in after.calls(ops.linear.overload) if node.name == "router")
    assert str(router.meta["type"]) == "f32[T, 3]" and str(router.args[0]) == "all_gather"


@pytest.mark.parametrize(
    ("target", "tokens", "q_max", "steps", "matches"),
    [
        ("cpu", (1, 16), None, "long", 0),
        ("cpu", (17, 64), None, "long", 2),
        ("cpu", (1, 64), None, "long", 0),
        ("cpu", (1, 64), None, "all", 2),
        ("cpu", (1, 16), None, "all", 2),
        ("sm_90", (33, 64), None, "long", 0),
        ("sm_90", (65, 512), 1, "long", 0),
        ("sm_90", (65, 8192), None, "long", 2),
        ("sm_90", (17, 8192), None, "long", 0),
    ],
)
def test_bucket_classes(target: str, tokens: tuple[int, int], q_max: int | None, steps: str, matches: int) -> None:
    """Long steps alone, unless the option says all. Other classes are refused by name, but for those of decode."""
    bucket = BucketClass(name="some", tokens=tokens, q_max=q_max)
    _, record = apply_to(BEFORE, steps=steps, target=Target.named(target), bucket=bucket)
    assert record.matches == matches
    refused = steps == "long" and not matches and q_max is None
    have = f"have at most {tokens[1]}" if tokens[1] <= (16 if target == "cpu" else 64) else f"may have {tokens[0]}"
    assert [one.reason for one in record.refusals] == [f"steps of the class some {have} tokens"] * 2 * refused


# --- options ----------------------------------------------------------------------------------------------------------


def test_the_pass_runs_on_request_in_each_bucket_class() -> None:
    default = pipeline_for(MESH)
    assert not any(one.name == SequenceParallel.name for phase in (*default, *PIPELINE) for one in phase.passes)
    for text in (ALL_STEPS, f"{ALL_STEPS},-fuse-append-attention,-separate-rounding"):
        (phase,) = (
            phase
            for phase in edit_pipeline(text, default)
            if any(one.name == SequenceParallel.name for one in phase.passes)
        )
        assert phase.by_bucket and phase.stage is Stage.FUSED
        assert phase.passes[-1] == SequenceParallel("all"), "after the passes that select rows and fuse"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sequence-parallel{steps=short}", "option 'steps' of pass 'sequence-parallel' is 'short'"),
        ("sequence-parallel{steps=7}", "option 'steps' of pass 'sequence-parallel' is '7'"),
        ("sequence-parallel{stepz=all}", "pass 'sequence-parallel' has no option 'stepz'"),
        ("sequence-paralel", "unknown pass 'sequence-paralel'"),
    ],
)
def test_misspelled(text: str, said: str) -> None:
    with pytest.raises(IngotError) as caught:
        edit_pipeline(f"default,{text}", pipeline_for(MESH))
    assert caught.value.what.startswith(said) and caught.value.where == "--passes" and caught.value.expected


@pytest.mark.parametrize("mesh", [{}, {"tp": 1}, {"pp": 2}])
def test_without_tensor_parallelism(mesh: dict[str, int], tmp_path: Path) -> None:
    """Before the checkpoint is read: there is none."""
    with pytest.raises(OptionError) as caught:
        compile_model(tmp_path / "none", tmp_path / "a.ingot", mesh=mesh, passes=ALL_STEPS)
    assert caught.value.what == "the pass 'sequence-parallel' without tensor parallelism"
    assert caught.value.expected == "a mesh with tp of 2 or more" and "--mesh tp=2" in caught.value.hint
    assert not (tmp_path / "a.ingot").exists()


# --- a GPU ------------------------------------------------------------------------------------------------------------


def test_backends_of_a_gpu() -> None:
    """NCCL moves rows, and a kernel adds and norms those of a rank. The kernels of peer memory say why they do not."""
    case = CASES["key-value groups"]
    limits = Limits(max_seq_len=160, max_batch=8, max_tokens=4096)
    model = traced({**TINY[case.checkpoint].config, **case.changes, "dtype": "bfloat16"}, limits)
    backends = (Triton(), Peer(), NcclBackend(), Reference(), Rowwise())
    context = pass_context(limits, bucket=None, mesh=case.mesh, target=Target.named("sm_90"), backends=backends)
    bucket = BucketClass(name="extend", tokens=(65, 4096))
    pipeline = tuple(phase for phase in edit_pipeline(ON_GPU, pipeline_for(case.mesh)) if phase.stage < Stage.PLANNED)
    lowered = run_pipeline(model, context, (bucket,), pipeline)
    program = lowered.programs["extend"]
    by_row = [node for node in program.calls() if "T_tp" in str(node.meta["type"]) and "backend" in node.meta]
    chosen = {(target_name(node.target), node.meta["backend"]) for node in by_row}
    assert {("ingot.reduce_scatter", "nccl"), ("ingot.add_rms_norm", "triton")} <= chosen
    record = next(one for one in lowered.records if one.name == "choose-backends")
    assert any("peer" in one.reason and "reduce_scatter is no all-reduce" in one.reason for one in record.refusals)
