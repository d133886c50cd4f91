"""Every pass on real checkpoint tensors: the program stays whole, reads back from its text, and keeps its numerics."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from drawn import drawn
from staged import BUCKET, logits_of, pass_context, staged
from staged import LIMITS as TEST_LIMITS
from tiny import TINY

from ingot.compile.numerics import NumericsCheck, sample_requests
from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.trace import trace
from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import VerifyError
from ingot.ir.numerics.contracts import breach
from ingot.ir.parse import parse_program
from ingot.ir.program import Model, Program, Stage
from ingot.ir.text import print_program, print_region_body
from ingot.ir.verify import verify
from ingot.models.architectures import read_spec
from ingot.passes.base import Pass, PassContext
from ingot.passes.manager import run_pass, run_pipeline
from ingot.passes.merge_linears import MergeLinears
from ingot.passes.pipeline import PIPELINE
from ingot.passes.rewrite import Rewriter

PICO = Path(__file__).parents[2] / "models" / "pico"
Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A checkpoint computed in `dtype`, its weights as they are or made extreme."""

    checkpoint: str
    dtype: torch.dtype = torch.float32
    extreme: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.checkpoint}-{dtype}" + ("-extreme" if self.extreme else "")


CASES = [
    *(Case(name) for name in TINY),
    Case("llama-biased", torch.bfloat16),
    Case("qwen3-scaled", torch.bfloat16),
    Case("llama-plain", extreme=True),
    Case("qwen3-biased", extreme=True),
    Case("qwen3-plain", torch.bfloat16, extreme=True),
    Case("pico", torch.bfloat16),
]


@pytest.fixture(scope="module")
def opened(checkpoint: Callable[[str], Path]) -> Callable[[Case], tuple[Model, Read]]:
    """The traced model of a case, and what reads its checkpoint tensors."""

    def get(case: Case) -> tuple[Model, Read]:
        found = Checkpoint.open(PICO if case.checkpoint == "pico" else checkpoint(case.checkpoint))
        spec = replace(read_spec(found.config), dtype=case.dtype)
        stored = {name: info.dtype for name, info in found.tensors.items()}
        return trace(spec, TEST_LIMITS, stored), _extreme(found.read) if case.extreme else found.read

    return get


def _extreme(read: Read) -> Read:
    """Norm gains from 0.2 to 96.5, and one channel of the residual stream 60 times larger than the others.

    Both occur in trained models: gains of Qwen3-0.6B's K norm reach 96.5, and Llama's massive activations stand in few
    fixed channels (arXiv 2402.17762).
    """

    def changed(name: str) -> torch.Tensor:
        tensor = read(name)
        if "norm" in name:
            generator = torch.Generator().manual_seed(len(name))
            tensor = torch.exp(torch.rand(tensor.shape, generator=generator) * 6 - 1.5).to(tensor.dtype)
            tensor[3] = 96.5
        if "embed_tokens" in name:
            tensor = tensor.clone()
            tensor[:, 5] *= 60
        return tensor

    return changed


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", drawn(5, CASES), ids=str)
def test_every_pass_keeps_its_numerics(case: Case, opened: Callable[[Case], tuple[Model, Read]]) -> None:
    """By the check that `--check-numerics` makes, which raises on a breach."""
    model, read = opened(case)
    check = NumericsCheck(model, TEST_LIMITS, read)
    check.begin()
    run_pipeline(model, pass_context(bucket=None), (BUCKET,), on_pass=check.on_pass)
    report = check.report()
    assert [one.name for one in report.passes] == [one.name for phase in PIPELINE for one in phase.passes]
    assert not report.overflows
    changed = {one.name: one for one in report.passes if one.changed}
    assert {"insert-paged-kv", "insert-ending", "merge-linears", "form-regions"} <= changed.keys()
    assert all(0 < one.error <= one.allowed for one in changed.values() if one.allowed)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", drawn(3, TINY))
def test_every_stage_reads_back(name: str, opened: Callable[[Case], tuple[Model, Read]]) -> None:
    steps, lowered = staged(opened(Case(name))[0])
    programs = [(step.program, Stage[step.record.stage] if step.record else Stage.TRACED) for step in steps]
    programs += [(program, program.stage) for program in (lowered.fused, *lowered.programs.values())]
    for program, stage in programs:
        # A plan stands in plan.json and not in the text: a planned program reads back as a lowered one.
        under = min(stage, Stage.LOWERED)
        verify(program, under=under)
        text = print_program(program)
        again = parse_program(text)
        assert print_program(again) == text
        verify(again, under=under)
        for key, region in program.regions.items():
            assert print_region_body(again.regions[key].body) == print_region_body(region.body)
            alone = print_program(region.body)  # what a compiling process is sent
            assert print_program(parse_program(alone)) == alone
    assert {stage for _, stage in programs} == {Stage.TRACED, *(phase.stage for phase in PIPELINE)}


