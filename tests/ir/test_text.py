"""Programs, types and recipes as text: what is printed is what was written, and nothing is lost on the way."""

import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.ir.artifact.plan import BucketClass
from ingot.ir.build import call
from ingot.ir.errors import InternalError
from ingot.ir.ops import OPS
from ingot.ir.parse import parse_program, parse_programs, parse_recipe, parse_type
from ingot.ir.program import ParamSpec, Program, Region, RegionCall, Stage, StateSpec
from ingot.ir.recipe import concat, shard, source
from ingot.ir.text import print_call, print_program, print_region_body
from ingot.ir.types import DIM_MEANINGS, DTYPES, Dim, Placement, Split, StateType, TensorType, TupleType
from ingot.passes.dce import eliminate_dead_code

GOLDENS = ["traced", "cached", "lowered", "corners"]


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_is_printed_as_it_was_written(name: str, golden: Callable[[str], str]) -> None:
    text = golden(name)
    program = parse_program(text)
    assert print_program(program) == text
    assert print_program(program.copy()) == text
    assert print_program(parse_program(print_program(program))) == text


def test_goldens_after_each_other_are_programs_after_each_other(golden: Callable[[str], str]) -> None:
    texts = [golden(name) for name in GOLDENS]
    assert [print_program(program) for program in parse_programs("\n".join(texts))] == texts


def test_blank_lines_comments_and_indentation_mean_nothing(golden: Callable[[str], str]) -> None:
    text = golden("lowered")
    spread = "\n\n# a comment\n" + text.replace("\n", "\n\n   # between\n    ") + "\n  # the end"
    assert print_program(parse_program(spread)) == text


def test_corners_are_read_as_values(golden: Callable[[str], str]) -> None:
    program = parse_program(golden("corners"))
    assert program.name == "draft-1.b" and program.stage is Stage.SHARDED
    assert program.bucket == BucketClass(name="any", tokens=(1, 1), q_max=None)
    assert program.dims == {"E": Dim("E", 3, 3)}
    types = program.input_types()
    assert types["scalar"] == TensorType(torch.float64, ())
    assert types["strided"] == TensorType(torch.float8_e4m3fn, ("E", 4, 6), (48, 1, 8))
    assert types["reversed"].strides == (1, 3) and types["expanded"].strides == (0, 1)
    spec = program.params["a.b-c.0"]
    assert spec.split == Split("pp", 0, (1, 2), 2, repeat=True, needed=False)
    assert spec.placement == (
        Placement("dp", "shard", 1),
        Placement("tp", "shard", 0, (3, 4)),
        Placement("pp", "partial"),
        Placement("ep", "replicated"),
    )
    names = spec.recipe.sources()
    assert names == {'quote " backslash \\ newline \n tab \t snowman ☃ # no comment', ""}
    assert spec.recipe.attr("scale") == 1e-05 and str(spec.recipe.attr("offset")) == "-0.0"
    assert program.params["split"].recipe.output == "left"
    attrs = dict(program.params["all_steps"].recipe.attrs)
    assert (attrs["a"], attrs["b"], attrs["c"], attrs["d"]) == (None, True, False, float("inf"))
    assert attrs["e"] == 1e16 and isinstance(attrs["e"], float)
    x, y, z, w = program.calls()
    assert x.args[1] == 1e-05 and x.kwargs == {"alpha": -3}
    assert x.meta["origin"] == 'an origin with "quotes", a # and 100% of the signs: (a)[b]'
    assert y.args[1] == float("inf") and y.kwargs == {"out": None, "other": float("-inf")}
    assert y.meta["type"] == TupleType(
        (
            TupleType(
                (
                    TensorType(torch.float64, ()),
                    TupleType((StateType("kv.0"), TensorType(torch.int64, ("E",)))),
                )
            ),
            TupleType(()),
        )
    )
    nested = z.args[1]
    assert isinstance(nested, list | tuple)
    assert nested[0] == [1, [2.0, -3]] and nested[1] == [] and nested[2] == [x, program.find("strided")]
    assert list(nested[3:7]) == [None, True, False, torch.float8_e4m3fn]
    assert str(nested[7]) == "nan" and nested[8] == 'a "b" \\ ☃'
    assert w.target == RegionCall("r0.inner") and w.kwargs["big"] == 123456789012345678901234567890
    assert str(w.kwargs["neg"]) == "-0.0" and w.kwargs["k"] == [z]
    assert program.regions["r0.inner"].backend == "tensorrt"
    assert program.outputs == ("x", "a.b")


