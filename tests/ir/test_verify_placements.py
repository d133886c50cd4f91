"""What the verifier refuses of placements, and how far it looks."""

import operator

import pytest
from mesh_program import BODY, HEAD, STATES, program, shard

from ingot.ir.errors import VerifyError
from ingot.ir.ops import OPS
from ingot.ir.parse import parse_program
from ingot.ir.program import Stage, target_of
from ingot.ir.text import print_program
from ingot.ir.verify import verify

HEADS = """input k: f32[T, 2, 4]
input t: i32[T]
input w: f32[3, 4]
param q.w: f32[12, 4] tp=shard(0) = shard(source(name="q"), axis="tp", dim=0, segments=[])
%h = ingot.linear(%x, %q.w) : f32[T, 12] tp=shard(1)
%q = aten.view.default(%h, [-1, 3, 4]) : f32[T, 3, 4] tp=shard(1)
"""
ATTENTION = (
    "input x: f32[T, 4]\n"
    + HEADS.replace("[T, 2, 4]", "[T, 4, 4]")
    + """%o = ingot.take_part(%k, axis="tp", dim=1, parts=2) : f32[T, 2, 4] tp=shard(1)
%a = ingot.attention(%q, %o, %o, %t, %t, scale=0.5, layer=0) : f32[T, 3, 4] tp=shard(1)
%g = ingot.all_gather(%a, axis="tp", dim=1, parts=2) : f32[T, 6, 4]
return g=%g
"""
)
LATENT = """input x: f32[T, 4]
input r: f32[T, 6, 2]
input c: f32[T, 1, 4]
input k: f32[T, 1, 2]
input t: i32[T]
param q.w: f32[12, 4] tp=shard(0) = shard(source(name="q"), axis="tp", dim=0, segments=[])
param u.w: f32[3, 4, 4] tp=shard(0) = shard(source(name="u"), axis="tp", dim=0, segments=[])
param v.w: f32[3, 5, 4] tp=shard(0) = shard(source(name="v"), axis="tp", dim=0, segments=[])
%h = ingot.linear(%x, %q.w) : f32[T, 12] tp=shard(1)
%q = aten.view.default(%h, [-1, 3, 4]) : f32[T, 3, 4] tp=shard(1)
%s = ingot.take_part(%r, axis="tp", dim=1, parts=2) : f32[T, 3, 2] tp=shard(1)
%a = ingot.latent_attention(%q, %s, %c, %k, %u.w, %v.w, %t, %t, scale=0.5, layer=0) : f32[T, 3, 5] tp=shard(1)
%g = ingot.all_gather(%a, axis="tp", dim=1, parts=2) : f32[T, 6, 5]
return g=%g
"""
ROWS = """dim T_tp in [1, 4]
input x: f32[T, 4]
input i: i32[T]
input g: f32[4]
param up: f32[3, 4] tp=shard(0) = shard(source(name="up"), axis="tp", dim=0, segments=[])
%p = ingot.take_part(%x, axis="tp", dim=0, parts=2) : f32[T_tp, 4] tp=shard(0)
%w = ingot.all_gather(%p, %x, axis="tp", dim=0, parts=2) : f32[T, 4]
%c = ingot.vocab_embedding(%i, %up, axis="tp", parts=2) : f32[T, 4] tp=partial
%s = ingot.reduce_scatter(%c, axis="tp", dim=0, parts=2) : f32[T_tp, 4] tp=shard(0)
%b = ingot.add_rms_norm(%s, %p, %g, eps=0.1) : (f32[T_tp, 4], f32[T_tp, 4])
%n = getitem(%b, 0) : f32[T_tp, 4] tp=shard(0)
%r = getitem(%b, 1) : f32[T_tp, 4] tp=shard(0)
%a = ingot.all_gather(%n, %x, axis="tp", dim=0, parts=2) : f32[T, 4]
%t = ingot.all_gather(%r, %x, axis="tp", dim=0, parts=2) : f32[T, 4]
%l = ingot.linear(%a, %up) : f32[T, 3] tp=shard(1)
%j = ingot.all_gather(%l, axis="tp", dim=1, parts=2) : f32[T, 6]
return j=%j, t=%t, w=%w
"""
# rule -> (stage, the healthy body, what is changed in it, the message, part of what was expected)
BROKEN: dict[str, tuple[str, str, dict[str, str], str, str]] = {
    "a partial value returned": (
        "SHARDED",
        BODY,
        {"y=%total": "y=%total, p=%part"},
        "output 'p' is tp=partial",
        "tp=replicated",
    ),
    "a part returned": (
        "SHARDED",
        BODY,
        {"z=%joined": "z=%joined, r=%right"},
        "output 'r' is tp=shard(1)",
        "tp=replicated",
    ),
    "a part where the whole is needed": (
        "SHARDED",
        BODY,
        {
            'ingot.all_gather(%right, axis="tp", dim=1, parts=2) : f32[T, 8]': "ingot.rms_norm(%right, %g, eps=0.1)"
            " : f32[T, 4]",
            "input x": "input g: f32[4]\ninput x",
        },
        "ingot.rms_norm is given 'x' as tp=shard(1)",
        "tp=replicated",
    ),
    "the whole where a part is needed": (
        "SHARDED",
        BODY,
        {
            "(%left, %down)": "(%n, %down)",
            "input x": "input n: f32[T, 2]\ninput x",
            ", z=%joined": ", z=%joined, l=%left2",
            "return": '%left2 = ingot.all_gather(%left, axis="tp", dim=1, parts=2) : f32[T, 4]\nreturn',
        },
        "ingot.linear is given 'x' as tp=replicated",
        "tp=shard(1)",
    ),
    "a partial value where a sum is needed": (
        "SHARDED",
        BODY,
        {"return y=%total": "%more = aten.add.Tensor(%part, %total) : f32[T, 4]\nreturn y=%more"},
        "aten.add.Tensor is given 'x' as tp=partial",
        "tp=replicated",
    ),
    "a sum of what is no partial": (
        "SHARDED",
        BODY,
        {
            "all_reduce(%part,": "all_reduce(%x,",
            "y=%total": "y=%total, p=%q",
            "return": '%q = ingot.all_reduce(%part, axis="tp") : f32[T, 4]\nreturn',
        },
        "ingot.all_reduce is given 'x' as tp=replicated",
        "tp=partial",
    ),
    "a bias added by each rank": (
        "SHARDED",
        BODY,
        {"(%left, %down)": "(%left, %down, %b)", "input x": "input b: f32[4]\ninput x"},
        "ingot.linear on axis tp: a bias on partial sums is added once by each rank",
        "an add after the all_reduce",
    ),
    "half a segment": (
        "SHARDED",
        BODY,
        {"(%wide, 1, 0, 2) : f32[T, 2; 6, 1] tp=shard(1)": "(%wide, 1, 1, 3) : f32[T, 2; 6, 1]"},
        "aten.slice.Tensor is given 'x' as tp=shard(1, segments=[4, 8])",
        "tp=replicated",
    ),
    "heads that do not divide": (
        "SHARDED",
        ATTENTION,
        {},
        "ingot.attention on axis tp: a rank has 3 heads of q for 2 of k and v",
        "a multiple",
    ),
    "a latent in parts": (
        "SHARDED",
        LATENT,
        {
            "input c: f32[T, 1, 4]": "input c: f32[T, 1, 8]",
            "%a = ": '%p = ingot.take_part(%c, axis="tp", dim=2, parts=2) : f32[T, 1, 4] tp=shard(2)\n%a = ',
            "%s, %c,": "%s, %p,",
        },
        "ingot.latent_attention is given 'latents' as tp=shard(2)",
        "tp=replicated",
    ),
    "a matrix of all heads for the heads of a rank": (
        "SHARDED",
        LATENT,
        {
            "input r": "input u: f32[3, 4, 4]\ninput r",
            "%u.w": "%u",
            'param u.w: f32[3, 4, 4] tp=shard(0) = shard(source(name="u"), axis="tp", dim=0, segments=[])\n': "",
        },
        "ingot.latent_attention is given 'k_up' as tp=replicated",
        "tp=shard(0)",
    ),
    "another placement than follows": (
        "SHARDED",
        BODY,
        {"%wide, 1, 0, 2) : f32[T, 2; 6, 1] tp=shard(1)": "%wide, 1, 0, 2) : f32[T, 2; 6, 1]"},
        "declared as replicated",
        "tp=shard(1)",
    ),
    "an axis that the mesh lacks": (
        "SHARDED",
        BODY,
        {'all_reduce(%part, axis="tp")': 'all_reduce(%part, axis="dp")'},
        "the mesh has no axis 'dp'",
        "tp",
    ),
    "a param on an axis that the mesh lacks": (
        "SHARDED",
        BODY,
        {"f32[4, 2] tp=": "f32[4, 2] dp="},
        "the mesh has no axis 'dp'",
        "tp",
    ),
    "a collective over another number of parts": (
        "SHARDED",
        BODY,
        {"parts=2) : f32[T, 8]": "parts=3) : f32[T, 12]"},
        "ingot.all_gather on axis tp: 3 parts on axis tp",
        "2, its size",
    ),
    "a partial param": (
        "SHARDED",
        BODY,
        {"f32[4, 2] tp=shard(1)": "f32[4, 2] tp=partial"},
        "a param cannot be tp=partial",
        "replicated or shard",
    ),
    "a param split along no axis of its own": (
        "SHARDED",
        BODY,
        {"f32[4, 2] tp=shard(1)": "f32[4, 2] tp=shard(2)"},
        "tp=shard(2) of f32[4, 2]",
        "one of 2 axes",
    ),
    "segments that are not the whole": (
        "SHARDED",
        BODY,
        {"tp=shard(0, segments=[4, 8]) =": "tp=shard(0, segments=[4, 6]) ="},
        "tp=shard(0, segments=[4, 6]) of f32[6, 4] over 2 ranks",
        "multiples of 2 that sum to 12",
    ),
    "segments that do not divide": (
        "SHARDED",
        BODY,
        {"tp=shard(0, segments=[4, 8]) =": "tp=shard(0, segments=[5, 7]) ="},
        "tp=shard(0, segments=[5, 7]) of f32[6, 4] over 2 ranks",
        "multiples of 2 that sum to 12",
    ),
    "a recipe of other segments": (
        "SHARDED",
        BODY,
        {"dim=0, segments=[4, 8])": "dim=0, segments=[8, 4])"},
        "the recipe does not end in the shard of tp=shard(0, segments=[4, 8])",
        "'segments': (4, 8)",
    ),
    "a recipe of the whole": (
        "SHARDED",
        BODY,
        {'shard(source(name="down"), axis="tp", dim=1, segments=[])': 'source(name="down")'},
        "the recipe does not end in the shard of tp=shard(1)",
        "'dim': 1",
    ),
    "a recipe of more shards": (
        "SHARDED",
        BODY,
        {"f32[4, 2] tp=shard(1) =": "f32[4, 2] ="},
        "the recipe shards more than the placement says",
        "as many shards as splits",
    ),
    "a split on a mesh": (
        "SHARDED",
        BODY,
        {"f32[4, 2] tp=shard(1) =": "f32[4, 2] tp=split(1) ="},
        "param 'down' is still to be split: tp=split(1)",
        "a placement",
    ),
    "a mesh before SHARDED": ("NORMAL", BODY, {}, "the program is on a mesh before stage SHARDED", ""),
    "what is owed at SHARDED": (
        "SHARDED",
        BODY,
        {'all_reduce(%part, axis="tp")': 'redistribute(%part, axis="tp", src="partial", dst="replicated", parts=2)'},
        "op ingot.redistribute is not legal here",
        "ingot.all_reduce",
    ),
    "a partial state": (
        "CACHED",
        STATES,
        {"unit=token tp=shard(3)": "unit=token tp=partial"},
        "a state cannot be tp=partial",
        "replicated or shard",
    ),
    "rows of a rank for a matmul of parts": (
        "FUSED",
        ROWS,
        {"linear(%a, %up) : f32[T, 3]": "linear(%n, %up) : f32[T_tp, 3]", "return j=%j": "return j=%j, a=%a"},
        "ingot.linear is given 'x' as tp=shard(0)",
        "tp=replicated",
    ),
    "rows of a rank added to whole rows": (
        "FUSED",
        ROWS,
        {"add_rms_norm(%s, %p,": "add_rms_norm(%s, %q,", "%p = ": "%q = aten.mul.Tensor(%z, 2.0) : f32[T_tp, 4]\n%p = "}
        | {"input g": "input z: f32[T_tp, 4]\ninput g"},
        "ingot.add_rms_norm is given 'residual' as tp=replicated",
        "tp=shard(0)",
    ),
    "rows of a rank returned": (
        "FUSED",
        ROWS,
        {"t=%t": "t=%t, r=%r"},
        "output 'r' is tp=shard(0)",
        "tp=replicated",
    ),
    "rows of a rank whose number is not that of the mesh": (
        "FUSED",
        ROWS,
        {"dim T_tp in [1, 4]": "dim T_tp in [1, 5]"},
        "dim T_tp in [1, 5] on 2 ranks",
        "T_tp in [1, 4], as T in [1, 8]",
    ),
    "parts of rows for more ranks than the mesh has": (
        "FUSED",
        ROWS,
        {'%p = ingot.take_part(%x, axis="tp", dim=0, parts=2)': '%p = ingot.take_part(%x, axis="tp", dim=0, parts=3)'},
        "ingot.take_part on axis tp: 3 parts on axis tp",
        "2, its size",
    ),
    "a state on an axis that the mesh lacks": (
        "CACHED",
        STATES,
        {"unit=token tp=shard(3)": "unit=token pp=shard(3)"},
        "the mesh has no axis 'pp'",
        "tp",
    ),
    "a whole state of parts": (
        "CACHED",
        STATES,
        {"unit=token tp=shard(3)": "unit=token"},
        "ingot.kv_append is given 'kv' as tp=replicated",
        "tp=shard(3)",
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_broken_rule(rule: str) -> None:
    stage, body, changes, message, expected = BROKEN[rule]
    for old, new in changes.items():
        assert body.count(old) == 1, old
        body = body.replace(old, new)
    with pytest.raises(VerifyError) as caught:
        verify(program(body, stage))
    assert caught.value.what == message
    assert expected in caught.value.expected


def test_rows_of_a_rank_verify() -> None:
    found = program(ROWS, "FUSED")
    verify(found)
    assert print_program(found) == HEAD.format(stage="FUSED") + ROWS


def test_one_device_has_no_rows_of_a_rank() -> None:
    text = "program p stage=NORMAL\ndim T in [1, 8]\ndim T_tp in [1, 4]\ninput x: f32[T, 4]\nreturn y=%x\n"
    with pytest.raises(VerifyError, match=r"dim T_tp in \[1, 4\] without ranks of tp") as caught:
        verify(parse_program(text))
    assert caught.value.expected == "a mesh with the axis tp"


def test_one_device_has_no_collectives_and_no_placements() -> None:
    head = "program p stage=SHARDED\ndim T in [1, 8]\ninput x: f32[T, 4]\n"
    for call, problem in (
        ('%y = ingot.all_reduce(%x, axis="tp") : f32[T, 4]\n', "the mesh has no axis 'tp'"),
        ("%y = aten.mul.Tensor(%x, 2.0) : f32[T, 4] tp=partial\n", "a placement without a mesh"),
    ):
        with pytest.raises(VerifyError, match=problem):
            verify(parse_program(head + call + "return y=%y\n"))


def test_what_is_owed_may_stand_on_the_way() -> None:
    body = BODY.replace("all_reduce(%part,", "redistribute(%part,").replace(
        '(%part, axis="tp")', '(%part, axis="tp", src="partial", dst="replicated", parts=2)'
    )
    verify(program(body, "QUANTIZED"), under=Stage.SHARDED)
    with pytest.raises(VerifyError, match=r"op ingot\.redistribute is not legal here"):
        verify(program(body), under=Stage.CACHED)


def test_rules_go_through_regions_and_tuples() -> None:
    body = """input x: f32[T, 4]
input h: f32[T, 4]
input g: f32[4]
param up: f32[6, 4] tp=shard(0) = shard(source(name="up"), axis="tp", dim=0, segments=[])
region r @b {
  input a: f32[T, 4]
  input b: f32[T, 4]
  input c: f32[4]
  input d: f32[6, 4]
  %n = ingot.add_rms_norm(%a, %b, %c, eps=0.1) : (f32[T, 4], f32[T, 4])
  %i = getitem(%n, 0) : f32[T, 4]
  %s = getitem(%n, 1) : f32[T, 4]
  %l = ingot.linear(%i, %d) : f32[T, 6]
  return s=%s, l=%l
}
%both = region.r(%x, %h, %g, %up) : (f32[T, 4], f32[T, 6]) @b
%s = getitem(%both, 0) : f32[T, 4]
%l = getitem(%both, 1) : f32[T, 6] tp=shard(1)
%joined = ingot.all_gather(%l, axis="tp", dim=1, parts=2) : f32[T, 12] @reference
return s=%s, all=%joined
"""
    found = program(body, "LOWERED")
    verify(found)
    assert print_program(found) == HEAD.format(stage="LOWERED") + body
    items = list(found.calls(operator.getitem))
    items[0].meta["placement"] = (shard(1),)
    with pytest.raises(VerifyError, match=r"declared as tp=shard\(1\)"):
        verify(found)
    assert target_of("ingot.all_gather") is OPS["all_gather"].overload
