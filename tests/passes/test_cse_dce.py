"""cse and dead-code elimination keep to what ops declare: interpreted, no program changes by a bit."""

import operator
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from staged import pass_context
from torch import fx

from ingot.ir import build, ops
from ingot.ir.artifact.record import Numerics, PassRecord
from ingot.ir.errors import InternalError, VerifyError
from ingot.ir.interpret import interpret
from ingot.ir.ops import OPS, Effect, Op, define
from ingot.ir.parse import parse_program
from ingot.ir.placements import whole
from ingot.ir.program import ParamSpec, Program, Stage, StateSpec, op_counts
from ingot.ir.recipe import source
from ingot.ir.text import print_program
from ingot.ir.types import Dim, StateType, TensorType
from ingot.ir.verify import verify
from ingot.passes.cse import EliminateCommonSubexpressions
from ingot.passes.dce import eliminate_dead_code
from ingot.passes.manager import run_pass
from ingot.passes.normalize import Normalize

Apply = Callable[..., tuple[Program, PassRecord]]
CSE = EliminateCommonSubexpressions()


def test_golden(golden: Callable[..., PassRecord]) -> None:
    record = golden(CSE)
    assert record.matches == 3  # a param, a norm, a product
    assert record.numerics is Numerics.EXACT
    assert record.op_count_diff == {"aten.add.Tensor": -1, "aten.mul.Tensor": -1, "ingot.rms_norm": -1}


def test_arguments_must_be_the_same(apply: Apply) -> None:
    """Equal in Python is not the same: 1 keeps a dtype that 1.0 promotes, and -0.0 gives zeros of another sign."""
    text = """program main stage=TRACED
dim T in [1, 8]
input x: f32[T, 8]
%mul = aten.mul.Tensor(%x, 1) : f32[T, 8]
%mul_1 = aten.mul.Tensor(%x, True) : f32[T, 8]
%mul_2 = aten.mul.Tensor(%x, 0.0) : f32[T, 8]
%mul_3 = aten.mul.Tensor(%x, -0.0) : f32[T, 8]
%cast = ingot.cast(%x, dtype=f16) : f16[T, 8]
%cast_1 = ingot.cast(%x, dtype=bf16) : bf16[T, 8]
return a=%mul, b=%mul_1, c=%mul_2, d=%mul_3, e=%cast, f=%cast_1
"""
    _, record = apply(CSE, text)
    assert record.matches == 0 and record.op_count_diff == {} and record.ir_after == text


def test_a_default_is_the_argument_that_it_stands_for(apply: Apply) -> None:
    text = """program main stage=TRACED
dim T in [1, 8]
input x: f32[T, 8]
param w: f32[8, 8] = source(name="w")
%linear = ingot.linear(%x, %w) : f32[T, 8]
%linear_1 = ingot.linear(%x, %w, None) : f32[T, 8]
return a=%linear, b=%linear_1
"""
    assert apply(CSE, text)[1].ir_after.splitlines()[-1] == "return a=%linear, b=%linear"


# Two reads before a write that are one, and two after it that are another.
READS = """program main stage=CACHED
dim T in [1, 8]
dim B in [1, 4]
dim P in [1, 2]
dim pages in [1, 4]
input q: f32[T, 2, 4]
input k: f32[T, 2, 4]
input slots: i64[T]
input page_table: i32[B, P]
input q_starts: i32[B]
input q_lens: i32[B]
input kv_lens: i32[B]
state kv: paged_kv f32[pages, 2, 4, 2, 4] group=full unit=token
%a = ingot.paged_attention(%q, %kv, %page_table, %q_starts, %q_lens, %kv_lens, scale=0.5) : f32[T, 2, 4]
%b = ingot.paged_attention(%q, %kv, %page_table, %q_starts, %q_lens, %kv_lens, scale=0.5) : f32[T, 2, 4]
%written = ingot.kv_append(%kv, %k, %k, %slots) : state<kv>
%c = ingot.paged_attention(%q, %written, %page_table, %q_starts, %q_lens, %kv_lens, scale=0.5) : f32[T, 2, 4]
%d = ingot.paged_attention(%q, %written, %page_table, %q_starts, %q_lens, %kv_lens, scale=0.5) : f32[T, 2, 4]
return a=%a, b=%b, c=%c, d=%d, kv=%written
"""


