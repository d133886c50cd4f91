"""Diffs of small programs: one edit is one line, what follows from it is not listed, and layers are folded."""

import time

import pytest
import torch
from edited_diff import edited_diff, only
from toy_ops import toy_ops

from ingot.ir.diff import Difference, ProgramDiff
from ingot.ir.diff.text import numbers_text
from ingot.ir.ops import Effect, Op, define
from ingot.ir.parse import parse_program
from ingot.ir.placements import whole

TEXT = """\
program main stage=NORMAL
dim T in [1, 64]
dim L in [1, 64]
param embed: bf16[64, 16] = source(name="embed")
param norm: bf16[16] = affine(source(name="norm"), offset=0.0, scale=1.0)
param gate: bf16[32, 16] = source(name="gate")
param up: bf16[32, 16] = source(name="up")
param down: bf16[16, 32] = source(name="down")
input tokens: i32[T]
input logit_rows: i32[L]
%embedding = ingot.embedding(%tokens, %embed) : bf16[T, 16]
%rms_norm = ingot.rms_norm(%embedding, %norm, eps=1e-05) : bf16[T, 16]  # layer 1, blocks/attention.py:10
%linear = ingot.linear(%rms_norm, %gate) : bf16[T, 32]  # layer 1, blocks/attention.py:11
%linear_1 = ingot.linear(%rms_norm, %up) : bf16[T, 32]  # layer 1, blocks/attention.py:11
%silu_mul = ingot.silu_mul(%linear, %linear_1) : bf16[T, 32]  # layer 1, blocks/attention.py:11
%linear_2 = ingot.linear(%silu_mul, %down) : bf16[T, 16]  # layer 1, blocks/attention.py:11
%add = aten.add.Tensor(%embedding, %linear_2) : bf16[T, 16]  # layer 1, blocks/attention.py:12
%select_rows = ingot.select_rows(%add, %logit_rows) : bf16[L, 16]
%linear_3 = ingot.linear(%select_rows, %embed) : bf16[L, 64]
%cast = ingot.cast(%linear_3, dtype=f32) : f32[L, 64]
return logits=%cast
"""


def changed(*edits: tuple[str, str], text: str = TEXT) -> ProgramDiff:
    """Return the diff from a text to the text after some replacements."""
    return edited_diff(text, *edits)


def test_a_program_does_not_differ_from_itself() -> None:
    found = changed()
    assert not found and str(found) == "" and found == ProgramDiff()
    assert found.to_json() == {"equal": True, "header": [], "changed": [], "added": [], "removed": []}


def test_a_changed_constant_is_one_line_and_nothing_that_follows() -> None:
    found = changed(("eps=1e-05", "eps=1e-06"))
    assert str(found) == "~ %rms_norm = ingot.rms_norm(...) layer 1: eps 1e-05 -> 1e-06"
    assert found.changed == (
        Difference(
            what="ingot.rms_norm",
            before="rms_norm",
            after="rms_norm",
            field="eps",
            old="1e-05",
            new="1e-06",
            layers=(1,),
            origin="layer 1, blocks/attention.py:10",
        ),
    )
    assert found.changed[0].layer == 1
    assert found.to_json()["changed"][0]["layers"] == [1] and not found.to_json()["equal"]