def tiny() -> Program:
    """A program built by the API, with every kind of placeholder, a region, a backend and an origin."""
    program = Program("p", Stage.LOWERED, {"T": Dim("T", 1, 8)}, bucket=BucketClass(name="b", tokens=(1, 8), q_max=1))
    x = program.add_input("x", TensorType(torch.float32, ("T", 4)))
    spec = ParamSpec(TensorType(torch.float32, (4,)), source("w"), (), Split("tp", 0, (2, 2)))
    weight = program.add_param("a.weight", spec)
    program.add_state("s", StateSpec("row", "rows", "sequence", TensorType(torch.int32, (3,))))
    body = Program("r", Stage.LOWERED, program.dims, bucket=program.bucket)
    first = body.add_input("first", TensorType(torch.float32, ("T", 4)))
    second = body.add_input("second", TensorType(torch.float32, (4,)))
    fused = call(body, OPS["add_rms_norm"].overload, (first, first, second), {"eps": 1e-5}, origin="layer 0")
    body.set_outputs({name: call(body, operator.getitem, (fused, i)) for i, name in enumerate(("normed", "total"))})
    program.regions["r"] = Region("r", body, "inductor")
    both = call(program, RegionCall("r"), (x, weight), origin="region")
    item = call(program, operator.getitem, (both, 0))
    cast = call(program, OPS["cast"].overload, (item,), {"dtype": torch.bfloat16}, origin="end, file.py:3")
    both.meta["backend"] = cast.meta["backend"] = "reference"
    program.set_outputs({"y": cast, "s": program.find("s")})
    return program


TINY = """\
program p stage=LOWERED bucket=b tokens=[1, 8] q_max=1
dim T in [1, 8]
input x: f32[T, 4]
param a.weight: f32[4] tp=split(0, segments=[2, 2]) = source(name="w")
state s: row i32[3] group=rows unit=sequence
region r @inductor {
  input first: f32[T, 4]
  input second: f32[4]
  %add_rms_norm = ingot.add_rms_norm(%first, %first, %second, eps=1e-05) : (f32[T, 4], f32[T, 4])  # layer 0
  %item = getitem(%add_rms_norm, 0) : f32[T, 4]
  %item_1 = getitem(%add_rms_norm, 1) : f32[T, 4]
  return normed=%item, total=%item_1
}
%region_r = region.r(%x, %a.weight) : (f32[T, 4], f32[T, 4]) @reference  # region
%item = getitem(%region_r, 0) : f32[T, 4]
%cast = ingot.cast(%item, dtype=bf16) : bf16[T, 4] @reference  # end, file.py:3
return y=%cast, s=%s
"""


def test_a_region_for_fewer_sizes_says_so() -> None:
    program = tiny()
    body = program.regions["r"].body
    body.dims = {"T": Dim("T", 2, 4)}
    text = print_program(program)
    assert text == TINY.replace("region r @inductor {\n", "region r @inductor {\n  dim T in [2, 4]\n")
    again = parse_program(text)
    assert again.regions["r"].body.dims == body.dims and again.dims == {"T": Dim("T", 1, 8)}
    assert print_region_body(again.regions["r"].body) == print_region_body(body)


def test_a_built_program_prints_and_parses() -> None:
    program = tiny()
    assert print_program(program) == TINY
    again = parse_program(TINY)
    assert print_program(again) == TINY
    assert again.params == program.params and again.states == program.states and again.dims == program.dims


def test_a_copy_is_independent() -> None:
    program = tiny()
    copy = program.copy()
    copy.set_outputs({"s": copy.find("s")})
    assert eliminate_dead_code(copy) == 3 and "a.weight" not in copy.params
    assert print_program(program) == TINY


def test_what_has_no_text_form_is_an_error() -> None:
    program = tiny()
    node = next(iter(program.calls(OPS["cast"].overload)))
    node.kwargs = {"dtype": torch.device("cpu")}
    with pytest.raises(InternalError, match=r"an argument device\(type='cpu'\) of type device has no text form"):
        print_call(node)
    node.target = torch.relu
    node.kwargs = {}
    with pytest.raises(InternalError, match="which has no name in the IR"):
        print_program(program)


def layer(index: int, eps: float = 1e-5) -> Program:
    body = Program(f"layer_{index}", Stage.FUSED, {"T": Dim("T", 1, 8)})
    x = body.add_input(f"h.{index}", TensorType(torch.float32, ("T", 4)))
    weight = body.add_input(f"layers.{index}.w", TensorType(torch.float32, (4,)))
    for _ in range(index):  # names of nodes depend on what stood in the graph before
        body.graph.erase_node(call(body, OPS["rms_norm"].overload, (x, weight), {"eps": eps}))
    norm = call(body, OPS["rms_norm"].overload, (x, weight), {"eps": eps}, origin=f"layer {index}")
    body.set_outputs({f"out.{index}": call(body, torch.ops.aten.view.default, (norm, [-1, 2, 2]))})
    return body


