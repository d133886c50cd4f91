"""What ranks do together: each collective against plain torch, on meshes of one and of two axes."""

from typing import Any

import pytest
import torch

from ingot.ir.errors import InternalError, OptionError, VerifyError
from ingot.ir.infer import infer
from ingot.ir.interpret import interpret, interpret_ranks
from ingot.ir.mesh import Rank, check_mesh, groups, mesh_text, parse_mesh, ranks, world_size
from ingot.ir.ops import OPS
from ingot.ir.ops.collectives import collective_of, in_parts, own_part
from ingot.ir.parse import parse_program
from ingot.ir.program import Program
from ingot.ir.verify import verify

PARTS = [torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
TOTAL = PARTS[0] + PARTS[1]
COLLECTIVES = sorted(name for name, op in OPS.items() if op.across is not None)


def across(name: str, *args: list[torch.Tensor], **kwargs: Any) -> list[torch.Tensor]:
    function = OPS[name].across
    assert function is not None
    results: list[torch.Tensor] = function(*args, **kwargs)
    memory = {arg.untyped_storage().data_ptr() for column in args for arg in column}
    for result, *given in zip(results, *args, strict=True):
        assert result.is_contiguous() and result.untyped_storage().data_ptr() not in memory
        own = OPS[name].fake(*(arg.to("meta") for arg in given), **kwargs)
        assert own.shape == result.shape and own.dtype == result.dtype, "the shape function says what is made"
    return results


def test_reductions() -> None:
    assert all(torch.equal(found, TOTAL) for found in across("all_reduce", PARTS, axis="tp"))
    for dim, size in ((0, 2), (1, 3)):
        found = across("reduce_scatter", PARTS, axis="tp", dim=dim, parts=2)
        assert [torch.equal(part, TOTAL.narrow(dim, size * i, size)) for i, part in enumerate(found)] == [True, True]


def test_a_sum_is_rounded_once() -> None:
    """1 + 2^-8 + 2^-8: added in bfloat16 each of the small ones is lost."""
    small = [torch.tensor([value]).bfloat16() for value in (1.0, 2**-8, 2**-8)]
    assert across("all_reduce", small, axis="tp")[0].item() == 1 + 2**-7


def test_moving_parts() -> None:
    for dim in (0, 1):
        assert all(
            torch.equal(x, torch.cat(PARTS, dim)) for x in across("all_gather", PARTS, axis="tp", dim=dim, parts=2)
        )
        halves = across("take_part", [TOTAL, TOTAL], axis="tp", dim=dim, parts=2)
        assert torch.equal(torch.cat(halves, dim), TOTAL) and halves[0].shape == halves[1].shape


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 9])
def test_rows_that_do_not_divide_are_padded_with_zeros(rows: int, ranks: int) -> None:
    """All parts have equally many rows. A gather cuts the padding off. Bits of sums do not depend on it."""
    values = [torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(ranks)]
    total = across("all_reduce", values, axis="tp")[0]
    attrs: dict[str, Any] = {"axis": "tp", "dim": 0, "parts": ranks}
    sums = across("reduce_scatter", values, **attrs)
    for parts in (sums, across("take_part", [total] * ranks, **attrs)):
        joined = torch.cat(parts)
        assert {part.shape[0] for part in parts} == {-(-rows // ranks)}
        assert torch.equal(joined[:rows], total) and not joined[rows:].any()
    like = torch.zeros(rows, dtype=torch.int32)
    assert all(torch.equal(whole, total) for whole in across("all_gather", sums, [like] * ranks, **attrs))
    each = torch.stack([own_part(total, place, ranks, 0) for place in range(ranks)])
    assert torch.equal(in_parts(total, ranks, 0), each), "the parts of all ranks at once"


def test_parts_of_columns_at_once() -> None:
    wide = torch.randn(5, 12)[:, :6]  # not row-major
    assert torch.equal(in_parts(wide, 3, 1), torch.stack(wide.chunk(3, 1)))
    rows = torch.randn(6, 4)
    assert in_parts(rows, 3, 0).data_ptr() == rows.data_ptr(), "whole rows are not copied"


def test_a_vocabulary_in_parts_is_one() -> None:
    weight = torch.randn(10, 3)
    ids = torch.tensor([0, 9, 4, 5, 5], dtype=torch.int32)
    found = across("vocab_embedding", [ids, ids], list(weight.split(5)), axis="tp", parts=2)
    assert torch.equal(found[0] + found[1], weight[ids.long()])
    assert not found[0][1].any() and not found[1][0].any(), "a token of another rank's part is zero"


@pytest.mark.parametrize(
    ("src", "dst", "name"),
    [
        ("partial", "replicated", "all_reduce"),
        ("shard", "replicated", "all_gather"),
        ("partial", "shard", "reduce_scatter"),
        ("replicated", "shard", "take_part"),
    ],
)
def test_what_is_owed_is_the_collective_that_pays(src: str, dst: str, name: str) -> None:
    assert collective_of(src, dst) == name
    attrs: dict[str, Any] = {} if name == "all_reduce" else {"dim": 1, "parts": 2}
    owed = across("redistribute", PARTS, axis="tp", src=src, dst=dst, dim=1, parts=2)
    for found, expected in zip(owed, across(name, PARTS, axis="tp", **attrs), strict=True):
        assert torch.equal(found, expected)


def test_what_does_not_divide_has_no_type() -> None:
    program = parse_program("program p stage=NORMAL\ndim T in [1, 8]\ninput x: f32[T, 5]\nreturn x=%x\n")
    x = program.find("x")
    for name, attrs in (
        ("take_part", {}),
        ("reduce_scatter", {}),
        ("redistribute", {"src": "partial", "dst": "shard"}),
    ):
        with pytest.raises(VerifyError, match="does not split into 2 parts"):
            infer(OPS[name].overload, (x,), {"axis": "tp", "dim": 1, "parts": 2, **attrs}, program)
    with pytest.raises(VerifyError, match="no collective moves a value from shard to partial"):
        infer(OPS["redistribute"].overload, (x,), {"axis": "tp", "src": "shard", "dst": "partial"}, program)


def test_types_of_rows() -> None:
    """The rows of a rank have a symbol of their own, and a gather has the rows of the value that it is given."""
    text = "program p stage=NORMAL\ndim T in [1, 8]\ndim T_tp in [1, 4]\ninput x: f32[T, 5]\ninput y: f32[T_tp, 5]\n"
    program = parse_program(f"{text}return x=%x\n")
    x, y = program.find("x"), program.find("y")
    attrs: dict[str, Any] = {"axis": "tp", "dim": 0, "parts": 2}
    for name in ("reduce_scatter", "take_part"):
        assert str(infer(OPS[name].overload, (x,), attrs, program)) == "f32[T_tp, 5]"
    gather = OPS["all_gather"].overload
    assert str(infer(gather, (y, x), attrs, program)) == "f32[T, 5]"
    for args, changes in (((x, x), {}), ((y, x), {"dim": 1}), ((y, y), {})):
        with pytest.raises(VerifyError, match=r"are not the T(_tp)? rows of `like`"):
            infer(gather, args, {**attrs, **changes}, program)
    with pytest.raises(VerifyError, match="arithmetic on a symbol"):
        infer(gather, (y,), attrs, program)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_rank_alone_is_refused(name: str) -> None:
    sample = OPS[name].samples(torch.Generator().manual_seed(0), torch.float32)[0]
    for call in (OPS[name].reference, OPS[name].rowwise, OPS[name]):
        with pytest.raises(InternalError, match=f"'{name}' over axis 'tp' was called by one rank alone"):
            call(*sample.args, **sample.kwargs)


TWO_AXES = """program p stage=SHARDED
mesh dp=2 tp=3
dim T in [1, 8]
input x: f32[T, 2]
param w: f32[2, 2] tp=shard(1) = shard(source(name="w"), axis="tp", dim=1, segments=[])
%part = ingot.take_part(%own, axis="tp", dim=1, parts=3) : f32[T, 2] tp=shard(1)
%y = ingot.linear(%part, %w) : f32[T, 2] tp=partial
%sum = ingot.all_reduce(%y, axis="tp") : f32[T, 2]
return y=%sum
""".replace("input x: f32[T, 2]", "input own: f32[T, 6]")


def test_a_mesh_of_two_axes() -> None:
    """A collective joins the ranks that differ in its axis alone."""
    program = parse_program(TWO_AXES)
    verify(program)
    weight, x = torch.randn(2, 6).double(), torch.randn(5, 6).double()
    places = ranks(program.mesh)
    values = [{"own": x, "w": program.params["w"].recipe.for_rank(rank).execute(lambda _: weight)} for rank in places]
    for index in (3, 4, 5):  # the second row of ranks computes something else
        values[index]["own"] = x * 2
    found = [outputs["y"] for outputs in interpret_ranks(program, values, exact=True)]
    for index, y in enumerate(found):
        torch.testing.assert_close(y, (x * (1 + index // 3)) @ weight.T)


def test_ranks_and_groups() -> None:
    mesh = {"dp": 2, "tp": 3}
    assert world_size(mesh) == 6 and world_size({}) == 1 and ranks({}) == (Rank(0, ()),)
    assert [rank.index for rank in ranks(mesh)] == list(range(6))
    assert ranks(mesh)[4].on("dp") == (1, 2) and ranks(mesh)[4].on("tp") == (1, 3) and ranks(mesh)[4].on("pp") is None
    assert groups(mesh, "tp") == ((0, 1, 2), (3, 4, 5))
    assert groups(mesh, "dp") == ((0, 3), (1, 4), (2, 5))


def test_meshes_in_words() -> None:
    assert parse_mesh("") == parse_mesh("tp=1") == {} and parse_mesh(" tp=2 ") == {"tp": 2}
    assert mesh_text({"dp": 2, "tp": 3}) == "dp=2 tp=3" and parse_mesh(mesh_text({"tp": 4})) == {"tp": 4}
    for text in ("tp", "tp=", "tp=-1", "tp=2,tp=2", "2", "tp=two", "tp=1234567890"):
        with pytest.raises(OptionError, match="the mesh is"):
            parse_mesh(text)
    for mesh, problem in (
        ({"rows": 2}, "unknown mesh axis 'rows'"),
        ({"tp": 0}, "mesh axis tp is 0"),
        ({"tp": True}, "mesh axis tp is True"),
        ({"tp": 2.0}, "mesh axis tp is 2.0"),
        ({"tp": 2048}, "a mesh of 2048 ranks"),
    ):
        with pytest.raises(OptionError, match=problem):
            check_mesh(mesh)  # type: ignore[arg-type]


def test_the_interpreter_needs_every_rank() -> None:
    program: Program = parse_program(TWO_AXES)
    with pytest.raises(VerifyError, match="program p is on the mesh dp=2 tp=3"):
        interpret(program, {})
    with pytest.raises(VerifyError, match="values of 1 ranks"):
        interpret_ranks(program, [{}])
