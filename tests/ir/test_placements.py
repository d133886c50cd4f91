"""Placements: each op's rule against the op itself, computed in parts; the text form; and what the verifier refuses."""

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from ingot.ir.errors import ParseError, VerifyError
from ingot.ir.infer_placement import fit, placement_of
from ingot.ir.ops import OPS, Op, Sample
from ingot.ir.parse import parse_program
from ingot.ir.placements import RULES, Fit, viewed_dim
from ingot.ir.program import ATEN, Program, Stage, StateSpec, target_of
from ingot.ir.text import print_program
from ingot.ir.tolerances import compare
from ingot.ir.types import Placement, StateType, TensorType
from ingot.ir.verify import verify

RANKS = 2
PARTIAL = Placement("tp", "partial")
Spot = Placement | None


def shard(dim: int, *segments: int) -> Placement:
    return Placement("tp", "shard", dim, segments)


def test_every_op_has_a_rule() -> None:
    assert RULES.keys() == {*(f"ingot.{name}" for name in OPS), *ATEN}


# --- rules against the ops -------------------------------------------------------------------------------------------


def parts_of(value: torch.Tensor, spot: Spot) -> list[torch.Tensor]:
    """The value as each rank has it."""
    if spot is None:
        return [value] * RANKS
    if spot.kind == "partial":
        share = torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=value.dtype)
        return [share, value - share]
    if spot.segments:
        pieces = [piece.chunk(RANKS, spot.dim) for piece in value.split(list(spot.segments), spot.dim)]
        return [torch.cat([piece[rank] for piece in pieces], spot.dim) for rank in range(RANKS)]
    return [part.contiguous() for part in value.chunk(RANKS, spot.dim)]