@pytest.mark.parametrize(
    ("edits", "line"),
    [
        # The types behind a cast follow from it.
        (
            [("dtype=f32) : f32", "dtype=f64) : f64")],
            "~ %cast = ingot.cast(...): dtype f32 -> f64",
        ),
        ([("scale=1.0", "scale=2.0")], "~ param norm layer 1: recipe affine scale 1.0 -> 2.0"),
        ([('"gate"', '"gate.x"')], '~ param gate layer 1: recipe source name "gate" -> "gate.x"'),
        (
            [('source(name="down")', 'cast(source(name="down"), dtype="bf16")')],
            '~ param down layer 1: recipe … -> cast(…, dtype="bf16")',
        ),
        (
            [("up: bf16[32, 16]", "up: bf16[32, 16; 1, 32]")],
            "~ param up layer 1: type bf16[32, 16] -> bf16[32, 16; 1, 32]",
        ),
        (
            [("down: bf16[16, 32] =", "down: bf16[16, 32] tp=split(1) =")],
            "~ param down layer 1: placement – -> tp=split(1)",
        ),
        ([("tokens: i32", "tokens: i64")], "~ input tokens: type i32[T] -> i64[T]"),
        (
            [("silu_mul(%linear, %linear_1)", 'gelu_mul(%linear, %linear_1, approximate="tanh")')],
            '~ %silu_mul = ingot.silu_mul(...) layer 1: op ingot.silu_mul() -> ingot.gelu_mul(approximate="tanh")',
        ),
        (
            [("linear(%silu_mul,", "linear(%linear_1,")],
            "~ %linear_2 = ingot.linear(...) layer 1: x %silu_mul -> %linear_1",
        ),
        (
            [("bf16[T, 32]  # layer 1, blocks/attention.py:11\n%silu", "f32[T, 32]\n%silu")],
            "~ %linear_1 = ingot.linear(...): type bf16[T, 32] -> f32[T, 32]",
        ),
        (
            [("logits=%cast", "logits=%linear_3"), ("%cast = ingot.cast(%linear_3, dtype=f32) : f32[L, 64]\n", "")],
            "- %cast = ingot.cast(%linear_3, dtype=f32) : f32[L, 64]",
        ),
        (
            [
                (
                    "%select_rows = ingot.select_rows(%add,",
                    "%again = ingot.cast(%add, dtype=bf16) : bf16[T, 16]\n%select_rows = ingot.select_rows(%again,",
                )
            ],
            "+ %again = ingot.cast(%add, dtype=bf16) : bf16[T, 16]",
        ),
        ([("input logit_rows", "input more: i32[T]\ninput logit_rows")], "+ input more: i32[T]"),
        ([("return logits=", "return scores=%cast, logits=")], "+ output scores = %cast"),
        ([("stage=NORMAL", "stage=TRACED")], "~ stage NORMAL -> TRACED"),
        ([("T in [1, 64]", "T in [1, 65]")], "~ dim T [1, 64] -> [1, 65]"),
        (
            [("stage=NORMAL", "stage=NORMAL bucket=decode tokens=[1, 16] q_max=1")],
            "~ bucket – -> decode tokens=[1, 16] q_max=1",
        ),
        ([("dim T", "mesh tp=2\ndim T")], "~ mesh – -> tp=2"),
    ],
)
def test_one_edit_is_one_line(edits: list[tuple[str, str]], line: str) -> None:
    found = changed(*edits)
    only(found)
    assert str(found) == line


def test_the_layout_of_a_weight_is_one_line() -> None:
    """A weight that lies by columns is read through a view: nothing but its layout differs."""
    edits = [
        ('gate: bf16[32, 16] = source(name="gate")', 'held: bf16[16, 32] = permute(source(name="gate"), dims=[1, 0])'),
        ("%linear =", "%turned = aten.permute.default(%held, [1, 0]) : bf16[32, 16; 1, 32]\n%linear ="),
        ("%gate", "%turned"),
    ]
    found = changed(*edits)
    assert str(only(found).field) == "layout"
    assert str(found) == (
        "~ param held (was gate) layer 1: layout bf16[32, 16] as stored -> bf16[32, 16; 1, 32] turned"
    )
    # The other way round, and what does not turn it back.
    turned = TEXT
    for edit in edits:
        turned = turned.replace(*edit)
    assert only(parse_program(turned).diff(parse_program(TEXT))).field == "layout"
    assert only(changed(("dims=[1, 0]", "dims=[0, 1]"), text=turned)).field == "recipe permute dims"


STATES = """\
program main stage=CACHED
dim B in [1, 8]
dim R in [1, 8]
input rows: i32[B]
state position: row i32[R] group=rows unit=sequence
%state_zero = ingot.state_zero(%position, %rows, axis=0) : state<position>
return position=%state_zero
"""


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (("position: row i32", "position: page i32"), "~ state position: kind row -> page"),
        (("group=rows", "group=other"), "~ state position: group rows -> other"),
        (("unit=sequence", "unit=token"), "~ state position: unit sequence -> token"),
        (("row i32[R]", "row i64[R]"), "~ state position: type i32[R] -> i64[R]"),
        (("unit=sequence", "unit=sequence tp=shard(0)"), "~ state position: placement – -> tp=shard(0)"),
        (("axis=0", "axis=1"), "~ %state_zero = ingot.state_zero(...): axis 0 -> 1"),
    ],
)
def test_states(edit: tuple[str, str], line: str) -> None:
    found = changed(edit, text=STATES)
    only(found)
    assert str(found) == line


