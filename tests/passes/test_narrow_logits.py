"""narrow-logits: the pass removes a cast of logits that is a call of its own, and no logits change."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from staged import pass_context, staged, traced
from tiny import TINY

from ingot.backends.cublas.emit import Cublas
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.backends.triton.emit import Triton
from ingot.compile.buckets import bucket_classes
from ingot.compile.merged_plans import merged_plans
from ingot.frontend.trace import Limits
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.record import Numerics, PassRecord
from ingot.ir.backend import No, Yes
from ingot.ir.errors import ArtifactError
from ingot.ir.interpret import interpret
from ingot.ir.machine.target import Target
from ingot.ir.ops.logit_edits import EditParts
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, Region, tensor_type
from ingot.passes.manager import Lowered, run_pipeline
from ingot.passes.narrow_logits import NarrowLogits
from ingot.runtime.loading.check_plan import check_plan

Apply = Callable[..., tuple[Program, PassRecord]]
BEFORE = (Path(__file__).parent / "goldens" / "narrow-logits.before.ir").read_text(encoding="utf-8")


def test_golden(golden: Callable[..., PassRecord]) -> None:
    record = golden(NarrowLogits())
    assert record.matches == 1 and record.numerics is Numerics.EXACT


def test_the_numbers_stay(apply: Apply) -> None:
    after, _ = apply(NarrowLogits(), BEFORE)
    g = torch.Generator().manual_seed(4)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g, dtype=torch.int32)

    values = {
        "x": torch.randn(5, 8, generator=g),
        "floats": torch.tensor([0.1, 0.7, 0.4, 1.0, 1.0]),
        "ints": ints(0, 4, 5),
        "seeds": torch.arange(5),
        "counts": ints(0, 5, 4, 10),
        "banned": ints(-1, 10, 5, 16) * ints(0, 2, 5, 16) - 1,
        "edits": torch.full((4, EditParts(10).words), -1, dtype=torch.int32),
        "last_token": ints(0, 2, 4),
        "w": torch.randn(10, 8, generator=g).bfloat16(),
    }
    old, new = (interpret(program, values) for program in (parse_program(BEFORE), after))
    assert new["logits"].dtype == torch.bfloat16 and bool((old["tokens"] >= 0).all())
    assert all(torch.equal(new[name].to(value.dtype), value) for name, value in old.items())


ROUNDS = ("dtype=f32) : f32[L, 10]", "dtype=f16) : f16[L, 10]")
RETURNED = ("logits=%cast_1", "logits=%cast_1, raw=%linear")
AGAIN = "%again = ingot.cast(%cast_1, dtype=f64) : f64[L, 10] @reference\n"
READ = ("return tokens", f"{AGAIN}return again=%again, tokens")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(ROUNDS, "does not only widen", id="rounds"),
        pytest.param(RETURNED, "its operand is a placeholder or already an output", id="returned"),
        pytest.param(READ, "%again", id="read"),
    ],
)
def test_a_cast_that_stays(apply: Apply, change: tuple[str, str], reason: str) -> None:
    after, record = apply(NarrowLogits(), BEFORE.replace(*change))
    (refusal,) = record.refusals
    assert record.matches == 0 and refusal.node == "cast_1" and reason in refusal.reason
    assert tensor_type(after.output_nodes()["logits"]).dtype != torch.bfloat16


class _WideOnly(Reference):
    name = "reference"

    def claim(self, nodes: Sequence[object], target: Target, bucket: BucketClass) -> Yes | No:
        (node,) = nodes
        return No("too narrow") if "top_logprobs" in str(node) else Yes(1.0)


def test_who_reads_it_must_take_it(apply: Apply) -> None:
    after, record = apply(NarrowLogits(), BEFORE, backends=(_WideOnly(),))
    (refusal,) = record.refusals
    assert record.matches == 0 and refusal.reason == "%top_logprobs: reference: too narrow"
    assert len(list(after.calls())) == len(list(parse_program(BEFORE).calls())), "what was tried is gone"


def _measure(regions: Sequence[Region], sizes: Mapping[str, int]) -> Mapping[str, int]:
    return dict.fromkeys((region.name for region in regions), 0)


def test_only_where_the_product_does_not_cast() -> None:
    """On a GPU products of few tokens cast as they store: their logits are rounded once, and stay wide."""
    target, backends = Target.named("sm_90"), (Triton(), Cublas(), Reference(), Rowwise())
    limits = Limits(max_seq_len=160, max_batch=128, max_tokens=256)
    buckets = bucket_classes(target, backends, limits.max_tokens, limits.max_batch, deterministic=False)
    model = traced({**TINY["llama-plain"].config, "dtype": "bfloat16"}, limits)
    context = pass_context(limits, target=target, backends=backends, bucket=None, measure=_measure)
    lowered = run_pipeline(model, context, buckets)
    programs = lowered.programs.items()
    dtypes = {name: tensor_type(program.output_nodes()["logits"]).dtype for name, program in programs}
    wide, narrow = torch.float32, torch.bfloat16
    few = dict.fromkeys(("decode-1", "decode-16", "decode-32", "decode-64"), wide)
    assert dtypes == {**few, "decode-512": narrow, "extend": narrow}
    for order in (buckets, buckets[::-1]):  # the plan declares what holds the logits of every class
        turned = Lowered(lowered.fused, {bucket.name: lowered.programs[bucket.name] for bucket in order})
        assert merged_plans({"main": turned}).plans["main"].outputs["logits"] == "f32[L, 389]"


def test_a_plan_declares_what_holds_its_logits() -> None:
    model = traced({**TINY["llama-plain"].config, "dtype": "bfloat16"})
    plan = staged(model, backends=(Reference(), Rowwise()))[1].programs["any"].plan
    assert plan is not None and plan.outputs["logits"] == "bf16[L, 389]"
    check_plan(plan)
    check_plan(plan.model_copy(update={"outputs": {**plan.outputs, "logits": "f32[L, 389]"}}))
    with pytest.raises(ArtifactError, match=r"the output 'logits' is bf16\[L, 389\]"):
        check_plan(plan.model_copy(update={"outputs": {**plan.outputs, "logits": "f16[L, 389]"}}))
    wider = {**plan.outputs, "logprobs": plan.outputs["logprobs"].replace("f32", "f64")}
    with pytest.raises(ArtifactError, match=r"the output 'logprobs' is f64"):
        check_plan(plan.model_copy(update={"entry": "draft", "outputs": wider}))
