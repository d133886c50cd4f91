"""The conditions that passes for steps of many tokens share."""

from typing import Any

import pytest
import torch
from staged import pass_context

from ingot.ir.artifact.plan import BATCH_INVARIANT, GPU_FEW_TOKENS, BucketClass
from ingot.ir.machine.target import Target
from ingot.ir.program import Program, Stage
from ingot.ir.types import Dim, TensorType
from ingot.passes.many_tokens import has_many_tokens, why_few_rows

MANY = (1, GPU_FEW_TOKENS + 1)


@pytest.mark.parametrize(
    ("target", "tokens", "features", "many"),
    [
        ("sm_90", MANY, (), True),
        ("sm_90", (1, GPU_FEW_TOKENS), (), False),
        ("sm_90", MANY, (BATCH_INVARIANT,), False),
        ("cpu", MANY, (), False),
    ],
)
def test_a_class_of_many_tokens(target: str, tokens: tuple[int, int], features: Any, many: bool) -> None:
    bucket = BucketClass(name="one", tokens=tokens, features=features)
    assert has_many_tokens(pass_context(target=Target.named(target), bucket=bucket)) is many


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_program_that_is_one_for_all_classes(deterministic: bool) -> None:
    context = pass_context(target=Target.named("sm_90"), bucket=None, deterministic=deterministic)
    assert has_many_tokens(context) is not deterministic


@pytest.mark.parametrize(("rows", "few"), [("T", False), ("L", True), ("B", True), (7, True)])
def test_rows_that_may_be_few(rows: str | int, few: bool) -> None:
    program = Program("main", Stage.FUSED, {rows: Dim(rows, 1, 64)} if isinstance(rows, str) else {})
    x = program.add_input("x", TensorType(torch.float32, (rows, 16)))
    assert why_few_rows(x) == (f"x has {rows} rows, which may be few in a step of many tokens" if few else "")
