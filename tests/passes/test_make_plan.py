"""make-plan: what the executor is told: instructions, the life of every value, states in place."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_plan import CheckedPlanRun, PlanError
from staged import CHUNK, emit_nothing, pass_context, staged, traced
from tiny import TINY

from ingot.frontend.checkpoint import Checkpoint
from ingot.ir.artifact.plan import Plan
from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import PassError
from ingot.ir.json_text import dump_json
from ingot.ir.numerics.harness import InterpreterRun, load_params, teacher_forced
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, Stage
from ingot.passes.make_plan import MakePlan
from ingot.passes.manager import run_pass

GOLDENS = Path(__file__).parent / "goldens"


def _planned(text: str, **context: Any) -> Plan:
    program = parse_program(text)
    executables = emit_nothing(list(program.regions.values()))
    program.regions = {name: replace(region, executable=executables[name]) for name, region in program.regions.items()}
    planned, record = run_pass(MakePlan(), program, pass_context(**context), under=Stage.PLANNED)
    assert record.ir_before == text == record.ir_after and record.numerics is Numerics.EXACT
    assert planned.plan is not None
    return planned.plan


def test_golden() -> None:
    """The plan of goldens/make-plan.before.ir is goldens/make-plan.after.json (see the `golden` fixture)."""
    plan = _planned((GOLDENS / "make-plan.before.ir").read_text(encoding="utf-8"))
    after = GOLDENS / "make-plan.after.json"
    if os.environ.get("UPDATE_GOLDENS"):
        after.write_text(dump_json(plan.to_json()), encoding="utf-8")
    assert dump_json(plan.to_json()) == after.read_text(encoding="utf-8")
    assert Plan.model_validate_json(after.read_text(encoding="utf-8")) == plan


@pytest.mark.parametrize(
    ("masks", "granule"),
    [
        (("causal", "window_7"), 1),
        (("block_causal_8", "causal"), 8),
        (("block_causal_8", "block_causal_12"), 24),
        (("bidirectional", "causal"), 1 << 30),
    ],
)
def test_a_plan_states_how_far_tokens_see_each_other(masks: tuple[str, str], granule: int) -> None:
    lines = [
        f'%a{i} = ingot.paged_attention(%q, %kv.0, %page_table, %q_starts, %q_lens, %kv_lens, scale=0.5, mask="{mask}")'
        " : f32[T, 2, 8] @reference"
        for i, mask in enumerate(masks)
    ]
    inputs = [
        f"input {name}: i32[{dims}]"
        for name, dims in {"page_table": "B, P", "q_starts": "B", "q_lens": "B", "kv_lens": "B"}.items()
    ]
    text = "\n".join(
        [
            "program main stage=LOWERED bucket=any tokens=[1, 8] q_max=any",
            *(f"dim {name} in [1, 8]" for name in ("T", "B", "P", "pages")),
            "input q: f32[T, 2, 8]",
            *inputs,
            "state kv.0: paged_kv f32[pages, 2, 16, 2, 8] group=full unit=token",
            *lines,
            "return one=%a0, other=%a1, kv.0=%kv.0\n",
        ]
    )
    assert _planned(text).granule == granule


@pytest.mark.parametrize("name", ["llama-biased", "qwen3-scaled"])
def test_a_plan_computes_what_its_program_says(name: str, checkpoint: Callable[[str], Path]) -> None:
    """Chunk after chunk the same bits as the interpreter, states included; each value freed, and none too early."""
    found = Checkpoint.open(checkpoint(name))
    _, lowered = staged(traced(found.config))
    program = lowered.programs["any"]
    params = load_params(program.params, found.read)
    requests = [prompt for prompt in TINY[name].prompts() if len(prompt) in (1, 17, 33)]
    interpreter = InterpreterRun(program, params)
    run = CheckedPlanRun(program, params, {key: tensor.clone() for key, tensor in interpreter.states.items()})
    wanted, got = (
        teacher_forced(program.input_types(), one, requests, chunk=CHUNK, seed=3) for one in (interpreter, run)
    )
    assert all(torch.equal(left, right) for left, right in zip(wanted, got, strict=True))
    for key, state in interpreter.states.items():
        assert torch.equal(run.states[key].nan_to_num(7), state.nan_to_num(7)), key
    # What a step feeds (4), the stream and its norm, q, k and v or gate and up: the same at every depth.
    assert run.peak <= 9, "what is dead is kept"


def test_states_move_in_place_and_in_order() -> None:
    _, lowered = staged(traced(TINY["llama-plain"].config))
    plan = lowered.programs["any"].plan
    assert plan is not None
    (bucket,) = plan.buckets
    updates = [name for instruction in bucket.instructions for name in instruction.updates]
    assert updates == ["token_counts", "kv.0", "kv.1", "kv.2", "last_token", "position"]
    assert plan.states.keys() == {*updates, "edits"}  # which the host writes
    for number, instruction in enumerate(bucket.instructions):
        if not instruction.updates:
            continue
        assert instruction.results == () and not any(name in bucket.values for name in instruction.updates)
        for name in instruction.updates:
            readers = [
                index
                for index, other in enumerate(bucket.instructions)
                if any(getattr(argument, "ref", None) == name for argument in other.args) and index != number
            ]
            # A cache and the counts are read after they are written; the other rows are read by `feed`, at the start,
            # and moved at the end; the last token is also read by `sample`.
            if name in ("last_token", "position"):
                assert readers[0] == 0 and readers[1:] == ([number - 2] if name == "last_token" else [])
            else:
                assert readers and all(index > number for index in readers)
    assert plan.outputs.keys() == {"tokens", "logits", "logprob_ids", "logprobs", "ranks"}
    assert bucket.values["logits"].buffer == "pool"


VALUES = """program main stage=LOWERED bucket=any tokens=[1, 8] q_max=any
dim T in [1, 8]
input x: f32[T, 8]
input rows: i32[T]
param w: f32[8] = source(name="w")
%mul = aten.mul.Tensor(%x, %w) : f32[T, 8] @reference
%view = aten.view.default(%mul, [-1, 4, 2]) : f32[T, 4, 2] @reference
%add_rms_norm = ingot.add_rms_norm(%mul, %mul, %w, eps=1e-05) : (f32[T, 8], f32[T, 8]) @rowwise
%item = getitem(%add_rms_norm, 1) : f32[T, 8]
%cast = ingot.cast(%item, dtype=f64) : f64[T, 8] @reference
return y=%cast, v=%view
"""


def test_values() -> None:
    """Frees, views, results that are not used, dtypes and lists among the arguments."""
    (bucket,) = _planned(VALUES).buckets
    described = [(one.target, one.backend, one.results, one.frees) for one in bucket.instructions]
    assert described == [
        ("aten.mul.Tensor", "reference", ("mul",), ()),
        ("aten.view.default", "reference", ("v",), ()),  # an output is known by its own name, and kept
        ("ingot.add_rms_norm", "rowwise", ("", "item"), ("mul",)),
        ("ingot.cast", "reference", ("y",), ("item",)),
    ]
    assert {name: value.buffer for name, value in bucket.values.items()} == {
        "mul": "pool",
        "v": "view",
        "item": "pool",
        "y": "pool",
    }
    assert bucket.instructions[1].args[1] == (-1, 4, 2)
    assert bucket.instructions[3].kwargs["dtype"].model_dump() == {"dtype": "f64"}  # type: ignore[union-attr]
    assert bucket.nodes_per_backend() == {"reference": 3, "rowwise": 1}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("return y=%cast, v=%view", "return y=%cast, v=%view, w=%cast", "output 'w' is the same value as output 'y'"),
        ("return y=%cast, v=%view", "return y=%cast, v=%view, x=%x", "output 'x' is the same value as 'x'"),
    ],
)
def test_outputs_are_values_of_their_own(old: str, new: str, problem: str) -> None:
    with pytest.raises(PassError, match=f"pass make-plan: {problem}"):
        _planned(VALUES.replace(old, new))


def test_a_region_needs_its_executable() -> None:
    program = parse_program((GOLDENS / "make-plan.before.ir").read_text(encoding="utf-8"))
    with pytest.raises(PassError, match=r"(?s)pass make-plan: region 'r0' has no executable.*emit-executables before"):
        run_pass(MakePlan(), program, pass_context(), under=Stage.PLANNED)


# The checker itself: what it must notice in a plan.


def _damaged(plan: Plan, index: int, **changes: Any) -> Plan:
    (bucket,) = plan.buckets
    instructions = list(bucket.instructions)
    instructions[index] = instructions[index].model_copy(update=changes)
    return plan.model_copy(update={"buckets": (bucket.model_copy(update={"instructions": tuple(instructions)}),)})


@pytest.mark.parametrize(
    ("index", "changes", "problem"),
    [
        (1, {"frees": ("mul",)}, "reads 'mul', which is not there"),
        (2, {"frees": ()}, "nothing frees"),
        (3, {"frees": ("item", "item")}, "frees 'item', which is not there"),
        (3, {"frees": ("item", "v")}, "yields the outputs"),
        (2, {"results": ("item", "v")}, "makes 'v' again"),
        (2, {"results": ("item",)}, "yields 2 values, 1 are named"),
    ],
)
def test_the_checker_notices(index: int, changes: dict[str, Any], problem: str) -> None:
    program: Program = parse_program(VALUES)
    plan = _planned(VALUES)
    inputs = {"x": torch.ones(3, 8), "rows": torch.zeros(3, dtype=torch.int32)}
    program.plan = plan
    CheckedPlanRun(program, {"w": torch.ones(8)})(inputs)
    program.plan = _damaged(plan, index, **changes)
    with pytest.raises(PlanError, match=problem):
        CheckedPlanRun(program, {"w": torch.ones(8)})(inputs)
