"""fuse-qk-norm-rope: the same bits in one op, in every form of the model; every refusal; and a plan that runs it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from attention_layer import (
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
from backend_kinds import HasLibrary
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
from ingot.ir.verify import verify
from ingot.passes.dce import eliminate_dead_code
from ingot.passes.fuse_append_attention import FuseAppendAttention
from ingot.passes.fuse_qk_norm_rope import FuseQKNormRope
from ingot.passes.manager import run_pass
from ingot.passes.pipeline import edit_pipeline
from ingot.runtime.cpu.executor import CpuExecutor


def fuse(program: Program, *backends: Backend, force: bool = True) -> tuple[Program, PassRecord]:
    return run_pass(FuseQKNormRope(force=force), program, context(*backends or (Reference(),)), under=Stage.FUSED)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("form", FORMS)
def test_fused_gives_the_same_bits(form: str, dtype: str) -> None:
    layer = replace(FORMS[form], dtype=dtype)
    program = layer.program()
    before = print_program(program)
    fused, record = fuse(program)
    assert record.matches == 1 and not record.refusals and print_program(program) == before
    names = {"ingot.kv_append": -1, "ingot.rope": -2, "ingot.qk_norm_rope_append": 1, "getitem": 2}
    norms = {"ingot.rms_norm": -2} if layer.normed == "qk" else {}
    assert record.op_count_diff == {**names, **norms}
    text = print_program(fused)
    assert ("interleaved=True" in text) == ("interleaved" in form)
    assert print_program(parse_program(text)) == text
    assert torch.equal(logits(fused), logits(program))
    assert torch.equal(logits(fused, exact=True), logits(program, exact=True))
    again, record = fuse(fused)
    assert record.matches == 0 and print_program(again) == text


def test_pieces_of_the_layer_show_in_the_logits() -> None:
    """What the comparison above could miss otherwise."""
    found = [logits(layer.program()) for layer in FORMS.values()]
    distinct = [one for index, one in enumerate(found) if not any(torch.equal(one, other) for other in found[:index])]
    assert len(distinct) == len(FORMS) - 1, "only the order of the write does not show"
    assert all(bool(one.isfinite().all()) for one in found)


READ = f"[T, {HEADS}, {DIM}]"
SECOND = (
    "%again = ingot.paged_attention(%q_turned, %written, %page_table, %q_starts, %q_lens, %kv_lens, scale=0.3)"
    f" : f32{READ}"
)
REFUSED = {
    "q is not rotated: it is the result of ingot.rms_norm": Layer(rotated="k"),
    "k is not rotated: it is the result of ingot.rms_norm": Layer(rotated="q"),
    "q and k are rotated differently: interleaved is the constant False and the constant True": Layer(
        orders=("", ", interleaved=True")
    ),
    "the norms of q and k differ in eps: 0.01 and 0.02": Layer(eps=(0.01, 0.02)),
    "k alone is normed after its rotation": Layer(normed="k", norm_last=True),
    "the rotated q has other uses: 2 in all": Layer(extra=SECOND, outputs=", again=%again"),
    "the rotated k has other uses: 2 in all": Layer(outputs=", turned=%k_turned"),
    "no attention reads the cache after this write": Layer(
        extra="%later = ingot.kv_append(%written, %v_heads, %k_heads, %slots) : state<kv.0>",
        cache="%later",
        last="%later",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason: str) -> None:
    program = REFUSED[reason].program()
    fused, record = fuse(program)
    assert (record.matches, print_program(fused)) == (0, print_program(program))
    assert reason in [refusal.reason for refusal in record.refusals if refusal.node == "written"]


def test_attentions_that_share_the_cache_read_it_after_the_first() -> None:
    program = with_shared_cache()
    fused, record = fuse(program)
    assert record.matches == 1 and not record.refusals
    assert print_program(fused).count("ingot.paged_attention(") == 2
    assert torch.equal(logits(fused), logits(program))


def test_caches_of_other_forms_are_left_alone() -> None:
    """Values that are part of keys; the pass that fuses attention as well says the same."""
    text = print_program(Layer().program()).replace(", scale=0.4", f", scale=0.4, value_width={DIM}")
    text = text.replace("pages, 2, 16", "pages, 1, 16").replace(
        "%k_turned, %v_heads, %slots", "%k_turned, None, %slots"
    )
    program = parse_program(text)
    eliminate_dead_code(program)
    verify(program)
    for one in (FuseQKNormRope(force=True), FuseAppendAttention(force=True)):
        fused, record = run_pass(one, program, context(Reference()), under=Stage.FUSED)
        assert (record.matches, print_program(fused)) == (0, print_program(program))
        (refusal,) = record.refusals
        assert "values are the first numbers of keys: the fused op" in refusal.reason


class Kernel(HasLibrary, Reference):
    """A backend with a library that claims the fused op, or refuses it."""

    name = "kernel"
    cost = 2.0

    def __init__(self, claims: bool) -> None:
        self.claims = claims

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        named = [op.name for op in map(op_of, (node.target for node in nodes)) if op is not None]
        return Yes(self.cost) if self.claims and named == ["qk_norm_rope_append"] else No("no kernel")


@pytest.mark.parametrize(
    ("backend", "reason"),
    [(Reference(), "none of reference has kernels"), (Kernel(False), "kernel: no kernel")],
    ids=["ref", "no"],
)
def test_without_a_kernel_nothing_is_fused(backend: Backend, reason: str) -> None:
    program = Layer().program()
    fused, record = fuse(program, backend, force=False)
    assert (record.matches, print_program(fused)) == (0, print_program(program))
    assert [(refusal.node, refusal.reason) for refusal in record.refusals] == [
        ("written", f"no backend has a kernel for qk_norm_rope_append: {reason}")
    ]


@pytest.mark.parametrize("backend", [Kernel(True), Cpu()], ids=["kernel", "cpu"])
def test_with_a_kernel_it_is_fused_by_itself(backend: Backend) -> None:
    _, record = fuse(Layer().program(), Reference(), backend, force=False)
    assert record.matches == 1 and not record.refusals


def test_force_is_an_option_of_the_command_line() -> None:
    found = [one for phase in edit_pipeline("default,fuse-qk-norm-rope{force=true}") for one in phase.passes]
    assert FuseQKNormRope(force=True) in found and FuseQKNormRope() not in found


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_runs_it_in_place(form: str) -> None:
    program = FORMS[form].program()
    plan = planned(fuse(program)[0]).plan
    assert plan is not None
    calls = [one for one in plan.buckets[0].instructions if one.target == "ingot.qk_norm_rope_append"]
    assert len(calls) == 1 and calls[0].updates == ("kv.0",) and len(calls[0].results) == 1
    params = load_params(program.params, read)
    executor = CpuExecutor(plan, params, {}, {"pages": PAGES})
    cache = executor.states["kv.0"]
    place = cache.data_ptr()
    cache.fill_(float("nan"))
    types = program.input_types()
    found = teacher_forced(
        types, lambda inputs: executor.launch(inputs).outputs, REQUESTS, chunk=5, pages=PAGES, seed=1
    )
    assert torch.equal(torch.cat(found), logits(program))
    assert executor.states["kv.0"].data_ptr() == place
    written = ~cache[:, 0].isnan().all(-1).all(-1)
    assert int(written.sum()) == sum(map(len, REQUESTS))
