"""choose-layouts: one layout for each weight over all bucket classes; a second copy only within the budget."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_table import patch_backends
from staged import LIMITS, emit_nothing, pass_context, traced
from tiny import TINY
from torch import fx

import ingot.compile.competing
import ingot.compile.request
from ingot import LLM, SamplingParams, compile_model
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.frontend.checkpoint import Checkpoint
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.backend import Claim, Yes
from ingot.ir.errors import OptionError
from ingot.ir.layout import Layout, layouts_of
from ingot.ir.machine.target import Target
from ingot.ir.numerics.harness import InterpreterRun, load_params, teacher_forced
from ingot.ir.numerics.tolerances import TOLERANCES
from ingot.ir.ops import linear, op_of
from ingot.ir.parse import parse_program
from ingot.ir.program import Stage
from ingot.ir.text import print_program
from ingot.ir.types import Split
from ingot.passes.choose_layouts import ChooseLayouts, second_copies
from ingot.passes.manager import Lowered, run_pass, run_pipeline

pytestmark = pytest.mark.one_in_file(3)

NAME = "llama-plain"
BUCKETS = (BucketClass(name="decode", tokens=(1, 8), q_max=1), BucketClass(name="any", tokens=(1, LIMITS.max_tokens)))


@dataclass(frozen=True)
class Wanting(Reference):
    """Takes linears at the cost that a bucket class has for a layout, anything else as the reference does."""

    costs: dict[tuple[str, Layout], float]

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Claim:
        if any(op_of(node.target) is not linear for node in nodes):
            return super().claim(nodes, target, bucket)
        return tuple(
            Yes(cost, {"weight": layout}) for (name, layout), cost in self.costs.items() if name == bucket.name
        )


ROWS, COLUMNS = Layout.ROW_MAJOR, Layout.COLUMN_MAJOR
# Decode gains 3 by columns, the other class 5 by rows: rows win where there is one copy.
APART = {("decode", ROWS): 4.0, ("decode", COLUMNS): 1.0, ("any", ROWS): 1.0, ("any", COLUMNS): 6.0}
BY_COLUMNS = {**APART, ("any", COLUMNS): 2.0}


def lower(costs: Mapping[tuple[str, Layout], float], budget: float = 1.0) -> Lowered:
    return _lower(tuple(costs.items()), budget)


@functools.cache
def _lower(costs: tuple[tuple[tuple[str, Layout], float], ...], budget: float) -> Lowered:
    backends = (Wanting(dict(costs)), Rowwise())
    context = pass_context(bucket=None, backends=backends, weight_budget=budget, emit=emit_nothing)
    return run_pipeline(traced(TINY[NAME].config), context, BUCKETS)


def linear_layouts(lowered: Lowered, bucket: str) -> set[Layout]:
    return {layouts_of(node)["weight"] for node in lowered.programs[bucket].calls(linear.overload)}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("costs", "budget", "decode", "rest"),
    [
        (APART, 1.0, ROWS, ROWS),
        (BY_COLUMNS, 1.0, COLUMNS, COLUMNS),
        (APART, 2.0, COLUMNS, ROWS),
        (BY_COLUMNS, 2.0, COLUMNS, ROWS),
        ({(bucket, layout): 1.0 for bucket in ("decode", "any") for layout in Layout}, 2.0, ROWS, ROWS),
    ],
    ids=["rows pay", "columns pay", "both", "both again", "all the same"],
)
def test_the_layout_that_all_classes_together_pay_least_for(
    costs: dict[tuple[str, Layout], float], budget: float, decode: Layout, rest: Layout
) -> None:
    lowered = lower(costs, budget)
    assert linear_layouts(lowered, "decode") == {decode} and linear_layouts(lowered, "any") == {rest}
    linears = len(list(lowered.programs["any"].calls(linear.overload)))
    assert len(second_copies(lowered.params())) == (linears if decode is not rest else 0)


def test_a_budget_between_holds_what_saves_most_for_its_size() -> None:
    """Every linear saves the same, so the smallest weights are copied."""
    whole = lower(APART, 2.0)
    every = sorted(copy.bytes for copy in second_copies(whole.params()))
    one_copy = lower(APART).programs["any"].plan
    assert one_copy is not None
    budget = 1 + (every[0] + every[1] + 0.5) / one_copy.memory.weights
    some = sorted(copy.bytes for copy in second_copies(lower(APART, budget).params()))
    assert some == every[:2]


def test_numerics(checkpoint: Callable[[str], Path]) -> None:
    """By rows, by columns and with both, what a step computes is the same."""
    opened = Checkpoint.open(checkpoint(NAME))
    requests = TINY[NAME].prompts()[:3]

    def logits(lowered: Lowered, bucket: str) -> torch.Tensor:
        program = lowered.programs[bucket]
        run = InterpreterRun(program, load_params(program.params, opened.read), exact=True)
        return torch.cat(teacher_forced(program.input_types(), run, requests, chunk=8, seed=3))

    wanted = logits(lower(APART), "any")
    tolerance = TOLERANCES[torch.float64]
    for lowered, bucket in ((lower(BY_COLUMNS), "any"), (lower(APART, 2.0), "decode")):
        assert COLUMNS in linear_layouts(lowered, bucket)
        # float64 over the depth of the model, as in the contracts of passes.
        torch.testing.assert_close(
            logits(lowered, bucket), wanted, rtol=100 * tolerance.rtol, atol=100 * tolerance.atol
        )


def test_a_weight_that_is_read_otherwise_too_stays_as_it_is() -> None:
    """The table of a tied embedding is read by rows."""
    tied = {**TINY[NAME].config, "tie_word_embeddings": True}
    context = pass_context(bucket=None, backends=(Wanting(BY_COLUMNS), Rowwise()), emit=emit_nothing)
    lowered = run_pipeline(traced(tied), context, BUCKETS)
    calls = list(lowered.programs["any"].calls(linear.overload))
    assert [layouts_of(node)["weight"] for node in calls].count(ROWS) == 1
    assert layouts_of(calls[-1])["weight"] is ROWS


SHARDED = """\
program main stage=FUSED bucket=any tokens=[1, 8] q_max=any
dim T in [1, 8]
input x: bf16[T, 6]
param w: bf16[4, 6] tp=split(0, segments=[1, 3]) = source(name="w")
%linear = ingot.linear(%x, %w) : bf16[T, 4]
return y=%linear
"""


def test_the_recipe_and_the_split_turn_with_the_weight() -> None:
    program = parse_program(SHARDED)
    bucket = BucketClass(name="any", tokens=(1, 8))
    context = pass_context(bucket=bucket, buckets=(bucket,), backends=(Wanting({("any", COLUMNS): 1.0}),))
    turned, record = run_pass(ChooseLayouts(), program, context, under=Stage.FUSED)
    assert record.matches == 1
    (name, spec), *rest = turned.params.items()
    assert not rest and name == "w.transposed" and str(spec.type) == "bf16[6, 4]"
    assert str(spec.recipe) == 'permute(source(name="w"), dims=[1, 0])'
    assert spec.split == Split("tp", 1, (1, 3))
    assert print_program(parse_program(print_program(turned))) == print_program(turned)


def test_a_claim_for_another_layout_is_refused_with_what_it_wants() -> None:
    without = run_pipeline(
        traced(TINY[NAME].config),
        pass_context(bucket=None, backends=(Wanting({("any", COLUMNS): 1.0}), Rowwise()), emit=emit_nothing),
        BUCKETS[1:],
        tuple(
            replace(phase, passes=tuple(one for one in phase.passes if one.name != "choose-layouts"))
            for phase in ingot.compile.request.edit_pipeline("default")
        ),
    )
    reasons = {refusal.reason for record in without.records for refusal in record.refusals}
    assert "reference: it needs weight column-major, but the program has weight row-major" in reasons


def test_both_copies_are_resident_and_listed_and_serve_the_same_tokens(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingot.compile.request.Request, "buckets", lambda self, entry: BUCKETS)
    backends = {"reference": lambda: Wanting(APART), "rowwise": Rowwise}
    patch_backends(monkeypatch, backends)
    options: dict[str, Any] = {"backend": "reference", "max_batch": 8, "max_tokens": 256, "max_seq_len": 160}
    one = compile_model(checkpoint(NAME), tmp_path / "one.ingot", **options)
    two = compile_model(checkpoint(NAME), tmp_path / "two.ingot", weight_budget=2.0, **options)
    assert not one.second_copies and one.request_key != two.request_key
    copied = sum(copy.bytes for copy in two.second_copies)
    assert two.weight_bytes == one.weight_bytes + copied == two.plans.plans["main"].memory.weights
    choices = json.loads((tmp_path / "two.ingot" / "choices.json").read_text())
    listed = {copy.first: copy.second for copy in two.second_copies}
    assert all(choices[bucket]["second_copies"] == listed for bucket in ("decode", "any"))
    prompts = [{"prompt_token_ids": prompt} for prompt in TINY[NAME].prompts()]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    tokens = [
        [output.outputs[0].token_ids for output in LLM(tmp_path / name).generate(prompts, params)]
        for name in ("one.ingot", "two.ingot")
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("budget", [0.5, 3.0, float("nan"), True, "2"])
def test_a_budget_that_makes_no_sense(budget: Any, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="the weight budget is"):
        compile_model(checkpoint(NAME), tmp_path / "a.ingot", backend="reference", weight_budget=budget)
