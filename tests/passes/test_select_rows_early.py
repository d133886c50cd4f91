"""select-rows-early: rows that get no logits are not computed, the others as before; and where it stays out."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mesh_program import HEAD
from staged import LIMITS, logits_of, pass_context, staged, traced
from tiny import TINY

from ingot import LLM, SamplingParams, compile_model, open_artifact
from ingot.backends.cublas.emit import Cublas
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.backends.triton.emit import Triton
from ingot.frontend.checkpoint import Checkpoint
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.record import Numerics, PassRecord
from ingot.ir.interpret import interpret, interpret_ranks
from ingot.ir.machine.target import Target
from ingot.ir.numerics.tolerances import TOLERANCES
from ingot.ir.parse import parse_program
from ingot.ir.program import VIEWS, Program, Stage, op_counts, target_name, tensor_type
from ingot.passes.manager import run_pass, run_pipeline
from ingot.passes.pipeline import edit_pipeline
from ingot.passes.select_rows_early import SelectRowsEarly

BEFORE = (Path(__file__).parent / "goldens" / "select-rows-early.before.ir").read_text(encoding="utf-8")
SIZES = {"T": 20, "L": 3, "B": 2, "P": 1, "pages": 4}
ROWS = torch.tensor([19, 0, 11], dtype=torch.int32)


def apply_to(text: str, fuel: int | None = None, **changes: object) -> tuple[Program, PassRecord]:
    program = parse_program(text)
    context = pass_context(**{"bucket": program.bucket, **changes})
    return run_pass(SelectRowsEarly(), program, context, under=program.stage, fuel=fuel)


def values(program: Program, **given: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random values of all placeholders but those that are given."""
    g = torch.Generator().manual_seed(1)
    types = {str(node.target): node.meta.get("holds", node.meta["type"]) for node in program.placeholders()}
    drawn = {name: torch.randn(one.bind(SIZES), generator=g).to(one.dtype) for name, one in types.items()}
    return {**drawn, "logit_rows": ROWS, **{name: value for name, value in given.items() if name in types}}


def check_the_same(before: Program, after: Program, **given: torch.Tensor) -> None:
    """In float64 the same, in the program's own dtypes but for the order of sums."""
    inputs = values(before, **given)
    for exact in (True, False):
        old, new = (interpret(program, inputs, exact=exact) for program in (before, after))
        assert old.keys() == new.keys()
        for name, value in old.items():
            tolerance = TOLERANCES[value.dtype]
            torch.testing.assert_close(new[name], value, rtol=tolerance.rtol, atol=tolerance.atol)


def test_golden(golden: Callable[..., PassRecord]) -> None:
    record = golden(SelectRowsEarly())
    assert record.matches == 9 and record.numerics is Numerics.ROUNDING
    assert [(one.node, one.reason) for one in record.refusals] == [("mul", "%mul is read whole too, by %rms_norm")]


