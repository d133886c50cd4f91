"""For each rule of the verifier one small program that breaks nothing else, and healthy programs of each stage."""

from collections.abc import Callable

import pytest
from healthy_programs import HEALTHY, KV, REGION, ROWS, WRITE, X, healthy, program, refusal

from ingot.ir.errors import VerifyError
from ingot.ir.ops import OPS
from ingot.ir.parse import parse_program
from ingot.ir.program import Stage
from ingot.ir.verify import RULES, verify


@pytest.mark.parametrize("stage", Stage, ids=lambda stage: stage.name)
def test_healthy_program(stage: Stage) -> None:
    verify(healthy(stage))


@pytest.mark.parametrize("name", ["traced", "cached", "lowered"])
def test_golden_is_healthy(name: str, golden: Callable[[str], str]) -> None:
    verify(parse_program(golden(name)))


def test_every_stage_has_rules() -> None:
    assert set(RULES) == set(Stage)
    assert list(Stage) == sorted(Stage)


def test_what_a_stage_allows_the_next_one_forbids_only_by_name() -> None:
    """The golden of one stage under the rules of another: the first illegal op is named, with what is legal."""
    traced = healthy(Stage.TRACED)
    verify(traced, under=Stage.TRACED)
    assert refusal(traced, under=Stage.NORMAL).what == "nothing uses the result"
    fused = healthy(Stage.FUSED)
    error = refusal(fused, under=Stage.CACHED, after="fuse-norms")
    assert error.what == "op ingot.add_rms_norm is not legal here" and "ingot.rms_norm" in error.expected
    where = "program p, stage FUSED, after pass fuse-norms, line 8, column 1: %y = ingot.add_rms_norm(%x, %x, %w, eps="
    assert error.where.startswith(where)


ATTEND = "input q: f32[T, 2, 4]\ninput t: i32[T]\n"
ATTENTION = ATTEND + "%y = ingot.attention(%q, %q, %q, %t, %t, scale=0.5, layer=0) : f32[T, 2, 4]\nreturn y=%y\n"
LATENT = (
    "input q: f32[T, 2, 4]\ninput r: f32[T, 2, 6]\ninput c: f32[T, 1, 5]\ninput k: f32[T, 1, 6]\n"
    "input u: f32[2, 4, 5]\ninput v: f32[2, 3, 5]\ninput t: i32[T]\n"
    "%y = ingot.latent_attention(%q, %r, %c, %k, %u, %v, %t, %t, scale=0.5, layer=0) : f32[T, 2, 3]\nreturn y=%y\n"
)
FUSED = HEALTHY["FUSED"]
CACHED = HEALTHY["CACHED"]
SAMPLE = (
    "input l: f32[B, 9]\ninput f: f32[B]\ninput i: i32[B]\ninput s: i64[B]\ninput c: i32[B, 9]\n"
    "%y = ingot.sample(%l, %f, %i, %f, %f, %f, %s, %i, %c, %i, %f, %f, %f, %c, %c, %i, %i) : i32[B]\nreturn y=%y\n"
)
APPEND = (
    KV + "input i: i32[T]\ninput c: f32[16, 4]\n"
    "%q = ingot.qk_norm_rope_append(%kv, %k, %k, %k, %i, %c, %slots, eps=0.0) : (f32[T, 1, 4], state<kv>)\n"
    "%q_1 = getitem(%q, 0) : f32[T, 1, 4]\n%one = getitem(%q, 1) : state<kv>\nreturn q=%q_1, kv=%one\n"
)
BEFORE_CACHED = ["TRACED", "NORMAL", "QUANTIZED", "SHARDED"]
ILLEGAL = [
    *((stage, FUSED, "ingot.add_rms_norm") for stage in [*BEFORE_CACHED, "CACHED"]),
    *((stage, CACHED, "ingot.kv_append") for stage in BEFORE_CACHED),
    *((stage, SAMPLE, "ingot.sample") for stage in BEFORE_CACHED),
    *((stage, ATTENTION, "ingot.attention") for stage in ["CACHED", "FUSED", "LOWERED", "PLANNED"]),
    *((stage, LATENT, "ingot.latent_attention") for stage in ["CACHED", "FUSED", "LOWERED", "PLANNED"]),
    *((stage, APPEND, "ingot.qk_norm_rope_append") for stage in [*BEFORE_CACHED, "CACHED"]),
]