def test_equal_layers_have_equal_region_bodies() -> None:
    assert print_program(layer(0)) != print_program(layer(3))
    assert print_region_body(layer(0)) == print_region_body(layer(3))
    assert print_region_body(layer(0)) != print_region_body(layer(0, eps=1e-6))


def test_the_order_of_named_arguments_is_no_difference() -> None:
    text = "program p stage=NORMAL\ndim T in [1, 8]\ninput q: f32[T, 2, 4]\ninput t: i32[T]\n"
    text += "%y = ingot.attention(%q, %q, %q, %t, %t, NAMED) : f32[T, 2, 4]\nreturn y=%y\n"
    bodies = [
        print_region_body(parse_program(text.replace("NAMED", named)))
        for named in ("scale=0.5, layer=1", "layer=1, scale=0.5")
    ]
    assert bodies[0] == bodies[1]


SIZES = st.one_of(st.integers(0, 2**40), st.sampled_from(sorted(DIM_MEANINGS)))
SHAPES = st.lists(SIZES, max_size=4).map(tuple)
STRIDES = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)


@settings(deadline=None)
@given(st.sampled_from(sorted(DTYPES)), SHAPES, STRIDES)
def test_types_read_back(dtype: str, shape: tuple[int | str, ...], strides: tuple[int, ...]) -> None:
    whole = strides if len(strides) == len(shape) > 0 else None
    value_type = TensorType(DTYPES[dtype], shape, whole)
    assert parse_type(str(value_type)) == value_type


def test_row_major_strides_are_not_printed() -> None:
    assert str(TensorType(torch.float32, ("T", 2, 3), (6, 3, 1))) == "f32[T, 2, 3]"
    assert str(TensorType(torch.float32, ("T", 2, 3), (6, 1, 2))) == "f32[T, 2, 3; 6, 1, 2]"


@pytest.mark.parametrize(
    ("text", "tensor", "problem"),
    [
        ("f32[T, 4; 8, 1]", torch.zeros(3, 8)[:, :4], None),
        ("f32[T, 4; 8, 1]", torch.zeros(3, 4), "strides [4, 1], expected f32[T, 4; 8, 1]"),
        ("f32[T, 4; 8, 1]", torch.zeros(1, 4), None),  # the stride of an axis of one means nothing
        ("f32[T, 4]", torch.zeros(3, 8)[:, :4], "strides [8, 1], expected row-major f32[T, 4]"),
        ("f32[T, T]", torch.zeros(3, 3), None),
        ("f32[B, 4]", torch.zeros(3, 4), "shape [3, 4], expected f32[B, 4]"),
        ("f32[pages, 4]", torch.zeros(7, 4), None),  # a symbol without a size fits any
        ("f32[]", torch.zeros(1), "shape [1], expected f32[]"),
        ("i8[2]", torch.zeros(2), "dtype f32, expected i8"),
    ],
)
def test_a_tensor_fits_its_type_or_the_difference_is_told(text: str, tensor: torch.Tensor, problem: str | None) -> None:
    assert parse_type(text).mismatch(tensor, {"T": tensor.shape[0] if tensor.dim() else 1, "B": 2}) == problem


@pytest.mark.parametrize(
    ("one", "other", "holds"),
    [
        ("f32[T, 4]", "f32[T, 4]", True),
        ("f32[T, 4]", "bf16[T, 4]", True),
        ("f64[T]", "f32[T]", True),
        ("bf16[T, 4]", "f32[T, 4]", False),
        ("bf16[T]", "f16[T]", False),
        ("f32[T]", "i32[T]", False),
        ("i64[T]", "i32[T]", False),
        ("f32[T, 4]", "bf16[T, 5]", False),
        ("f32[T, 4]", "bf16[T, 4; 8, 1]", False),
    ],
)
def test_a_type_holds_the_numbers_of_narrower_ones(one: str, other: str, holds: bool) -> None:
    assert parse_type(one).holds(parse_type(other)) is holds


NAMES = st.text(max_size=12)
FLOATS = st.floats(allow_nan=False)
ATTRS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), FLOATS, NAMES),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@settings(deadline=None)
@given(NAMES, st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), ATTRS, max_size=4))
def test_recipes_read_back(name: str, attrs: dict[str, object]) -> None:
    from ingot.ir.recipe import Recipe

    leaf = Recipe("table", (), tuple(attrs.items()), "part")  # type: ignore[arg-type]
    recipe = shard(concat([source(name), leaf, source("b")], 1), "tp", 0, (4, 8))
    again = parse_recipe(str(recipe))
    assert again == recipe and str(again) == str(recipe) and again.digest() == recipe.digest()