def test_the_numbers_stay_with_any_fuel() -> None:
    def ints(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    step = {"q_starts": ints(0, 12), "q_lens": ints(12, 8), "kv_lens": ints(13, 8), "page_table": ints(2, 1)[:, None]}
    before = parse_program(BEFORE)
    for fuel in range(10):
        after, record = apply_to(BEFORE, fuel)
        assert record.matches == fuel
        check_the_same(before, after, **step)


# One call between what is selected from and its arguments.

ONE = """program main stage=FUSED bucket=any tokens=[1, 64] q_max=any
dim T in [1, 64]
dim L in [1, 64]
input x: f32[T, 8]
input y: f32[T, 8]
input heads: f32[T, 2, 4]
input positions: i32[T]
input shares: f32[T, 2]
input chosen: i32[T, 2]
input logit_rows: i32[L]
param gain: f32[8] = source(name="gain")
param row: f32[1, 8] = source(name="row")
param weight: i8[6, 8] = source(name="weight")
param scales: f32[6, 1] = source(name="scales")
param table: f32[32, 4] = source(name="table")
param gate_up: f32[3, 10, 8] = source(name="gate_up")
param down: f32[3, 8, 5] = source(name="down")
"""
GIVEN = {
    "positions": torch.arange(20, dtype=torch.int32),
    "chosen": torch.arange(40, dtype=torch.int32).view(20, 2) % 3,
    "weight": torch.arange(-24, 24).view(6, 8).to(torch.int8),
}
# How many arguments are selected from, the call, and its type with T rows.
BY_ROW = {
    "layer norm": (1, "ingot.layer_norm(%x, %gain, eps=1e-05)", "f32[T, 8]"),
    "gelu": (2, 'ingot.gelu_mul(%x, %y, approximate="tanh")', "f32[T, 8]"),
    "silu of one value": (1, "ingot.silu_mul(%x, %x)", "f32[T, 8]"),
    "soft cap": (1, "ingot.soft_cap(%x, cap=2.0)", "f32[T, 8]"),
    "cast": (1, "ingot.cast(%x, dtype=bf16)", "bf16[T, 8]"),
    "quantized linear": (1, 'ingot.quant_linear(%x, %weight, %scales, format="int8")', "f32[T, 6]"),
    "experts": (3, "ingot.experts(%x, %shares, %chosen, %gate_up, %down)", "f32[T, 8]"),
    "rotation": (2, "ingot.rope(%heads, %positions, %table)", "f32[T, 2, 4]"),
    "embedding": (1, "ingot.embedding(%positions, %table)", "f32[T, 4]"),
    "sum": (2, "aten.add.Tensor(%x, %y)", "f32[T, 8]"),
    "sum with a vector for all rows": (1, "aten.add.Tensor(%x, %gain)", "f32[T, 8]"),
    "product with a row for all rows": (1, "aten.mul.Tensor(%row, %x)", "f32[T, 8]"),
    "product with a number": (1, "aten.mul.Tensor(%x, 0.3)", "f32[T, 8]"),
    "view": (1, "aten.view.default(%heads, [-1, 8])", "f32[T, 8]"),
}


def one_call(call: str, value_type: str) -> str:
    selected = value_type.replace("T", "L", 1)
    return f"{ONE}%z = {call} : {value_type}\n%s = ingot.select_rows(%z, %logit_rows) : {selected}\nreturn s=%s\n"


@pytest.mark.parametrize("name", BY_ROW)
def test_a_call_that_works_row_by_row(name: str) -> None:
    selected, call, value_type = BY_ROW[name]
    before = parse_program(text := one_call(call, value_type))
    after, record = apply_to(text)
    assert record.matches == 1 and not record.refusals
    names = [target_name(node.target) for node in after.calls()]
    assert names == ["ingot.select_rows"] * selected + [call.partition("(")[0]]
    check_the_same(before, after, **GIVEN)


def test_views_of_selected_rows_lie_as_they_did() -> None:
    text = (
        f"{ONE}%a = aten.slice.Tensor(%x, 1, 0, 4) : f32[T, 4; 8, 1]\n"
        "%b = aten.view.default(%a, [-1, 2, 2]) : f32[T, 2, 2; 8, 2, 1]\n"
        "%z = ingot.soft_cap(%b, cap=1.0) : f32[T, 2, 2]\n"
        "%s = ingot.select_rows(%z, %logit_rows) : f32[L, 2, 2]\nreturn s=%s\n"
    )
    after, record = apply_to(text)
    types = [str(node.meta["type"]) for node in after.calls()]
    assert record.matches == 3 and types == ["f32[L, 8]", "f32[L, 4; 8, 1]", "f32[L, 2, 2; 8, 2, 1]", "f32[L, 2, 2]"]
    check_the_same(parse_program(text), after)


# Calls, what is returned of them, and why the selection %s stays behind %z.
_MUL = "%z = aten.mul.Tensor(%x, %y) : f32[T, 8]\n"
_LAST = "%s = ingot.select_rows(%z, %logit_rows) : f32[L, 8]\n"
STAYS = {
    "along rows": (
        f"%z = aten.slice.Tensor(%x, 0, 0, 9223372036854775807) : f32[T, 8]\n{_LAST}",
        "s=%s",
        "aten.slice.Tensor does not work row by row",
    ),
    "attention": (
        "%z = ingot.attention(%heads, %heads, %heads, %positions, %positions, scale=1.0, layer=0) : f32[T, 2, 4]\n"
        "%s = ingot.select_rows(%z, %logit_rows) : f32[L, 2, 4]\n",
        "s=%s",
        "ingot.attention does not work row by row",
    ),
    "strided": (
        "%z = aten.slice.Tensor(%x, 1, 0, 4) : f32[T, 4; 8, 1]\n%s = ingot.select_rows(%z, %logit_rows) : f32[L, 4]\n",
        "s=%s",
        "%z is strided, but the readers of its selected rows get them row-major",
    ),
    "read whole": (
        f"{_MUL}%own = ingot.soft_cap(%z, cap=1.0) : f32[T, 8]\n{_LAST}",
        "s=%s, own=%own",
        "%z is read whole too, by %own",
    ),
    "returned": (f"{_MUL}{_LAST}", "s=%s, z=%z", "%z is read whole too, by %output"),
    "two selections": (
        f"{_MUL}%t = ingot.select_rows(%z, %positions) : f32[T, 8]\n{_LAST}",
        "s=%s, t=%t",
        "several selections of rows read it: %t, %s",
    ),
    "computed rows": (
        f"%at = ingot.select_rows(%positions, %logit_rows) : i32[L]\n{_MUL}{_LAST}".replace(
            "%z, %logit_rows", "%z, %at"
        ),
        "s=%s",
        "the rows are the result of ingot.select_rows, which may be computed after the value to select from",
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_a_call_that_stays(name: str) -> None:
    calls, returned, reason = STAYS[name]
    text = f"{ONE}{calls}return {returned}\n"
    if name == "attention":  # which has no cache yet
        text = text.replace("stage=FUSED", "stage=NORMAL")
    after, record = apply_to(text)
    assert [(one.node, one.reason) for one in record.refusals] == [("z", reason)]
    assert record.matches == 0 and op_counts(after) == op_counts(parse_program(text))


def test_a_number_of_rows_that_is_fixed() -> None:
    """Nothing then tells rows from anything else that there are as many of."""
    text = ONE.replace("input x: f32[T, 8]", "input x: f32[64, 8]") + (
        "%z = ingot.soft_cap(%x, cap=1.0) : f32[64, 8]\n"
        "%s = ingot.select_rows(%z, %logit_rows) : f32[L, 8]\nreturn s=%s\n"
    )
    _, record = apply_to(text)
    assert [one.reason for one in record.refusals] == ["it has 64 rows in every step"]


# --- on a mesh --------------------------------------------------------------------------------------------------------


ON_MESH = """dim L in [1, 8]
input x: f32[T, 4]
input logit_rows: i32[L]
param down: f32[4, 2] tp=shard(1) = shard(source(name="down"), axis="tp", dim=1, segments=[])
%mine = ingot.take_part(%x, axis="tp", dim={dim}, parts=2) : {mine}
"""
_SUMMED = """%part = ingot.linear(%mine, %down) : f32[T, 4] tp=partial
%total = ingot.all_reduce(%part, axis="tp") : f32[T, 4]
%s = ingot.select_rows(%total, %logit_rows) : f32[L, 4]
return s=%s
"""


def test_ranks_add_up_selected_rows() -> None:
    text = HEAD.format(stage="SHARDED") + ON_MESH.format(dim=1, mine="f32[T, 2] tp=shard(1)") + _SUMMED
    program = parse_program(text)
    after, record = apply_to(text, bucket=BucketClass(name="any", tokens=(1, 64)))
    assert record.matches == 3 and not record.refusals
    assert [str(node.meta["type"]) for node in after.calls()] == ["f32[L, 4]", "f32[L, 2]", "f32[L, 4]", "f32[L, 4]"]
    g = torch.Generator().manual_seed(2)
    x, down = torch.randn(20, 4, generator=g), torch.randn(4, 4, generator=g)
    ranks = [{"x": x, "logit_rows": ROWS, "down": down[:, part : part + 2].contiguous()} for part in (0, 2)]
    for one in (program, after):
        for results in interpret_ranks(one, ranks):
            torch.testing.assert_close(results["s"], (x @ down.T)[ROWS.long()])


# --- bucket classes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "tokens", "q_max", "runs"),
    [
        ("cpu", (1, 16), None, False),
        ("cpu", (17, 2048), None, True),
        ("cpu", (1, 2048), None, True),
        ("sm_90", (33, 64), None, False),
        ("sm_90", (65, 512), 1, False),
        ("sm_90", (65, 8192), None, True),
        ("sm_90", (1, 8192), None, True),
    ],
)
def test_only_where_steps_feed_prompts(target: str, tokens: tuple[int, int], q_max: int | None, runs: bool) -> None:
    bucket = BucketClass(name="some", tokens=tokens, q_max=q_max)
    _, record = apply_to(BEFORE, target=Target.named(target), bucket=bucket)
    assert (record.matches, len(record.refusals)) == ((9, 1) if runs else (0, 0))


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("gemma2-capped", "default"),
        ("llama-biased", "default,quantize{format=int8}"),
    ],
)
def test_behind_the_last_attention_every_product_is_of_selected_rows(
    name: str, passes: str, checkpoint: Callable[[str], Path]
) -> None:
    opened = Checkpoint.open(checkpoint(name))
    steps, _ = staged(traced(opened.config), edit_pipeline(passes))
    (place,) = (i for i, step in enumerate(steps) if step.name == "select-rows-early")
    before, after = steps[place - 1].program, steps[place].program
    calls = list(after.calls())
    last = max(i for i, node in enumerate(calls) if target_name(node.target) == "ingot.paged_attention")
    behind = {tensor_type(node).shape[0] for node in calls[last + 1 :] if target_name(node.target).endswith("linear")}
    assert behind == {"L"}
    requests = TINY[name].prompts()[4:5]  # of 17 tokens, in two steps
    old, new = (logits_of(program, opened.read, requests) for program in (before, after))
    tolerance = TOLERANCES[torch.float64]
    torch.testing.assert_close(new.exact, old.exact, rtol=100 * tolerance.rtol, atol=100 * tolerance.atol)