def test_a_fusion_is_what_went_and_what_came() -> None:
    """The readers of what was replaced are not listed."""
    before = """\
program main stage=FUSED
dim T in [1, 64]
param n: f32[16] = source(name="n")
input x: f32[T, 16]
input y: f32[T, 16]
%add = aten.add.Tensor(%x, %y) : f32[T, 16]
%rms_norm = ingot.rms_norm(%add, %n, eps=0.1) : f32[T, 16]
%silu_mul = ingot.silu_mul(%rms_norm, %add) : f32[T, 16]
return y=%silu_mul
"""
    after = """\
program main stage=FUSED
dim T in [1, 64]
param n: f32[16] = source(name="n")
input x: f32[T, 16]
input y: f32[T, 16]
%add_rms_norm = ingot.add_rms_norm(%y, %x, %n, eps=0.1) : (f32[T, 16], f32[T, 16])
%item = getitem(%add_rms_norm, 0) : f32[T, 16]
%item_1 = getitem(%add_rms_norm, 1) : f32[T, 16]
%silu_mul = ingot.silu_mul(%item, %item_1) : f32[T, 16]
return y=%silu_mul
"""
    found = parse_program(before).diff(parse_program(after))
    assert str(found).splitlines() == [
        "- %add = aten.add.Tensor(%x, %y) : f32[T, 16]",
        "- %rms_norm = ingot.rms_norm(%add, %n, eps=0.1) : f32[T, 16]",
        "+ %add_rms_norm = ingot.add_rms_norm(%y, %x, %n, eps=0.1) : (f32[T, 16], f32[T, 16])",
    ]
    # Another item of a tuple is another value.
    assert only(changed(("(%item, %item_1)", "(%item, %item)"), text=after)).field == "up"


def test_a_call_that_changed_tells_what_was_put_in_front_of_it() -> None:
    before = """\
program main stage=NORMAL
dim T in [1, 64]
input x: f32[T, 256]
%linear = aten.mul.Tensor(%x, %x) : f32[T, 256]
%slice_1 = aten.slice.Tensor(%linear, 1, 0, {end}) : {type}
return y=%slice_1
"""
    text = before.format(end=256, type="f32[T, 256]")
    view = "%half = aten.slice.Tensor(%linear, 1, 64, 128) : f32[T, 64; 256, 1]\n%slice_41 ="
    after = text.replace("%slice_1 =", view).replace(
        "(%linear, 1, 0, 256) : f32[T, 256]", "(%half, 1, 0, 4) : f32[T, 4; 256, 1]"
    )
    found = parse_program(text).diff(parse_program(after.replace("=%slice_1", "=%slice_41")))
    assert str(found).splitlines() == [
        "~ %slice_41 (was slice_1) = aten.slice.Tensor(...): "
        "end 256 -> 4; x %linear -> %half; type f32[T, 256] -> f32[T, 4; 256, 1]",
        "+ %half = aten.slice.Tensor(%linear, 1, 64, 128) : f32[T, 64; 256, 1]",
    ]
    # What stands on the line says all: no type behind it, and nothing of what did not change.
    shorter = parse_program(text).diff(parse_program(before.format(end=4, type="f32[T, 4; 256, 1]")))
    assert str(shorter) == "~ %slice_1 = aten.slice.Tensor(...): end 256 -> 4"


def test_a_call_that_is_made_once_instead_of_twice() -> None:
    twice = (
        "%silu_mul = ingot.silu_mul(%linear,",
        "%again = ingot.linear(%rms_norm, %gate) : bf16[T, 32]\n%silu_mul = ingot.silu_mul(%again,",
    )
    once = ("%silu_mul = ingot.silu_mul(%linear,", "%silu_mul = ingot.silu_mul(%linear, ")
    text = TEXT.replace("linear(%rms_norm, %up)", "linear(%rms_norm, %gate)").replace(*twice)
    found = parse_program(text).diff(
        parse_program(text.replace("silu_mul(%again, %linear_1)", "silu_mul(%again, %again)"))
    )
    assert not found, "equal values are one value"
    assert len(changed(twice).added) == 1 and not changed(once)


COIN = """\
program main stage=FUSED
dim T in [1, 64]
input x: f32[T, 16]
%coin = ingot.coin(%x) : f32[T, 16]
%coin_1 = ingot.coin(%x) : f32[T, 16]
%add = aten.add.Tensor(%coin, %coin_1) : f32[T, 16]
%mul = aten.mul.Tensor(%add, %coin) : f32[T, 16]
return y=%mul
"""


CAPPED = tuple(
    f"%c{i} = ingot.soft_cap(%coin{of}, cap={cap}) : f32[T, 16]\n" for i, of, cap in (("", "", 5.0), ("_1", "", 6.0))
)