@pytest.mark.parametrize(("stage", "body", "op"), ILLEGAL)
def test_illegal_op(stage: str, body: str, op: str) -> None:
    error = refusal(program(stage, body))
    assert error.what == f"op {op} is not legal here"
    assert op not in error.expected.split(", ")


def test_latent_attention_is_healthy_before_there_are_caches() -> None:
    for stage in BEFORE_CACHED:
        verify(program(stage, LATENT))


def test_fused_append_is_healthy() -> None:
    verify(program("FUSED", APPEND))


def test_every_op_says_where_it_may_stand() -> None:
    """And so do the stages: an op with states never before CACHED, a fused one never before FUSED."""
    for op in OPS.values():
        assert op.legal in ("any", "pure", "cached", "open") and (op.legal == "cached" or not op.states)
        legal = [stage for stage, rules in RULES.items() if f"ingot.{op.name}" in rules.ops()]
        expected = [
            stage
            for stage in Stage
            if (op.legal in ("any", "open") or (stage >= Stage.CACHED) == (op.legal == "cached"))
            and (op.legal != "open" or stage < Stage.SHARDED)
            and (stage >= Stage.FUSED or not op.decompose)
        ]
        assert legal == expected, op.name
    named = {legal: {op.name for op in OPS.values() if op.legal == legal} for legal in ("pure", "cached", "open")}
    assert named["open"] == {"redistribute"}
    assert named["pure"] == {"attention", "choose_positions", "latent_attention"}
    movers = {"state_copy", "state_move", "state_zero"}
    over_states = {"advance", "append_attention", "count_tokens", "kv_append", "paged_attention", "partial_attention"}
    over_states |= {"qk_norm_rope_append", "paged_choose_positions", "sparse_attention"}
    drafts = {"take_drafts", "accept_drafts", "read_rows", "write_rows", "take_block", "fill_block"}
    tree = {"tree_ancestors", "tree_positions", "accept_tree", "move_slots"}
    steps = {"feed", "page_slots", "sample", "top_logprobs", "step_attention", "step_latent_attention", "pool"}
    steps |= {"lora_shrink", "lora_expand"}
    assert named["cached"] == {*over_states, *movers, *drafts, *tree, *steps}


@pytest.mark.parametrize("stage", ["TRACED", "FUSED"])
def test_region_too_early(stage: str) -> None:
    body = X + REGION + "%y = region.r(%x) : f32[T, 4]\nreturn y=%y\n"
    assert refusal(program(stage, body)).what == "a region before stage LOWERED"