def test_on_a_gpu_the_library_computes_products_of_few_rows_too() -> None:
    """Who computed all rows computes the selected ones."""
    target, backends = Target.named("sm_90"), (Triton(), Cublas(), Reference(), Rowwise())
    extend = BucketClass(name="extend", tokens=(65, LIMITS.max_tokens))
    model = traced({**TINY["llama-biased"].config, "dtype": "bfloat16"})
    context = pass_context(target=target, backends=backends, bucket=None)
    pipelines = [edit_pipeline(passes) for passes in ("default", "default,-select-rows-early")]
    after, before = (
        run_pipeline(model, context, (extend,), one, upto=Stage.LOWERED).programs["extend"] for one in pipelines
    )

    def backends(program: Program) -> Counter[tuple[str, str]]:
        return Counter(
            (target_name(node.target), node.meta["backend"]) for node in program.calls() if node.target not in VIEWS
        )

    more = Counter({("ingot.select_rows", "triton"): 1})
    assert backends(after) == backends(before) + more
    assert {backend for name, backend in backends(after) if name == "ingot.linear"} == {"cublas"}


def test_prompts_beside_decoding_give_the_same_tokens(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Steps of some tokens: prompts come in pieces, most of which get no logits, beside sequences that decode."""
    prompts = [{"prompt_token_ids": prompt} for prompt in TINY["qwen3-plain"].prompts()]
    params = [SamplingParams(temperature=0.0, max_tokens=2 + i % 7, ignore_eos=True) for i in range(len(prompts))]
    found = []
    for passes in ("default", "default,-select-rows-early"):
        made = compile_model(
            checkpoint("qwen3-plain"),
            tmp_path / passes,
            backend="reference",
            max_batch=4,
            max_tokens=20,
            max_seq_len=160,
            passes=passes,
        )
        matches = [one.matches for one in open_artifact(made.output).trace if one.name == "select-rows-early"]
        assert matches == ([9] if passes == "default" else [])
        answers = LLM(made.output).generate(prompts, params)
        found.append([answer.outputs[0].token_ids for answer in answers])
    assert found[0] == found[1]
