"""fuse-qk-norm-rope: the same bits in one op, in every form of the model; every refusal; and a plan that runs it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import fx

from ingot.backends.cpu.emit import Cpu
from ingot.backends.reference.emit import Reference
from ingot.ir.backend import Backend, No, Yes
from ingot.ir.harness import InterpreterRun, load_params, teacher_forced
from ingot.ir.ops import op_of
from ingot.ir.parse import parse_program
from ingot.ir.plan import BucketClass
from ingot.ir.program import Program, Stage
from ingot.ir.record import PassRecord
from ingot.ir.target import Target
from ingot.ir.text import print_program
from ingot.ir.verify import verify
from ingot.passes.base import PassContext
from ingot.passes.choose_providers import ChooseProviders
from ingot.passes.dce import eliminate_dead_code
from ingot.passes.fuse_qk_norm_rope import FuseQKNormRope
from ingot.passes.make_plan import MakePlan
from ingot.passes.manager import run_pass
from ingot.passes.pipeline import edit_pipeline
from ingot.runtime.executor import Executor

HEADS, KV_HEADS, DIM, WIDTH, VOCAB, POSITIONS, PAGES = 4, 2, 8, 16, 23, 48, 16
REQUESTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [2], [7, 1, 8, 2, 8, 1, 8]]
INPUTS = """input tokens: i32[T]
input positions: i32[T]
input slots: i64[T]
input page_table: i32[B, P]
input q_starts: i32[B]
input q_lens: i32[B]
input kv_lens: i32[B]
"""
NAMES = {"q_norm": [DIM], "k_norm": [DIM], "embed": [VOCAB, WIDTH], "out": [VOCAB, HEADS * DIM]}
SIZES = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}


@dataclass(frozen=True)
class Layer:
    """Attention of one layer between an embedding and logits."""

    normed: str = "qk"  # which of q and k
    rotated: str = "qk"
    eps: tuple[float, float] = (0.01, 0.01)
    orders: tuple[str, str] = ("", "")
    dtype: str = "f32"
    extra: str = ""  # more lines before the attention
    outputs: str = ""
    append_first: bool = False  # the cache is written before q is even rotated
    cache: str = "%written"  # what attention reads
    last: str = "%written"  # what the program returns

    def program(self) -> Program:
        t, dtype = f"[T, {{}}, {DIM}]", self.dtype
        params = {**NAMES, **{name: [count * DIM, WIDTH] for name, count in SIZES.items()}}
        lines = [
            f'param {name}: {dtype}{shape} = cast(source(name="{name}"), dtype="{dtype}")'
            for name, shape in params.items()
        ]
        lines += [
            f'param table: f32[{POSITIONS}, {DIM}] = table(kind="rope", positions={POSITIONS}, '
            f'rope_type="default", rotary_dim={DIM}, theta=100.0)',
            f"state kv.0: paged_kv {dtype}[pages, 2, 16, {KV_HEADS}, {DIM}] group=full unit=token",
            f"%x = ingot.embedding(%tokens, %embed) : {dtype}[T, {WIDTH}]",
        ]
        turned = {}
        for name, count in SIZES.items():
            shape = dtype + t.format(count)
            lines.append(f"%{name}_flat = ingot.linear(%x, %{name}) : {dtype}[T, {count * DIM}]")
            lines.append(f"%{name}_heads = aten.view.default(%{name}_flat, [-1, {count}, {DIM}]) : {shape}")
        for place, name in enumerate("kq" if self.append_first else "qk"):
            index = "qk".index(name)
            shape, value = dtype + t.format(SIZES[name]), f"%{name}_heads"
            if name in self.normed:
                lines.append(f"%{name}_normed = ingot.rms_norm({value}, %{name}_norm, eps={self.eps[index]}) : {shape}")
                value = f"%{name}_normed"
            if name in self.rotated:
                lines.append(f"%{name}_turned = ingot.rope({value}, %positions, %table{self.orders[index]}) : {shape}")
                value = f"%{name}_turned"
            turned[name] = value
            if place == 0 and self.append_first:
                lines.append(f"%written = ingot.kv_append(%kv.0, {turned['k']}, %v_heads, %slots) : state<kv.0>")
        if not self.append_first:
            lines.append(f"%written = ingot.kv_append(%kv.0, {turned['k']}, %v_heads, %slots) : state<kv.0>")
        lines += [self.extra] if self.extra else []
        lines += [
            f"%attended = ingot.paged_attention({turned['q']}, {self.cache}, %page_table, %q_starts, %q_lens, "
            f"%kv_lens, scale=0.4) : {dtype}{t.format(HEADS)}",
            f"%flat = aten.view.default(%attended, [-1, {HEADS * DIM}]) : {dtype}[T, {HEADS * DIM}]",
            f"%scores = ingot.linear(%flat, %out) : {dtype}[T, {VOCAB}]",
            f"%logits = ingot.cast(%scores, dtype=f32) : f32[T, {VOCAB}]",
            f"return logits=%logits{self.outputs}, kv.0={self.last}",
        ]
        dims = "dim T in [1, 64]\ndim B in [1, 8]\ndim P in [1, 4]\ndim pages in [1, 64]\n"
        program = parse_program(f"program main stage=CACHED\n{dims}{INPUTS}" + "\n".join(lines) + "\n")
        eliminate_dead_code(program)
        verify(program)
        return program


def read(name: str) -> torch.Tensor:
    shape = {**NAMES, **{key: [count * DIM, WIDTH] for key, count in SIZES.items()}}[name]
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name) + ord(name[0])))


BUCKET = BucketClass(name="any", tokens=(1, 64))


def context(*backends: Backend) -> PassContext:
    return PassContext(
        target=Target.detect("cpu"), max_seq_len=48, max_batch=8, max_tokens=64, backends=backends, bucket=BUCKET
    )


def fuse(program: Program, *backends: Backend, force: bool = True) -> tuple[Program, PassRecord]:
    return run_pass(FuseQKNormRope(force=force), program, context(*backends or (Reference(),)), under=Stage.FUSED)


def logits(program: Program, **options: bool) -> torch.Tensor:
    run = InterpreterRun(program, load_params(program.params, read), pages=PAGES, **options)
    return torch.cat(teacher_forced(program.input_types(), run, REQUESTS, chunk=5, pages=PAGES, seed=1))


INTERLEAVED = (", interleaved=True", ", interleaved=True")
FORMS = {
    "normed": Layer(),
    "not normed": Layer(normed=""),
    "interleaved": Layer(orders=INTERLEAVED),
    "interleaved, not normed": Layer(normed="", orders=INTERLEAVED),
    "one norm only": Layer(normed="k"),
    "the write first": Layer(append_first=True),
}


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
    "2 attentions read the cache after this write": Layer(extra=SECOND, outputs=", again=%again"),
    "the rotated q is used elsewhere too: 2 times in all": Layer(outputs=", turned=%q_turned"),
    "the rotated k is used elsewhere too: 2 times in all": Layer(outputs=", turned=%k_turned"),
    "0 attentions read the cache after this write": Layer(
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


class Kernel(Reference):
    """A provider with a library that claims the fused op, or refuses it."""

    name = "kernel"
    emits_library = True
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
        ("written", f"no provider has a kernel for qk_norm_rope_append: {reason}")
    ]


@pytest.mark.parametrize("backend", [Kernel(True), Cpu()], ids=["kernel", "cpu"])
def test_with_a_kernel_it_is_fused_by_itself(backend: Backend) -> None:
    _, record = fuse(Layer().program(), Reference(), backend, force=False)
    assert record.matches == 1 and not record.refusals


def test_force_is_an_option_of_the_command_line() -> None:
    found = [one for phase in edit_pipeline("default,fuse-qk-norm-rope{force=true}") for one in phase.passes]
    assert FuseQKNormRope(force=True) in found and FuseQKNormRope() not in found


def planned(program: Program) -> Program:
    """Through provider claims to a plan."""
    program, _ = run_pass(ChooseProviders(), program, context(Reference()), under=Stage.FUSED)
    program.stage, program.bucket = Stage.LOWERED, BUCKET
    program, _ = run_pass(MakePlan(), program, context(Reference()), under=Stage.LOWERED)
    return program


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_runs_it_in_place(form: str) -> None:
    program = FORMS[form].program()
    plan = planned(fuse(program)[0]).plan
    assert plan is not None
    calls = [one for one in plan.buckets[0].instructions if one.target == "ingot.qk_norm_rope_append"]
    assert len(calls) == 1 and calls[0].updates == ("kv.0",) and len(calls[0].results) == 1
    params = load_params(program.params, read)
    executor = Executor(plan, params, {}, {"pages": PAGES})
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