def test_reads_on_two_sides_of_a_write_stay_two() -> None:
    after, record = run_pass(CSE, parse_program(READS), pass_context(), under=Stage.FUSED)
    assert record.ir_after.splitlines()[-1] == "return a=%a, b=%a, c=%c, d=%c, kv=%written"
    assert record.matches == 2 and op_counts(after) == {"ingot.paged_attention": 2, "ingot.kv_append": 1}


def test_two_equal_writes_stay_two() -> None:
    """Of two states, and one behind the other of one state."""
    text = """program main stage=CACHED
dim T in [1, 8]
dim pages in [1, 4]
input k: f32[T, 2, 4]
input slots: i64[T]
state kv.0: paged_kv f32[pages, 2, 4, 2, 4] group=full unit=token
state kv.1: paged_kv f32[pages, 2, 4, 2, 4] group=full unit=token
%a = ingot.kv_append(%kv.0, %k, %k, %slots) : state<kv.0>
%b = ingot.kv_append(%kv.1, %k, %k, %slots) : state<kv.1>
%c = ingot.kv_append(%b, %k, %k, %slots) : state<kv.1>
return kv.0=%a, kv.1=%c
"""
    after, record = run_pass(CSE, parse_program(text), pass_context(), under=Stage.FUSED)
    assert record.matches == 0 and print_program(after) == text


def test_a_write_that_is_not_returned_is_not_dropped() -> None:
    """It would be a lost token in the cache: dead-code elimination keeps it, and the verifier names it."""
    lines = [line for line in READS.splitlines() if not line.startswith(("%c", "%d"))]
    program = parse_program("\n".join([*lines[:-1], "return a=%a, b=%b, kv=%kv"]) + "\n")
    assert eliminate_dead_code(program) == 0
    assert [node.name for node in program.calls(ops.kv_append.overload)] == ["written"]
    with pytest.raises(VerifyError, match="nothing uses the result") as caught:
        run_pass(Normalize(), program, pass_context(), under=Stage.FUSED)
    assert "%written" in caught.value.where


def test_a_new_version_is_not_dropped_without_its_write() -> None:
    text = """program main stage=CACHED
dim B in [1, 4]
dim R in [1, 4]
dim L in [1, 4]
input rows: i32[B]
input kv_lens: i32[B]
input sampled: i32[L]
input sample_index: i32[B]
state last_token: row i32[R] group=rows unit=sequence
state position: row i32[R] group=rows unit=sequence
%advance = ingot.advance(%last_token, %position, %rows, %kv_lens, %sampled, %sample_index) : (state<last_token>, state<position>)
%item = getitem(%advance, 0) : state<last_token>
%item_1 = getitem(%advance, 1) : state<position>
return last_token=%item, position=%position
"""  # noqa: E501  # one line of text a call
    program = parse_program(text)
    assert eliminate_dead_code(program) == 0 and print_program(program) == text


# An op that draws anew with each call, as no op of the dialect does.


@cache
def _dice() -> Op:
    throws = iter(range(1, 1_000_000))

    @define(placement=whole, flops=1, samples=lambda g, dtype: [], effect=Effect.RANDOM)
    def dice(x: torch.Tensor) -> torch.Tensor:
        return x + (0 if x.is_meta else next(throws))

    return OPS.pop("dice")  # known within these tests only


@pytest.fixture
def dice(monkeypatch: pytest.MonkeyPatch) -> Op:
    monkeypatch.setitem(OPS, "dice", _dice())
    return _dice()


def test_random_calls_are_not_joined(dice: Op) -> None:
    program = Program("main", Stage.NORMAL, {"T": Dim("T", 1, 8)})
    x = program.add_input("x", TensorType(torch.float32, ("T", 8)))
    first, second, _unused = (build.call(program, dice.overload, (x,)) for _ in range(3))
    program.set_outputs({"a": first, "b": second})
    after, record = run_pass(CSE, program, pass_context(), under=Stage.NORMAL)
    assert record.matches == 0 and op_counts(after) == {"ingot.dice": 2}, "the third is unused, and may go"
    outputs = interpret(after, {"x": torch.zeros(2, 8)})
    assert not torch.equal(outputs["a"], outputs["b"])