def _coin() -> dict[str, Op]:
    @define(placement=whole, flops=1, samples=lambda g, dtype: [], effect=Effect.RANDOM)
    def coin(x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x)

    return {"coin": coin}


def test_two_random_calls_are_not_one_value() -> None:
    with toy_ops(_coin):
        assert not changed(
            ("%coin = ", "%d = "), ("(%coin, %coin_1)", "(%d, %coin_1)"), ("%add, %coin)", "%add, %d)"), text=COIN
        )
        swapped = COIN.replace("(%coin, %coin_1)", "(%coin_1, %coin)").replace("%add, %coin)", "%add, %coin_1)")
        assert not parse_program(COIN).diff(parse_program(swapped))
        assert changed(("(%coin, %coin_1)", "(%coin, %coin)"), text=COIN)
        assert changed(("%add, %coin)", "%add, %coin_1)"), text=COIN)
        # Who reads them may stand in any order.
        capped = COIN.replace("%add =", f"{CAPPED[0]}{CAPPED[1]}%add =").replace("return", "return a=%c, b=%c_1,")
        assert not changed(("".join(CAPPED), "".join(reversed(CAPPED))), text=capped)


def _layers(count: int, eps: float) -> str:
    """A program of many layers that are alike, eleven calls and four params each."""
    lines = ["program main stage=FUSED", "dim T in [1, 64]", "input x0: f32[T, 16]"]
    for i in range(count):
        lines += [f'param n{i}: f32[16] = source(name="layers.{i}.norm")']
        lines += [f'param {w}{i}: f32[16, 16] = source(name="layers.{i}.{w}")' for w in ("q", "k", "o")]
    lines.append("%x0_1 = ingot.soft_cap(%x0, cap=9.0) : f32[T, 16]")
    value, of = "%x0_1", " : f32[T, 16]"
    for i in range(count):
        calls = [f"%a{i} = ingot.rms_norm({value}, %n{i}, eps={eps})"]
        calls += [f"%{w}_{i} = ingot.linear(%a{i}, %{w}{i})" for w in ("q", "k")]
        calls += [f"%m{i} = ingot.silu_mul(%q_{i}, %k_{i})", f"%v{i} = ingot.linear(%m{i}, %o{i})"]
        calls += [
            f"%s{i}_{j} = ingot.soft_cap(%{'v' if j == 0 else 's'}{i}{f'_{j - 1}' if j else ''}, cap=9.0)"
            for j in range(5)
        ]
        calls += [f"%y{i} = aten.add.Tensor({value}, %s{i}_4)"]
        lines += [f"{call}{of}  # layer {i}, blocks/attention.py:{number}" for number, call in enumerate(calls)]
        value = f"%y{i}"
    return "\n".join([*lines, f"return y={value}"]) + "\n"


def test_a_deep_program_is_compared_in_no_time() -> None:
    """1200 nodes that all compute something else than before, through all layers."""
    before, after = (parse_program(_layers(80, eps)) for eps in (0.1, 0.2))
    begin = time.process_time()
    found = before.diff(after)
    lines = str(found).splitlines()
    assert time.process_time() - begin < 2
    assert lines == ["in layers 0–79:", "  ~ %a0 = ingot.rms_norm(...): eps 0.1 -> 0.2"]
    shallow = parse_program(_layers(79, 0.1))
    added = shallow.diff(before)
    assert {one.layers for one in added.added} == {(79,)} and not added.changed and not added.removed


def test_the_features_of_a_bucket_class_have_no_order() -> None:
    text = TEXT.replace("stage=NORMAL", "stage=NORMAL bucket=b tokens=[1, 4] q_max=any +one +two")
    assert not changed(("+one +two", "+two +one"), text=text)
    assert only(changed((" +two", ""), text=text)).field == "bucket"


def test_runs_of_numbers() -> None:
    assert numbers_text([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"


@pytest.mark.parametrize(
    ("arguments", "change"),
    [
        ("%x", "weight – -> %y"),
        ("%x, %y, None, 3", "#3 3 -> –"),
        ("%x, %y, frob=3", "frob 3 -> –"),
    ],
)
def test_a_call_that_fits_no_op_is_compared_as_it_stands(arguments: str, change: str) -> None:
    text = """program main stage=FUSED
dim T in [1, 8]
input x: f32[T, 6]
input y: f32[4, 6]
%a = ingot.linear({}) : f32[T, 4]
return out=%a
"""
    broken, whole = (parse_program(text.format(given)) for given in (arguments, "%x, %y"))
    assert str(broken.diff(whole)) == f"~ %a = ingot.linear(...): {change}"
