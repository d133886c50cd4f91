"""A program of one attention layer between an embedding and logits, in the forms that rewrites of it must know."""

from dataclasses import dataclass

import torch

from ingot.backends.reference.emit import Reference
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.backend import Backend
from ingot.ir.machine.target import Target
from ingot.ir.numerics.harness import InterpreterRun, load_params, teacher_forced
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, Stage
from ingot.ir.text import print_program
from ingot.ir.verify import verify
from ingot.passes.base import PassContext
from ingot.passes.choose_backends import ChooseBackends
from ingot.passes.dce import eliminate_dead_code
from ingot.passes.make_plan import MakePlan
from ingot.passes.manager import run_pass

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
    attention: str = ""  # more attributes of the attention
    norm_last: bool = False  # q and k are rotated, and then normed
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
            norm = f"ingot.rms_norm({{}}, %{name}_norm, eps={self.eps[index]}) : {shape}"
            turn = f"ingot.rope({{}}, %positions, %table{self.orders[index]}) : {shape}"
            made = {"normed": norm} if name in self.normed else {}
            made |= {"turned": turn} if name in self.rotated else {}
            for kind, call in reversed(made.items()) if self.norm_last else made.items():
                lines.append(f"%{name}_{kind} = {call.format(value)}")
                value = f"%{name}_{kind}"
            turned[name] = value
            if place == 0 and self.append_first:
                lines.append(f"%written = ingot.kv_append(%kv.0, {turned['k']}, %v_heads, %slots) : state<kv.0>")
        if not self.append_first:
            lines.append(f"%written = ingot.kv_append(%kv.0, {turned['k']}, %v_heads, %slots) : state<kv.0>")
        lines += [self.extra] if self.extra else []
        lines += [
            f"%attended = ingot.paged_attention({turned['q']}, {self.cache}, %page_table, %q_starts, %q_lens, "
            f"%kv_lens, scale=0.4{self.attention}) : {dtype}{t.format(HEADS)}",
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
    "normed last": Layer(norm_last=True),
    "interleaved, normed last": Layer(norm_last=True, orders=INTERLEAVED),
    "the write first": Layer(append_first=True),
}


def with_shared_cache() -> Program:
    """The layer, and a second attention over its cache, of what the first one gives."""
    heads = f"f32[T, {HEADS}, {DIM}]"
    second = (
        "%again = ingot.paged_attention(%attended, %written, %page_table, %q_starts, %q_lens, %kv_lens, scale=0.3)"
        f" : {heads}"
    )
    text = print_program(Layer().program()).replace("(%attended, [", "(%again, [")
    line = next(line for line in text.splitlines() if line.startswith("%attended ="))
    program = parse_program(text.replace(line, f"{line}\n{second}"))
    verify(program)
    return program


def planned(program: Program) -> Program:
    """Through backend claims to a plan."""
    program, _ = run_pass(ChooseBackends(), program, context(Reference()), under=Stage.FUSED)
    program.stage, program.bucket = Stage.LOWERED, BUCKET
    program, _ = run_pass(MakePlan(), program, context(Reference()), under=Stage.LOWERED)
    return program
