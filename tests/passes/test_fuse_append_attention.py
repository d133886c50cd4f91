"""fuse-append-attention: the same bits in one op, from the parts or from what was fused before; every refusal; by
bucket class; and a plan that runs it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from attention_layer import (
    BUCKET,
    DIM,
    FORMS,
    HEADS,
    PAGES,
    REQUESTS,
    Layer,
    context,
    logits,
    planned,
    read,
    with_shared_cache,
)
from backend_kinds import CompilesCalls
from torch import fx

from ingot.backends.cpu.emit import Cpu
from ingot.backends.reference.emit import Reference
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.record import PassRecord
from ingot.ir.backend import Backend, No, Yes
from ingot.ir.machine.target import Target
from ingot.ir.numerics.harness import load_params, teacher_forced
from ingot.ir.ops import op_of
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, Stage
from ingot.ir.text import print_program
from ingot.passes.fuse_append_attention import FuseAppendAttention
from ingot.passes.fuse_qk_norm_rope import FuseQKNormRope
from ingot.passes.manager import run_pass
from ingot.passes.pipeline import PIPELINE, edit_pipeline
from ingot.runtime.cpu.executor import CpuExecutor


def fuse(program: Program, *backends: Backend, force: bool = True) -> tuple[Program, PassRecord]:
    return run_pass(FuseAppendAttention(force=force), program, context(*backends or (Reference(),)), under=Stage.FUSED)


def half_fused(program: Program) -> Program:
    return run_pass(FuseQKNormRope(force=True), program, context(Reference()), under=Stage.FUSED)[0]


LAYERS = {**FORMS, "window and cap": Layer(attention=', soft_cap=2.0, mask="window_5"')}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("half", [False, True], ids=["parts", "half fused"])
@pytest.mark.parametrize("form", LAYERS)
def test_fused_gives_the_same_bits(form: str, half: bool, dtype: str) -> None:
    layer = replace(LAYERS[form], dtype=dtype)
    program = half_fused(layer.program()) if half else layer.program()
    before = print_program(program)
    fused, record = fuse(program)
    assert record.matches == 1 and not record.refusals and print_program(program) == before
    assert record.rewrites[0].anchor == ("qk_norm_rope_append" if half else "written")
    text = print_program(fused)
    assert not [name for name in ("kv_append", "rope", "qk_norm_rope_append", "paged_attention") if f".{name}(" in text]
    assert text.count("ingot.append_attention(") == 1
    assert ("interleaved=True" in text) == ("interleaved" in form) and ('mask="window_5"' in text) == ("window" in form)
    assert print_program(parse_program(text)) == text
    assert torch.equal(logits(fused), logits(program))
    assert torch.equal(logits(fused, exact=True), logits(program, exact=True))
    again, record = fuse(fused)
    assert record.matches == 0 and print_program(again) == text


SECOND = (
    "%again = ingot.paged_attention(%q_turned, %written, %page_table, %q_starts, %q_lens, %kv_lens, scale=0.3)"
    f" : f32[T, {HEADS}, {DIM}]"
)
REFUSED = {
    "q is not rotated: it is the result of ingot.rms_norm": Layer(rotated="k"),
    "the rotated q has other uses: 2 in all": Layer(extra=SECOND, outputs=", again=%again"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_of_parts(reason: str) -> None:
    program = REFUSED[reason].program()
    fused, record = fuse(program)
    assert (record.matches, print_program(fused)) == (0, print_program(program))
    assert reason in [refusal.reason for refusal in record.refusals if refusal.node == "written"]


# A half fused program, and what of its text is replaced.
ATTENDED = "%attended = ingot.paged_attention("
HALF_REFUSED = {
    "no attention reads the cache after this write": [
        (
            ATTENDED,
            "%later = ingot.kv_append(%item_1, %v_heads, %k_heads, %slots) : state<kv.0>\n" + ATTENDED,
        ),
        ("%item, %item_1, %page_table", "%item, %later, %page_table"),
        ("kv.0=%item_1", "kv.0=%later"),
    ],
    "that attention is not the only reader of the rotated q, and reads a result of ingot.qk_norm_rope_append": [
        ("logits=%logits", "logits=%logits, turned=%item"),
    ],
    "that attention is not the only reader of the rotated q, and reads the result of aten.view.default": [
        ("%item, %item_1, %page_table", "%q_heads, %item_1, %page_table"),
        ("logits=%logits", "logits=%logits, turned=%item"),
    ],
}


@pytest.mark.parametrize("reason", HALF_REFUSED)
def test_refusals_of_what_is_half_fused(reason: str) -> None:
    text = print_program(half_fused(Layer().program()))
    for old, new in HALF_REFUSED[reason]:
        assert text.count(old) == 1, f"{old} in\n{text}"
        text = text.replace(old, new)
    program = parse_program(text)
    fused, record = fuse(program)
    assert (record.matches, print_program(fused)) == (0, print_program(program))
    assert reason in [refusal.reason for refusal in record.refusals]


@pytest.mark.parametrize("half", [False, True], ids=["parts", "half fused"])
def test_attentions_that_share_the_cache_read_it_after_the_fused_one(half: bool) -> None:
    program = with_shared_cache()
    fused, record = fuse(half_fused(program) if half else program)
    assert record.matches == 1 and not record.refusals
    text = print_program(fused)
    assert (text.count("ingot.append_attention("), text.count("ingot.paged_attention(")) == (1, 1)
    assert torch.equal(logits(fused), logits(program))


class Kernel(CompilesCalls, Reference):
    """A backend that makes kernels for calls in some bucket classes."""

    name = "kernel"

    def __init__(self, most: int) -> None:
        self.most = most

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        named = [op.name for op in map(op_of, (node.target for node in nodes)) if op is not None]
        takes = named == ["append_attention"] and bucket.tokens[1] <= self.most
        return Yes(2.0) if takes else No(f"steps of up to {bucket.tokens[1]} tokens")


@pytest.mark.parametrize(
    ("backends", "reason"),
    [
        ((Reference(),), "none of reference has kernels"),
        ((Cpu(), Reference()), "none of cpu, reference has kernels"),
        ((Kernel(16),), "kernel: steps of up to 64 tokens"),
    ],
    ids=["reference", "library", "no"],
)
def test_without_a_kernel_nothing_is_fused(backends: tuple[Backend, ...], reason: str) -> None:
    for program, anchor in ((Layer().program(), "written"), (half_fused(Layer().program()), "qk_norm_rope_append")):
        fused, record = fuse(program, *backends, force=False)
        assert (record.matches, print_program(fused)) == (0, print_program(program))
        assert [(refusal.node, refusal.reason) for refusal in record.refusals] == [
            (anchor, f"no backend has a kernel for append_attention: {reason}")
        ]


def test_the_bucket_class_decides() -> None:
    given = context(Reference(), Kernel(16))
    few = replace(given, bucket=BucketClass(name="decode", tokens=(1, 16)))
    found = [
        run_pass(FuseAppendAttention(), Layer().program(), one, under=Stage.FUSED)[1].matches for one in (given, few)
    ]
    assert found == [0, 1]
    (phase,) = (phase for phase in PIPELINE if FuseAppendAttention() in phase.passes)
    assert phase.by_bucket


def test_force_is_an_option_of_the_command_line() -> None:
    found = [one for phase in edit_pipeline("default,fuse-append-attention{force=true}") for one in phase.passes]
    assert FuseAppendAttention(force=True) in found and FuseAppendAttention() not in found


def test_a_plan_runs_it_in_place() -> None:
    program = Layer().program()
    plan = planned(fuse(program)[0]).plan
    assert plan is not None and plan.buckets[0].bucket == BUCKET
    calls = [one for one in plan.buckets[0].instructions if one.target == "ingot.append_attention"]
    assert len(calls) == 1 and calls[0].updates == ("kv.0",) and len(calls[0].results) == 1
    executor = CpuExecutor(plan, load_params(program.params, read), {}, {"pages": PAGES})
    cache = executor.states["kv.0"]
    place = cache.data_ptr()
    cache.fill_(float("nan"))
    found = teacher_forced(
        program.input_types(),
        lambda inputs: executor.launch(inputs).outputs,
        REQUESTS,
        chunk=5,
        pages=PAGES,
        seed=1,
    )
    assert torch.equal(torch.cat(found), logits(program))
    assert executor.states["kv.0"].data_ptr() == place
    assert int((~cache[:, 0].isnan().all(-1).all(-1)).sum()) == sum(map(len, REQUESTS))