def test_a_region_has_the_effect_of_its_body(dice: Op) -> None:
    text = """program main stage=FUSED
dim T in [1, 8]
input x: f32[T, 8]
region r0 @reference {{
  input in0: f32[T, 8]
  %y = {call} : f32[T, 8]
  return out0=%y
}}
%a = region.r0(%x) : f32[T, 8] @reference
%b = region.r0(%x) : f32[T, 8] @reference
return a=%a, b=%b
"""
    for call, left in (("aten.mul.Tensor(%in0, 2)", 1), ("ingot.dice(%in0)", 2)):
        after, _ = run_pass(CSE, parse_program(text.format(call=call)), pass_context(), under=Stage.LOWERED)
        assert op_counts(after) == {"region": left}


# Contracts that would be wrong, and who notices.


def test_reading_a_state_must_be_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "paged_attention", replace(OPS["paged_attention"], effect=Effect.PURE))
    with pytest.raises(VerifyError, match=r"op ingot\.paged_attention is declared pure and is given %kv"):
        verify(parse_program(READS))


@pytest.mark.parametrize(
    ("states", "effect", "message"),
    [
        (("kv",), Effect.READS_STATE, "writes state and is declared 'reads state'"),
        (("kv",), Effect.RANDOM, "writes state and is declared 'random'"),
        ((), Effect.WRITES_STATE, "writes state but names none"),
    ],
)
def test_a_contract_cannot_contradict_the_states(states: tuple[str, ...], effect: Effect, message: str) -> None:
    def wrong(kv: torch.Tensor) -> torch.Tensor:
        return kv

    with pytest.raises(InternalError, match=message):
        define(placement=whole, flops=1, samples=lambda g, dtype: [], states=states, effect=effect)(wrong)
    assert "wrong" not in OPS


def test_every_op_has_the_effect_that_its_states_say() -> None:
    for op in OPS.values():
        assert (op.effect is Effect.WRITES_STATE) == bool(op.states)
        assert op.effect is not Effect.RANDOM, "draws are keyed by arguments"
    assert {name for name, op in OPS.items() if op.effect is Effect.READS_STATE} == {
        "paged_attention",
        "paged_choose_positions",
        "partial_attention",
        "sparse_attention",
        "feed",
        "sample",
        "take_drafts",
        "take_block",
        "tree_ancestors",
        "read_rows",
        "lora_shrink",
        "lora_expand",
    }


# Random programs: few arguments, so that calls are often equal; writes in between; many results that are not used.