def whole_of(parts: Sequence[torch.Tensor], spot: Spot) -> torch.Tensor:
    """What the ranks have together."""
    if spot is None:
        assert all(torch.equal(part, parts[0]) for part in parts), "ranks differ in a value that all should have"
        return parts[0]
    if spot.kind == "partial":
        return parts[0] + parts[1]
    if spot.segments:
        split = [part.split([size // RANKS for size in spot.segments], spot.dim) for part in parts]
        return torch.cat([torch.cat(pieces, spot.dim) for pieces in zip(*split, strict=True)], spot.dim)
    return torch.cat(list(parts), spot.dim)


def spots_for(value: torch.Tensor) -> list[Spot]:
    found: list[Spot] = [None, *(shard(dim) for dim, size in enumerate(value.shape) if size % RANKS == 0 and size)]
    halves = {dim: size // 2 for dim, size in enumerate(value.shape) if size % (2 * RANKS) == 0 and size}
    found += [shard(dim, size, size) for dim, size in halves.items()]
    return [*found, PARTIAL] if value.is_floating_point() else found


def ask(target: Any, states: Sequence[str], values: dict[str, Any], kwargs: dict[str, Any], at: dict[str, Spot]) -> Fit:
    """What the rule says to arguments that lie as given. Raises VerifyError."""
    program = Program("p", Stage.SHARDED, {}, mesh={"tp": RANKS})
    look: dict[fx.Node, tuple[Placement, ...]] = {}
    args = []
    for key, value in values.items():
        if not isinstance(value, torch.Tensor):
            args.append(value)
            continue
        spot, own = at[key], parts_of(value, at[key])[0]
        value_type = TensorType(own.dtype, tuple(own.shape))
        if key in states:
            node = program.add_state(key, StateSpec("sample", "g", "token", value_type))
        else:
            node = program.add_input(key, value_type)
        look[node] = (spot,) if spot is not None else ()
        args.append(node)
    node = program.graph.create_node("call_function", target, tuple(args), kwargs)
    node.meta["type"] = TensorType(torch.float64, ())  # only the rule of a view reads it
    return fit(node, program, "tp", look.__getitem__)


def ways_of(tensors: dict[str, torch.Tensor], says: Callable[[dict[str, Spot]], Fit]) -> Iterator[dict[str, Spot]]:
    """Arrangements to try: all for up to three arguments; for more what the rule wants when one of them is split."""
    if len(tensors) <= 3:
        for choice in itertools.product(*(spots_for(value) for value in tensors.values())):
            yield dict(zip(tensors, choice, strict=True))
        return
    whole: dict[str, Spot] = dict.fromkeys(tensors)
    yield whole
    for key, value in tensors.items():
        for spot in spots_for(value):
            needs = says({**whole, key: spot}).needs
            at = {name: needs.get(name) for name in tensors}
            if all(place is None or place in spots_for(tensors[name]) for name, place in at.items()):
                yield at


def check_in_parts(name: str, op: Op | None, target: Any, sample: Sample) -> set[str]:
    """Compute the sample in parts for each way of splitting that the rule accepts; those ways, in words."""
    names = op.parameters() if op is not None else ("x", "other", "start", "end")
    values = dict(zip(names, sample.args, strict=False))
    tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
    function, states = (target, ()) if op is None else (op.reference, op.states)
    expected = function(*sample.args, **sample.kwargs)
    several = isinstance(expected, tuple)
    ways: dict[str, dict[str, Spot]] = {}

    def says(at: dict[str, Spot]) -> Fit:
        try:
            return ask(target, states, values, sample.kwargs, at)
        except VerifyError:
            return Fit({"": PARTIAL})  # which no argument is

    for at in ways_of(tensors, says):
        found = says(at)
        way = " ".join(f"{key}:{spot.kind}{spot.dim}" for key, spot in at.items() if spot is not None)
        if "" in found.needs or any(at[key] != found.needs.get(key) for key in at):
            continue
        ways[way] = at
        split = {key: parts_of(value, at[key]) for key, value in tensors.items()}
        results = [
            function(*(split[key][rank] if key in split else value for key, value in values.items()), **sample.kwargs)
            for rank in range(RANKS)
        ]
        for index, wanted in enumerate(expected if several else (expected,)):
            own = [result[index] if several else result for result in results]
            spot = found.result[index] if isinstance(found.result, tuple) else found.result
            problem = compare(whole_of(own, spot), wanted, wanted.dtype, factor=10)  # shares of a sum are larger
            assert problem is None, f"{name} of {at} as {found.result}: {problem}"
    return set(ways)


# Ways of splitting that the rules accept, beside nothing split at all.
WAYS: dict[str, set[str]] = {
    "append_attention": {
        "kv:shard3 q:shard1 k:shard1 v:shard1",
        "kv:shard3 q:shard1 k:shard1 v:shard1 sinks:shard0",
    },
    "attention": {"q:shard1 k:shard1 v:shard1", "q:shard1 k:shard1 v:shard1 sinks:shard0"},
    "cast": {"x:shard1"},
    "gelu_mul": {"gate:shard1 up:shard1"},
    "kv_append": {"kv:shard3 k:shard1 v:shard1"},
    "layer_norm": {"x:shard0", "x:shard1", "x:shard1 weight:shard0"},
    "linear": {
        "weight:shard0",
        "weight:shard0 bias:shard0",
        "x:shard1 weight:shard1",
    },
    "moe": {"gate_up:shard1 down:shard2"},
    "paged_attention": {"q:shard1 kv:shard3", "q:shard1 kv:shard3 sinks:shard0"},
    "qk_norm_rope_append": {"kv:shard3 q:shard1 k:shard1 v:shard1"},
    "rms_norm": {"x:shard0", "x:shard1"},
    "rope": {"x:shard1"},
    "select_rows": {"x:shard1", "x:partial0"},
    "silu_mul": {"gate:shard1 up:shard1"},
    **{name: {"state:shard1"} for name in ("state_copy", "state_move", "state_zero")},
    "soft_cap": {"x:shard0", "x:shard1"},
}
EXTRA: dict[str, list[Sample]] = {
    "rope": [Sample((torch.randn(4, 2, 6).double(), torch.tensor([0, 3, 1, 2], dtype=torch.int32), torch.randn(5, 4)))],
    "layer_norm": [Sample((torch.randn(3, 4, 6).double(), torch.randn(6).double()), {"eps": 0.1})],
    "soft_cap": [Sample((torch.randn(3, 6).double(),), {"cap": 2.0})],
    "attention": [],
}


@pytest.mark.parametrize("name", sorted(name for name, op in OPS.items() if op.across is None))
def test_what_a_rule_accepts_computes_the_same_in_parts(name: str) -> None:
    op = OPS[name]
    samples = [*op.samples(torch.Generator().manual_seed(0), torch.float64), *EXTRA.get(name, [])]
    ways = set().union(*(check_in_parts(name, op, op.overload, sample) for sample in samples))
    assert "" in ways, "what is whole stays whole"
    assert ways - {""} == WAYS.get(name, set())


def test_arithmetic_in_parts() -> None:
    x, other, row = torch.randn(3, 4).double(), torch.randn(3, 4).double(), torch.randn(4).double()
    add, mul = ATEN["aten.add.Tensor"], ATEN["aten.mul.Tensor"]
    ways = {
        (name, index): check_in_parts(name, None, target, Sample(args))
        for name, target in (("add", add), ("mul", mul))
        for index, args in enumerate([(x, other), (x, row), (x, 3.0), (x[:, None], other[:, None])])
    }
    split = {"", "x:shard1 other:shard1"}
    assert ways["add", 0] == split | {"x:partial0 other:partial0"} and ways["mul", 0] == split
    assert ways["mul", 1] == {"", "x:shard1 other:shard0"}
    assert ways["add", 1] == ways["mul", 1] | {"x:partial0 other:partial0"}
    assert ways["add", 2] == {"", "x:shard1"} and ways["mul", 2] == {"", "x:shard1", "x:partial0"}
    assert ways["mul", 3] == {"", "x:shard2 other:shard2"}
    turned = check_in_parts("permute", None, ATEN["aten.permute.default"], Sample((x[:, None], [2, 0, -2])))
    assert turned == {"", "x:shard2", "x:partial0"}


@pytest.mark.parametrize(
    ("shape", "viewed", "dim", "expected"),
    [
        (("T", 12), ("T", 3, 4), 1, 1),
        (("T", 3, 4), ("T", 12), 1, 1),
        (("T", 3, 4), ("T", 12), 2, None),
        ((6, 4), (2, 3, 4), 0, 0),
        ((6, 4), (2, 3, 4), 1, 2),
        ((2, 3, 4), (6, 4), 1, None),
        ((6, 4), (4, 6), 0, 0),
        ((6, 4), (4, 6), 1, None),
        (("T", 12), ("B", 12), 1, None),
        ((2, "T", 12), (2, "T", 4, 3), 2, 2),
    ],
)
def test_where_a_part_lies_in_a_view(shape: Any, viewed: Any, dim: int, expected: int | None) -> None:
    assert viewed_dim(shape, viewed, dim) == expected
    if expected is None or "B" in viewed:
        return
    sizes = {"T": 6}
    whole = torch.randn([sizes.get(size, size) for size in shape])
    parts = whole.chunk(math.gcd(shape[dim], viewed[expected]), dim)
    local = [sizes.get(size, size) for size in viewed]
    local[expected] //= len(parts)
    again = torch.cat([part.reshape(local) for part in parts], expected)
    assert torch.equal(again, whole.view([sizes.get(size, size) for size in viewed]))


# --- programs --------------------------------------------------------------------------------------------------------

HEAD = "program p stage={stage}\nmesh tp=2\ndim T in [1, 8]\ndim pages in [1, 9]\n"
BODY = """input x: f32[T, 4]
param up: f32[6, 4] tp=shard(0, segments=[4, 8]) = shard(source(name="up"), axis="tp", dim=0, segments=[4, 8])
param down: f32[4, 2] tp=shard(1) = shard(source(name="down"), axis="tp", dim=1, segments=[])
%wide = ingot.linear(%x, %up) : f32[T, 6] tp=shard(1, segments=[4, 8])
%left = aten.slice.Tensor(%wide, 1, 0, 2) : f32[T, 2; 6, 1] tp=shard(1)
%right = aten.slice.Tensor(%wide, 1, 2, 6) : f32[T, 4; 6, 1] tp=shard(1)
%part = ingot.linear(%left, %down) : f32[T, 4] tp=partial  # layer 0
%total = ingot.all_reduce(%part, axis="tp") : f32[T, 4]
%joined = ingot.all_gather(%right, axis="tp", dim=1, parts=2) : f32[T, 8]
return y=%total, z=%joined
"""
STATES = """input k: f32[T, 2, 4]
input slots: i64[T]
state kv: paged_kv f32[pages, 2, 16, 1, 4] group=full unit=token tp=shard(3)
%own = ingot.take_part(%k, axis="tp", dim=1, parts=2) : f32[T, 1, 4] tp=shard(1)
%one = ingot.kv_append(%kv, %own, %own, %slots) : state<kv> tp=shard(3)
return kv=%one
"""


def program(body: str = BODY, stage: str = "SHARDED") -> Program:
    return parse_program(HEAD.format(stage=stage) + body)


@pytest.mark.parametrize(("stage", "body"), [("SHARDED", BODY), ("CACHED", STATES)])
def test_programs_on_a_mesh_read_back(stage: str, body: str) -> None:
    found = program(body, stage)
    verify(found)
    text = print_program(found)
    assert text == HEAD.format(stage=stage) + body
    copy = found.copy()
    assert print_program(copy) == text and copy.mesh == {"tp": 2} and copy.mesh is not found.mesh


def test_placements_are_values() -> None:
    found = program()
    wide, *_, part, total, _ = found.calls()
    assert placement_of(wide, found) == (shard(1, 4, 8),) and placement_of(part, found) == (PARTIAL,)
    assert placement_of(total, found) == placement_of(found.find("x"), found) == ()
    assert placement_of(found.find("down"), found) == (shard(1),)
    states = program(STATES, "CACHED")
    assert placement_of(states.find("kv"), states) == (shard(3),)
    assert isinstance(next(states.calls(OPS["kv_append"].overload)).meta["type"], StateType)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("mesh\n", "the line ends too early"),
        ("mesh tp\n", "the line ends too early"),
        ("mesh tp=0\n", "mesh axis tp is 0"),
        ("mesh tp=2 tp=2\n", "mesh axis 'tp' is given twice"),
        ("mesh tp=x\n", "unexpected 'x'"),
    ],
)
def test_bad_meshes_are_no_text(text: str, problem: str) -> None:
    with pytest.raises(ParseError, match=problem):
        parse_program("program p stage=SHARDED\n" + text + "return x=%x\n")


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
        "an add behind the sum",
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
    "a mesh before SHARDED": ("NORMAL", BODY, {}, "a program on a mesh before stage SHARDED", ""),
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
