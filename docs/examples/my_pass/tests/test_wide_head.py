"""The pass on one small program: its golden text, its numerics, its options, its refusals."""

import os
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from my_pass.wide_head import WideHead

from ingot.ir.artifact.record import PassRecord
from ingot.ir.interpret import interpret
from ingot.ir.machine.target import Target
from ingot.ir.numerics.harness import load_params
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, Stage
from ingot.passes.base import PassContext
from ingot.passes.manager import run_pass

HERE = Path(__file__).parent
BEFORE = (HERE / "before.ir").read_text(encoding="utf-8")


def apply(one: WideHead, text: str = BEFORE) -> tuple[Program, PassRecord]:
    """Run the pass on a program; the manager verifies the result."""
    context = PassContext(Target.detect("cpu"), max_seq_len=16, max_batch=8, max_tokens=16)
    return run_pass(one, parse_program(text), context, under=Stage.NORMAL)


def logits(program: Program, *, exact: bool = False) -> torch.Tensor:
    """Return the logits of three of 16 tokens, with a random checkpoint."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"embed": (50, 24), "norm": (24,)}
    stored = {name: torch.randn(size, generator=generator).bfloat16() for name, size in sizes.items()}
    inputs = {
        "tokens": torch.randint(0, 50, (16,), generator=generator, dtype=torch.int32),
        "logit_rows": torch.tensor([15, 0, 7], dtype=torch.int32),
    }
    return interpret(program, {**inputs, **load_params(program.params, stored.__getitem__)}, exact=exact)["logits"]


def test_golden() -> None:
    """Compare the text after the pass. UPDATE_GOLDENS=1 writes it; review it before you commit."""
    _, record = apply(WideHead())
    after = HERE / "after.ir"
    if os.environ.get("UPDATE_GOLDENS"):
        after.write_text(record.ir_after, encoding="utf-8")
    assert record.ir_after == after.read_text(encoding="utf-8")
    assert record.matches == 1


def test_numerics() -> None:
    """Check ROUNDING: equal in float64, and no larger error than before. This pass promises a smaller one."""
    before, after = parse_program(BEFORE), apply(WideHead())[0]
    exact = logits(before, exact=True)
    assert torch.allclose(logits(after, exact=True), exact, rtol=1e-12, atol=1e-12), "another meaning"
    error, error_before = ((logits(one) - exact).abs().mean() for one in (after, before))
    assert error < 0.9 * error_before


REFUSALS = {
    "float32": (BEFORE.replace("bf16", "f32"), "it is computed in float32 already"),
    "other uses": (BEFORE.replace("return ", "return narrow=%linear, "), "%linear has other uses"),
    "no param": (
        BEFORE.replace('param embed.weight: bf16[50, 24] tp=split(0) = source(name="embed")\n', "").replace(
            "input logit_rows", "input embed.weight: bf16[50, 24]\ninput logit_rows"
        ),
        "the weight is no param but the input 'embed.weight'",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_stays(name: str) -> None:
    text, reason = REFUSALS[name]
    _, record = apply(WideHead(), text)
    assert record.matches == 0 and [refusal.reason for refusal in record.refusals] == [reason]


def test_a_tied_weight_is_copied_only_where_that_is_allowed() -> None:
    _, record = apply(WideHead(copy_tied=False))
    (refusal,) = record.refusals
    assert record.matches == 0 and refusal.reason.startswith("the param 'embed.weight' is used elsewhere too")


def test_options_are_fields() -> None:
    assert WideHead().options() == {"copy_tied": True}
    with pytest.raises(FrozenInstanceError):
        WideHead().copy_tied = False  # type: ignore[misc]
