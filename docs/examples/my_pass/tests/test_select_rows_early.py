"""The pass on one small program: its golden text, its numerics, its options, its refusals."""

import os
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from my_pass.select_rows_early import SelectRowsEarly

from ingot.ir.interpret import interpret
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, Stage
from ingot.ir.record import PassRecord
from ingot.ir.target import Target
from ingot.ir.tolerances import TOLERANCES
from ingot.passes.base import PassContext
from ingot.passes.manager import run_pass

HERE = Path(__file__).parent
BEFORE = (HERE / "before.ir").read_text(encoding="utf-8")


def apply(one: SelectRowsEarly, text: str = BEFORE) -> tuple[Program, PassRecord]:
    """What the pass makes of a program; the manager verifies it."""
    context = PassContext(Target.detect("cpu"), max_seq_len=16, max_batch=8, max_tokens=16)
    return run_pass(one, parse_program(text), context, under=Stage.NORMAL)


def values(program: Program) -> dict[str, torch.Tensor]:
    """Random inputs: 16 tokens, of which 3 get logits."""
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: torch.randn(value_type.bind({"T": 16, "L": 3}), generator=generator)
        for name, value_type in program.input_types().items()
    }
    return {**inputs, "logit_rows": torch.tensor([15, 0, 7], dtype=torch.int32)}


def test_golden() -> None:
    """UPDATE_GOLDENS=1 in the environment writes the text after; read it before you commit it."""
    _, record = apply(SelectRowsEarly())
    after = HERE / "after.ir"
    if os.environ.get("UPDATE_GOLDENS"):
        after.write_text(record.ir_after, encoding="utf-8")
    assert record.ir_after == after.read_text(encoding="utf-8")
    assert record.matches == 8


@pytest.mark.parametrize("past_linears", [True, False])
def test_numerics(past_linears: bool) -> None:
    """ROUNDING: no further from float64 than 1.25 times the program before, plus the tolerance table."""
    before = parse_program(BEFORE)
    after, record = apply(SelectRowsEarly(past_linears=past_linears))
    assert record.matches > 0
    given = values(before)
    exact = interpret(before, given, exact=True)["last"]
    assert torch.allclose(interpret(after, given, exact=True)["last"], exact, rtol=1e-12, atol=1e-12), "another meaning"
    error, error_before = ((interpret(one, given)["last"] - exact).abs() for one in (after, before))
    tolerance = TOLERANCES[torch.float32]
    assert bool((error <= 1.25 * error_before.max() + tolerance.atol + tolerance.rtol * exact.abs()).all())


def test_it_stops_in_front_of_a_linear_when_told_to() -> None:
    _, record = apply(SelectRowsEarly(past_linears=False))
    assert record.matches == 1 and "ingot.select_rows(%linear_2" in record.ir_after
    assert "%linear_2 is not passed" in [refusal.reason for refusal in record.refusals]


def test_what_others_read_whole_stays() -> None:
    other = BEFORE.replace("return last=%rms_norm_1", "return last=%rms_norm_1, all=%add_1")
    _, record = apply(SelectRowsEarly(), other)
    assert record.matches == 0 and record.ir_after == other
    assert [refusal.reason for refusal in record.refusals] == ["%add_1 has other uses"]


def test_options_are_fields() -> None:
    assert SelectRowsEarly().options() == {"past_linears": True}
    with pytest.raises(FrozenInstanceError):
        SelectRowsEarly().past_linears = False  # type: ignore[misc]