def random_program(seed: int) -> tuple[Program, dict[str, torch.Tensor]]:
    """A program over a cache and two row states that is right by the verifier but for unused calls, and its values."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    names = ("T", "B", "P", "R", "L", "pages")
    program = Program("main", Stage.TRACED, {name: Dim(name, 1, 8) for name in names})
    x = program.add_input("x", TensorType(torch.float32, ("T", 8)))
    given: dict[str, torch.Tensor] = {"x": torch.randn(3, 8, generator=generator)}

    def integers(name: str, dims: tuple[str, ...], *values: object, dtype: torch.dtype = torch.int32) -> fx.Node:
        given[name] = torch.tensor(values, dtype=dtype)
        return program.add_input(name, TensorType(dtype, dims))

    slots = [
        integers(f"slots.{i}", ("T",), *values, dtype=torch.int64) for i, values in enumerate(((0, 1, 2), (2, 5, 1)))
    ]
    table = integers("page_table", ("B", "P"), [0, 1])
    starts, lens = integers("q_starts", ("B",), 0), integers("q_lens", ("B",), 3)
    rows, kv_lens = integers("rows", ("B",), 1), integers("kv_lens", ("B",), 3)
    sampled, index = integers("sampled", ("L",), 7), integers("sample_index", ("B",), 0)
    weights = []
    for name, stored in (("w", "a"), ("w.again", "a"), ("v", "b")):
        weights.append(program.add_param(name, ParamSpec(TensorType(torch.float32, (8,)), source(stored))))
        given[name] = torch.randn(8, generator=torch.Generator().manual_seed(ord(stored)))
    kv_type = TensorType(torch.float32, ("pages", 2, 4, 2, 4))
    row_type = TensorType(torch.int32, ("R",))
    states = {"kv": program.add_state("kv", StateSpec("paged_kv", "full", "token", kv_type))}
    given["kv"] = torch.randn(2, 2, 4, 2, 4, generator=generator)
    for name in ("last_token", "position"):
        states[name] = program.add_state(name, StateSpec("row", "rows", "sequence", row_type))
        given[name] = torch.tensor([4, 2, 0], dtype=torch.int32)

    def call(target: object, *args: object, **kwargs: object) -> fx.Node:
        return build.call(program, target.overload if isinstance(target, Op) else target, args, kwargs)

    values = [x]
    for _ in range(24):
        # Few to choose from, and early ones often: that makes calls equal.
        a, b = (draw.choice(values[: draw.choice((2, len(values)))]) for _ in range(2))
        match draw.choice((0, 1, 2, 3, 4, 5, 5, 5, 6, 7)):
            case 0:
                values.append(call(torch.ops.aten.add.Tensor, a, b))
            case 1:
                values.append(call(torch.ops.aten.mul.Tensor, a, draw.choice((1, 1.0, 2.0, 0.0, -0.0))))
            case 2:
                values.append(call(ops.rms_norm, a, draw.choice(weights), eps=draw.choice((1e-5, 1e-6))))
            case 3:
                both = call(ops.add_rms_norm, a, b, draw.choice(weights), eps=1e-5)
                values += [call(operator.getitem, both, draw.randrange(2)) for _ in range(2)]
            case 4:
                values.append(call(torch.ops.aten.view.default, a, [-1, 8]))
            case 5:
                heads = call(torch.ops.aten.view.default, a, [-1, 2, 4])
                read = call(ops.paged_attention, heads, states["kv"], table, starts, lens, kv_lens, scale=0.5)
                values.append(call(torch.ops.aten.view.default, read, [-1, 8]))
            case 6:
                heads = call(torch.ops.aten.view.default, a, [-1, 2, 4])
                states["kv"] = call(ops.kv_append, states["kv"], heads, heads, draw.choice(slots))
            case 7:
                moved = call(ops.advance, states["last_token"], states["position"], rows, kv_lens, sampled, index)
                for item, name in enumerate(("last_token", "position")):
                    states[name] = call(operator.getitem, moved, item)
    outputs = {f"out{i}": node for i, node in enumerate(draw.choices(values[1:] or values, k=4))}
    program.set_outputs({**outputs, **states})
    return program, given


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_keep_every_bit(seed: int) -> None:
    program, given = random_program(seed)
    before = interpret(program, given)
    writes = op_counts(program)
    joined = program
    for one in (Normalize(), CSE):
        joined, _ = run_pass(one, joined, pass_context(), under=Stage.FUSED)
    after = interpret(joined, given)
    assert before.keys() == after.keys() == {*program.outputs}
    for name, tensor in before.items():
        # As bits: 0.0 and -0.0 are equal.
        same = torch.equal(tensor.contiguous().view(torch.int32), after[name].contiguous().view(torch.int32))
        assert same, name
    counts = op_counts(joined)
    assert all(counts.get(name, 0) == writes.get(name, 0) for name in ("ingot.kv_append", "ingot.advance"))
    again, record = run_pass(CSE, joined, pass_context(), under=Stage.FUSED)
    assert record.matches == 0 and print_program(again) == print_program(joined), "a fixed point"
    assert all(
        isinstance(node.meta["type"], StateType)
        for name, node in joined.output_nodes().items()
        if name in joined.states
    )


def test_random_programs_have_what_there_is_to_find() -> None:
    """The property above would hold of programs with nothing equal and nothing dead."""
    found = {"joined": 0, "reads": 0, "dead": 0, "writes": 0}
    for seed in range(60):
        program, _ = random_program(seed)
        copy = program.copy()
        found["dead"] += eliminate_dead_code(copy)
        after, record = run_pass(CSE, copy, pass_context(), under=Stage.FUSED)
        found["joined"] += record.matches
        found["reads"] -= record.op_count_diff.get("ingot.paged_attention", 0)
        found["writes"] += op_counts(after).get("ingot.kv_append", 0)
    assert all(count >= 5 for count in found.values()), found