def test_a_program_read_back_computes_the_same_bits(opened: Callable[[Case], tuple[Model, Read]]) -> None:
    model, read = opened(Case("qwen3-biased"))
    _, lowered = staged(model)
    for program in (model.entries["main"], lowered.fused, lowered.programs["any"]):
        requests = sample_requests(model.spec.vocab_size, TEST_LIMITS)
        again = logits_of(parse_program(print_program(program)), read, requests)
        first = logits_of(program, read, requests)
        assert torch.equal(again.found, first.found) and torch.equal(again.exact, first.exact)


# Passes that break their promise, to see that it would be noticed.


@dataclass(frozen=True)
class _OtherEps(Pass):
    """Claims to be exact, and changes the epsilon of every norm a little."""

    name: ClassVar[str] = "other-eps"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    factor: float = 1.001

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        for node in list(rewriter.program.calls(ops.rms_norm.overload)):
            node.kwargs = {**node.kwargs, "eps": node.kwargs["eps"] * self.factor}
            rewriter.take(node)


@dataclass(frozen=True)
class _RoundedLinears(Pass):
    """Rounds every product to bf16 and back, as a careless fusion would."""

    name: ClassVar[str] = "rounded-linears"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        for node in list(rewriter.program.calls(ops.linear.overload)):
            users = list(node.users)
            narrow = rewriter.call(ops.cast, node, before=users[0], dtype=torch.bfloat16)
            wide = rewriter.call(ops.cast, narrow, before=users[0], dtype=torch.float32)
            node.replace_all_uses_with(wide, delete_user_cb=lambda user, narrow=narrow: user is not narrow)


@dataclass(frozen=True)
class _ExactMerge(MergeLinears):
    """The real pass, which adds up products in another order, with a promise that it cannot keep."""

    numerics: ClassVar[Numerics] = Numerics.EXACT


@pytest.mark.parametrize(
    ("one", "problem"),
    [
        (_OtherEps(), "the meaning changed: max error"),
        (_ExactMerge(), "declared exact, but values differ"),
        (_RoundedLinears(), "the error is "),
    ],
    ids=["other-eps", "merge-declared-exact", "rounded-linears"],
)
def test_a_broken_promise_is_noticed(one: Pass, problem: str, opened: Callable[[Case], tuple[Model, Read]]) -> None:
    model, read = opened(Case("llama-scaled"))
    before = model.entries["main"]
    after, record = run_pass(one, before, pass_context(), under=Stage.NORMAL)
    requests = sample_requests(model.spec.vocab_size, TEST_LIMITS)
    old, new = logits_of(before, read, requests), logits_of(after, read, requests)
    assert str(breach(record.numerics, old, new, torch.float32)).startswith(problem)
    assert breach(record.numerics, old, old, torch.float32) is None


def test_a_pass_that_breaks_the_program_is_named(opened: Callable[[Case], tuple[Model, Read]]) -> None:
    @dataclass(frozen=True)
    class Forgetful(Pass):
        name: ClassVar[str] = "forgetful"
        numerics: ClassVar[Numerics] = Numerics.EXACT

        def run(self, rewriter: Rewriter, context: PassContext) -> None:
            node = next(rewriter.program.calls(ops.rms_norm.overload))
            node.meta["type"] = replace(node.meta["type"], dtype=torch.float16)

    program: Program = opened(Case("llama-plain"))[0].entries["main"]
    before = print_program(program)
    with pytest.raises(VerifyError, match=r"(?s)after pass forgetful.*rms_norm"):
        run_pass(Forgetful(), program, pass_context(), under=Stage.NORMAL)
    assert print_program(program) == before, "a pass works on a copy"


def test_every_pass_declares_itself() -> None:
    passes = list(dict.fromkeys(one for phase in PIPELINE for one in phase.passes))
    assert len({one.name for one in passes}) == len(passes)
    for one in passes:
        assert isinstance(one.numerics, Numerics) and one.numerics is not Numerics.LOSSY
        assert list(one.options()) == [field.name for field in dataclasses.fields(one)]  # type: ignore[arg-type]
        assert len(one.source_hash()) == 64
        with pytest.raises(AttributeError):
            one.name = "other"  # type: ignore[misc]
    assert len({one.source_hash() for one in passes}) == len(passes), "a file holds one pass"