Y = "%y = aten.mul.Tensor(%x, 2.0) : f32[T, 4]\n"
# rule -> (stage, body, the message, part of what was expected)
BROKEN = {
    "unused call": ("NORMAL", X + Y + "return x=%x\n", "nothing uses the result", ""),
    "undeclared dim of an input": ("NORMAL", "input x: f32[P, 4]\nreturn x=%x\n", "dim P is not declared", "T, B"),
    "undeclared dim of a state": (
        "CACHED",
        "state s: row f32[E] group=g unit=sequence\nreturn s=%s\n",
        "dim E is not declared",
        "T, B",
    ),
    "undeclared dim in a tuple": (
        "FUSED",
        FUSED.replace("(f32[T, 4], f32[T, 4])", "(f32[T, 4], f32[P, 4])"),
        "dim P is not declared",
        "T, B",
    ),
    "wrong shape": (
        "NORMAL",
        X + Y.replace("[T, 4]", "[T, 5]") + "return y=%y\n",
        "declared as f32[T, 5]",
        "f32[T, 4]",
    ),
    "wrong symbol": (
        "NORMAL",
        X + Y.replace("[T, 4]", "[B, 4]") + "return y=%y\n",
        "declared as f32[B, 4]",
        "f32[T, 4]",
    ),
    "wrong dtype": ("NORMAL", X + Y.replace("f32", "bf16") + "return y=%y\n", "declared as bf16[T, 4]", "f32[T, 4]"),
    "wrong stride": (
        "NORMAL",
        X + "%y = aten.slice.Tensor(%x, 1, 0, 3) : f32[T, 3]\nreturn y=%y\n",
        "declared as f32[T, 3]",
        "f32[T, 3; 4, 1]",
    ),
    "tuple declared as a tensor": (
        "FUSED",
        FUSED.replace("(f32[T, 4], f32[T, 4])", "f32[T, 4]"),
        "declared as f32[T, 4]",
        "(",
    ),
    "arguments that do not fit": (
        "NORMAL",
        X + "%y = ingot.linear(%x, %x, %w) : f32[T, T]\nreturn y=%y\n",
        "ingot.linear cannot take (f32[T, 4], f32[T, 4], f32[4]): ",
        "",
    ),
    "a latent for each head": (
        "NORMAL",
        LATENT.replace("c: f32[T, 1, 5]", "c: f32[T, 2, 5]"),
        "latents [T, 2, 5] and rotated keys [T, 1, 6]",
        "one row per token for all heads: [T, 1, C] and [T, 1, R]",
    ),
    "matrices of other heads": (
        "NORMAL",
        LATENT.replace("v: f32[2, 3, 5]", "v: f32[1, 3, 5]"),
        "matrices [2, 4, 5] of keys and [1, 3, 5] of values",
        "[2, 4, 5] and [2, V, 5]",
    ),
    "arithmetic on a symbol": (
        "NORMAL",
        X + "%y = aten.view.default(%x, [-1]) : f32[4]\nreturn y=%y\n",
        "size 4000012 is arithmetic on a symbol",
        "a number or a symbol",
    ),
    "no such item": ("FUSED", FUSED.replace("%y, 1", "%y, 2"), "no item 2 in (f32[T, 4], f32[T, 4])", ""),
    "a tuple as an argument": (
        "FUSED",
        FUSED.replace("getitem(%y, 1)", "aten.mul.Tensor(%y, 2.0)"),
        "%y is a tuple; take its items first",
        "",
    ),
    "a tuple as an output": ("FUSED", FUSED.replace("z=%z", "y=%y, z=%z"), "output 'y' is a tuple", "its items"),
    "no outputs": ("NORMAL", X + "return\n", "outputs must be named, each once", ""),
    "no backend": ("LOWERED", X + Y + "return y=%y\n", "no backend was chosen", ""),
    "no backend of a region": (
        "LOWERED",
        HEALTHY["LOWERED"].replace(" @b\nreturn", "\nreturn"),
        "no backend was chosen",
        "",
    ),
    "no plan": ("PLANNED", HEALTHY["PLANNED"], "the program has no plan", ""),
    "unknown region": (
        "LOWERED",
        X + "%y = region.r(%x) : f32[T, 4] @b\nreturn y=%y\n",
        "unknown region 'r'",
        "no region exists",
    ),
    "region called with another type": (
        "LOWERED",
        X + REGION + "%y = region.r(%w) : f32[T, 4] @b\nreturn y=%y\n",
        "region r is called with (f32[4])",
        "(f32[T, 4])",
    ),
    "region called with too little": (
        "LOWERED",
        X + REGION + "%y = region.r() : f32[T, 4] @b\nreturn y=%y\n",
        "region r is called with ()",
        "(f32[T, 4])",
    ),
    "region called with a constant": (
        "LOWERED",
        X + REGION + "%y = region.r(2.0) : f32[T, 4] @b\nreturn y=%y\n",
        "region r is called with constants or names",
        "values in order",
    ),
    "region without calls": ("LOWERED", X + REGION + "return x=%x\n", "region 'r' is never called", ""),
    "region with a param": (
        "LOWERED",
        HEALTHY["LOWERED"].replace("{\n", "{\n  param p: f32[4] = source()\n"),
        "region 'r' holds states, params or regions of its own",
        "",
    ),
    "state written over, then read": (
        "CACHED",
        ATTEND.replace("T, 2", "T, 1")
        + KV
        + "input table: i32[B, 3]\ninput b: i32[B]\n"
        + WRITE
        + "%y = ingot.paged_attention(%q, %kv, %table, %b, %b, %b, scale=0.5) : f32[T, 1, 4]\nreturn y=%y, kv=%one\n",
        "%y reads a version of state 'kv' that %one has overwritten",
        "",
    ),
    "state returned in an old version": (
        "CACHED",
        KV
        + WRITE
        + WRITE.replace("%one =", "%two =").replace("(%kv", "(%one")
        + "%k2 = ingot.select_rows(%k, %slots) : f32[T, 1, 4]\nreturn k2=%k2, kv=%kv, two=%two\n",
        "state 'kv' is returned as %kv",
        "%two, its last version",
    ),
    "state not returned": (
        "CACHED",
        KV + "return k=%k\n",
        "state 'kv' is returned as nothing",
        "%kv, its last version",
    ),
    "state written over twice": (
        "CACHED",
        KV + WRITE + WRITE.replace("%one", "%two") + "return kv=%two, one=%one\n",
        "%kv is overwritten twice, by %one and %two",
        "",
    ),
    "state under the name of another": (
        "CACHED",
        CACHED.replace("kv=%one", "kv=%one, copy=%one"),
        "output 'copy' is state 'kv'",
        "",
    ),
    "state whose new version is not used": (
        "CACHED",
        ROWS.replace("%place_1 = getitem(%moved, 1) : state<place>\n", "") + "return last=%last_1, place=%place\n",
        "%moved writes state 'place', but nothing takes the new version",
        "",
    ),
    "state whose new version two take": (
        "CACHED",
        ROWS + "%other = getitem(%moved, 1) : state<place>\nreturn last=%last_1, place=%place_1, other=%other\n",
        "%moved writes state 'place', but %place_1 and %other takes the new version",
        "",
    ),
    "a placement of a param without a mesh": (
        "SHARDED",
        HEALTHY["SHARDED"].replace("tp=split(0)", "tp=shard(0)"),
        "a placement without a mesh",
        "a split, which says how a mesh would split it",
    ),
    "one state given for two": (
        "CACHED",
        ROWS.replace("(%last, %place,", "(%last, %last,") + "return last=%last_1, place=%place_1\n",
        "ingot.advance is given one state twice: state<last>, state<last>",
        "",
    ),
    "a tensor where a state belongs": (
        "CACHED",
        KV + "input c: f32[3, 2, 16, 1, 4]\n%one = ingot.kv_append(%c, %k, %k, %slots) : state<kv>\nreturn kv=%one\n",
        "'kv' of ingot.kv_append is f32[3, 2, 16, 1, 4]",
        "a state",
    ),
    "a view of a state": (
        "CACHED",
        KV + "%y = aten.slice.Tensor(%kv, 0, 0, 1) : f32[1, 2, 16, 1, 4]\nreturn y=%y, kv=%kv\n",
        "a view of a state",
        "",
    ),
    "unknown state": (
        "CACHED",
        KV + WRITE.replace("state<kv>", "state<kw>") + "return kv=%one\n",
        "unknown state 'kw'",
        "kv",
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_broken_rule(rule: str) -> None:
    stage, body, message, expected = BROKEN[rule]
    error = refusal(program(stage, body))
    assert error.what.startswith(message) if message.endswith(": ") else error.what == message
    assert expected in error.expected


def test_an_error_in_a_region_names_the_region() -> None:
    body = HEALTHY["LOWERED"].replace("%a, 2.0) : f32[T, 4]", "%a, 2.0) : f32[T, 5]")
    # The call's type comes from the body's, so it has to be as wrong.
    broken = program("LOWERED", body.replace("region.r(%x) : f32[T, 4]", "region.r(%x) : f32[T, 5]"))
    with pytest.raises(VerifyError) as caught:
        verify(broken)
    assert (
        caught.value.where == "program r, stage LOWERED, line 10, column 3: %y = aten.mul.Tensor(%a, 2.0) : f32[T, 5]"
    )
    assert caught.value.what == "declared as f32[T, 5]"


def test_on_the_way_to_a_stage_another_pass_may_have_yet_to_do_its_part() -> None:
    """A pure op among cached ones: legal until the program is of the stage."""
    verify(program("NORMAL", ATTENTION), under=Stage.CACHED)
    assert refusal(program("CACHED", ATTENTION)).what == "op ingot.attention is not legal here"
    assert refusal(program("FUSED", FUSED), under=Stage.CACHED).what == "op ingot.add_rms_norm is not legal here"
