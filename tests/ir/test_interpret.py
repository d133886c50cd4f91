"""The interpreter against plain torch: exact in float64, row by row, watched, and strict about its values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ingot.ir.errors import VerifyError
from ingot.ir.interpret import interpret
from ingot.ir.numerics.tolerances import compare
from ingot.ir.parse import parse_program
from ingot.ir.program import Program
from ingot.ir.tables import make_table

LENGTHS = (5, 1, 3)
T = sum(LENGTHS)


def values(program: Program, sizes: dict[str, int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random values of the declared types: floating-point ones normal, integers zero."""
    g = torch.Generator().manual_seed(seed)
    result = {}
    for node in program.placeholders():
        name = str(node.target)
        declared = program.states[name].type if name in program.states else node.meta["type"]
        shape = declared.bind(sizes)
        result[name] = (
            torch.randn(shape, generator=g).to(declared.dtype)
            if declared.dtype.is_floating_point
            else torch.zeros(shape, dtype=declared.dtype)
        )
    return result


def traced_values(program: Program) -> dict[str, torch.Tensor]:
    """Three sequences of the golden decoder layer."""
    given = values(program, {"T": T, "B": len(LENGTHS), "L": len(LENGTHS)})
    given["tokens"] = torch.randint(0, 96, (T,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    given["positions"] = torch.cat([torch.arange(n) for n in LENGTHS]).int()
    given["token_seqs"] = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).int()
    given["logit_rows"] = (torch.tensor(LENGTHS).cumsum(0) - 1).int()
    given["rope"] = make_table(
        {"kind": "rope", "rope_type": "default", "positions": 64, "rotary_dim": 8, "theta": 10000.0}
    )
    return given


def plain(given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same layer in float64, sequence by sequence, written with nothing of Ingot's."""
    w = {name: value.double() if value.is_floating_point() else value.long() for name, value in given.items()}
    logits = []
    for ids, positions in zip(w["tokens"].split(LENGTHS), w["positions"].split(LENGTHS), strict=True):
        h = w["embed"][ids]
        normed = F.rms_norm(h, (32,), w["layers.0.norm"], 1e-5)
        cos, sin = (part[:, None] for part in w["rope"][positions].chunk(2, 1))

        def turn(x: torch.Tensor, cos: torch.Tensor = cos, sin: torch.Tensor = sin) -> torch.Tensor:
            left, right = x.chunk(2, -1)
            return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

        q, k, v = ((normed @ w[f"layers.0.{name}"].T).unflatten(1, (-1, 8)) for name in "qkv")
        q, k, v = (x.transpose(0, 1)[None] for x in (turn(q), turn(k), v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3535533905932738, enable_gqa=True)
        h = h + attended[0].transpose(0, 1).flatten(1)
        gated = F.silu(h @ w["layers.0.gate"].T) * (h @ w["layers.0.up"].T)
        h = h + gated @ w["layers.0.down"].T
        logits.append(h[-1:] @ w["embed"].T)
    return torch.cat(logits)


@pytest.fixture
def traced(golden: Callable[[str], str]) -> Program:
    return parse_program(golden("traced"))


def test_exact_is_plain_float64(traced: Program) -> None:
    given = traced_values(traced)
    found = interpret(traced, given, exact=True)["logits"]
    assert found.dtype == torch.float64
    # 32 terms of size one after another, four times over: sums grow to about 10^4.
    assert compare(found, plain(given), torch.float64, factor=100) is None  # logits sum products of sums


def test_exact_takes_wider_values_than_declared(traced: Program) -> None:
    """A float64 weight is not rounded to its declared bfloat16 on the way in."""
    given = traced_values(traced)
    given["embed"] = given["embed"].double() + 1e-9
    found = interpret(traced, given, exact=True)["logits"]
    assert compare(found, plain(given), torch.float64, factor=100) is None  # logits sum products of sums


REGION_OF_SLICES = """\
program slices stage=LOWERED
dim T in [1, 8]
input x: bf16[T, 8]
region r0 @one {
  input in0: bf16[T, 4; 8, 1]
  %silu_mul = ingot.silu_mul(%in0, %in0) : bf16[T, 4]
  return out0=%silu_mul
}
%half = aten.slice.Tensor(%x, 1, 4, 8) : bf16[T, 4; 8, 1] @reference
%region_r0 = region.r0(%half) : bf16[T, 4] @one
return out=%region_r0
"""


def test_exact_keeps_the_strides_that_a_region_declares() -> None:
    """Also those with gaps, as of a slice."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = interpret(parse_program(REGION_OF_SLICES), {"x": x}, exact=True)["out"]
    half = x[:, 4:].double()
    assert torch.allclose(found, torch.nn.functional.silu(half) * half)


def test_inexact_rounds_where_it_is_declared(traced: Program) -> None:
    given = traced_values(traced)
    found = interpret(traced, given)["logits"]
    assert found.dtype == torch.float32
    assert torch.equal(found, found.bfloat16().float()), "the last linear is bfloat16, and the cast keeps that"
    exact = plain(given)
    error = float((found - exact).norm() / exact.norm())
    assert 1e-4 < error < 2e-2, "a dozen roundings to bfloat16, no fewer and no worse"


@pytest.mark.parametrize("exact", [False, True])
def test_rowwise_does_not_see_the_rest_of_the_step(traced: Program, exact: bool) -> None:
    """A sequence alone gives the same bits as among others, in whatever order."""
    given = traced_values(traced)
    whole = interpret(traced, given, rowwise=True, exact=exact)["logits"]
    assert compare(whole, interpret(traced, given, exact=exact)["logits"], torch.bfloat16, factor=10) is None
    for b, start in enumerate(torch.tensor((0, *LENGTHS)).cumsum(0)[:-1].tolist()):
        mine = slice(start, start + LENGTHS[b])
        alone = {**given, "logit_rows": torch.tensor([LENGTHS[b] - 1], dtype=torch.int32)}
        for name in ("tokens", "positions", "token_seqs"):
            alone[name] = given[name][mine]
        assert torch.equal(interpret(traced, alone, rowwise=True, exact=exact)["logits"], whole[b : b + 1])


def test_watch_sees_every_call_in_order(traced: Program) -> None:
    given, seen = traced_values(traced), []
    found = interpret(traced, given, watch=lambda node, value: seen.append((node, value)))
    assert [node for node, _ in seen] == list(traced.calls())
    assert seen[-1][1] is found["logits"]
    for node, value in seen:
        assert node.meta["type"].mismatch(value, {"T": T, "L": len(LENGTHS)}) is None


def test_watch_sees_inside_regions(golden: Callable[[str], str]) -> None:
    program = parse_program(golden("lowered"))
    given = values(program, {"T": 3, "pages": 2})
    seen: list[str] = []
    found = interpret(program, given, watch=lambda node, value: seen.append(node.name))
    assert seen[:4] == ["embedding", "rms_norm", "linear", "region_layer_0"]
    x = F.embedding(given["tokens"], given["embed"])
    y = F.linear(F.rms_norm(x.float(), (32,), None, 1e-6).bfloat16() * given["norm.0"], given["up"])
    last = F.rms_norm((y + y).float(), (32,), None, 1e-6).bfloat16() * given["norm.1"]
    assert compare(found["last"], last, torch.bfloat16) is None
    assert torch.equal(found["kv.0"][0, 1, 0], (y + y)[-1].view(2, 16)), "of equal slots the last write stays"


def test_nothing_given_is_changed(golden: Callable[[str], str]) -> None:
    for name, sizes in [
        ("traced", {"T": T, "B": 3, "L": 3}),
        ("cached", {"T": 4, "B": 2, "L": 2, "P": 3, "R": 5, "pages": 7}),
        ("lowered", {"T": 3, "pages": 2}),
    ]:
        program = parse_program(golden(name))
        given = values(program, sizes)
        before = {key: value.clone() for key, value in given.items()}
        for options in ({}, {"exact": True}, {"rowwise": True}):
            interpret(program, given, **options)  # type: ignore[arg-type]
            assert all(torch.equal(given[key], before[key]) for key in given)


def test_a_step_moves_its_states(golden: Callable[[str], str]) -> None:
    """One prefill of three tokens in row 4 and one decode in row 0, on the golden program with a cache."""
    program = parse_program(golden("cached"))
    given = values(program, {"T": 4, "B": 2, "L": 2, "P": 2, "R": 5, "pages": 7})

    def set_ints(**columns: list[Any]) -> None:
        for name, column in columns.items():
            given[name] = torch.tensor(column, dtype=given[name].dtype)

    set_ints(tokens=[11, 12, 13, -1], token_seqs=[0, 0, 0, 1], q_starts=[0, 3], q_lens=[3, 1], rows=[4, 0])
    set_ints(starts=[0, -1], page_table=[[5, 6], [1, 2]], logit_rows=[2, 3], sample_index=[0, 1])
    set_ints(last_token=[42, 0, 0, 0, 0], position=[17, 0, 0, 0, 9], temperature=[0.0, 0.0], top_p=[1.0, 1.0])
    given["edits"].fill_(-1)  # every token is allowed, and none has a bias
    found = interpret(program, given)
    assert found["sampled"].dtype == torch.int32 and bool((found["sampled"] >= 0).all())
    first, second = found["sampled"].tolist()
    assert found["last_token"].tolist() == [second, 0, 0, 0, first]
    assert found["position"].tolist() == [18, 0, 0, 0, 3]
    written = (found["kv.0"] != given["kv.0"]).flatten(3).any(-1).nonzero().tolist()
    assert sorted(written) == sorted(
        [page, half, slot] for page, slot in [(5, 0), (5, 1), (5, 2), (2, 1)] for half in (0, 1)
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", None, "no value for input 'tokens'"),
        ("embed", None, "no value for param 'embed'"),
        ("kv.0", None, "no value for state 'kv.0'"),
        ("tokens", torch.zeros(4, dtype=torch.int64), "'tokens' has dtype i64, expected i32"),
        ("tokens", torch.zeros(4), "'tokens' has dtype f32, expected i32"),
        ("tokens", [1, 2, 3, 4], "'tokens' is a list"),
        ("tokens", torch.zeros(4, 1, dtype=torch.int32), r"'tokens' has shape \[4, 1\], expected i32\[T\]"),
        ("token_seqs", torch.zeros(5, dtype=torch.int32), r"'token_seqs' has shape \[5\], expected i32\[T\]"),
        ("embed", torch.zeros(96, 32), "'embed' has dtype f32, expected bf16"),
        ("embed", torch.zeros(96, 31).bfloat16(), r"'embed' has shape \[96, 31\], expected bf16\[96, 32\]"),
        (
            "embed",
            torch.zeros(32, 96).bfloat16().T,
            r"'embed' has strides \[1, 96\], expected row-major bf16\[96, 32\]",
        ),
        ("embed", torch.zeros(96, 32, dtype=torch.complex64), "'embed' has dtype torch.complex64, expected bf16"),
        ("kv.0", torch.zeros(7, 2, 16, 2, 9).bfloat16(), r"'kv.0' has shape .*, expected bf16\[pages, 2, 16, 2, 8\]"),
        ("position", torch.zeros(6, dtype=torch.int32), r"'position' has shape \[6\], expected i32\[R\]"),
    ],
)
def test_values_that_do_not_fit_are_refused(golden: Callable[[str], str], name: str, value: Any, message: str) -> None:
    program = parse_program(golden("cached"))
    given: dict[str, Any] = values(program, {"T": 4, "B": 2, "L": 2, "P": 3, "R": 5, "pages": 7})
    given[name] = value
    if value is None:
        del given[name]
    with pytest.raises(VerifyError, match=message):
        interpret(program, given)


def test_exact_is_as_strict_about_kinds_and_shapes(traced: Program) -> None:
    given = traced_values(traced)
    for name, value, message in [
        ("tokens", given["tokens"].double(), "'tokens' has dtype f64, expected i32"),
        ("embed", given["embed"].int(), "'embed' has dtype i32, expected bf16"),
        ("embed", given["embed"][:, :31].double(), "'embed' has shape"),
    ]:
        with pytest.raises(VerifyError, match=message):
            interpret(traced, {**given, name: value}, exact=True)


def test_an_op_that_fails_says_which_and_where(traced: Program) -> None:
    given = traced_values(traced)
    given["tokens"] = given["tokens"] + 96
    with pytest.raises(VerifyError, match=r"ingot\.embedding failed: ") as caught:
        interpret(traced, given)
    assert caught.value.where == "%embedding, embed, blocks/decoder.py:40"


def test_an_aten_op_that_fails_says_which() -> None:
    text = "program p stage=NORMAL\ndim T in [1, 9]\ninput x: f32[T]\n"
    program = parse_program(text + "%y = aten.view.default(%x, [2, 2]) : f32[2, 2]\nreturn y=%y\n")
    assert interpret(program, {"x": torch.arange(4.0)})["y"].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    with pytest.raises(VerifyError, match=r"aten\.view\.default failed: "):
        interpret(program, {"x": torch.arange(5.0)})


def test_more_values_than_needed_are_no_harm(traced: Program) -> None:
    given = traced_values(traced)
    found = interpret(traced, {**given, "of another entry": torch.zeros(1)})
    assert torch.equal(found["logits"], interpret(traced, given)["logits"])
