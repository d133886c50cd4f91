"""Weights in pieces have the elements that their recipe makes, and joins of large parts copy nothing."""

import math
from collections.abc import Callable

import pytest
import torch

from ingot.compile.pieces import Pieces, pieces_of
from ingot.ir import recipe as r
from ingot.ir.errors import CheckpointError
from ingot.ir.recipe import Recipe
from ingot.ir.stored.recipes import bitcast

GENERATOR = torch.Generator().manual_seed(0)
FILES = {
    "stacked": torch.randint(0, 255, (3, 8, 1 << 16), generator=GENERATOR, dtype=torch.uint8),
    "wide": torch.randn(3, 8, 1 << 16, generator=GENERATOR),
    **{name: torch.randn(4, 1 << 15, generator=GENERATOR) for name in "abcd"},
    "small": torch.randn(4, 8, generator=GENERATOR),
    "half": torch.randn(4, 1 << 15, generator=GENERATOR).bfloat16(),
}
a, b, c, d, small, half = (r.source(name) for name in ("a", "b", "c", "d", "small", "half"))
stacked = r.source("stacked")


def experts(name: str, shape: tuple[int, ...]) -> list[Recipe]:
    """The recipes of single experts of a stacked tensor."""
    return [r.reshape(r.take_slice(r.source(name), 0, index, index + 1), shape) for index in range(3)]


single = r.stack(experts("stacked", (8, 1 << 16)))
halves = [r.take_slice(single, 1, begin, begin + 1, every=2) for begin in (0, 1)]
# Recipes whose parts are not copied, and the number of pieces.
VIEWS: list[tuple[Recipe, int]] = [
    (a, 1),
    (r.stack([a, b, c]), 3),
    (r.concat([a, b]), 2),
    (r.concat([r.stack([a, b]), r.stack([c])]), 3),
    (r.concat([r.stack([a, b]), r.stack([c, d])], 1), 4),
    (r.concat([stacked, stacked], 1), 6),
    (single, 3),
    (halves[1], 1),
    (r.concat(halves, 1), 6),
]
# Recipes that torch joins.
COPIES = [
    r.stack([a, b], 1),
    r.concat([a, b], -1),
    r.concat([small, small]),
    r.stack([small, small]),
    r.take_slice(small, 0, 1, 2, every=2),
    r.concat([small, small], 1),
    r.concat([a, half]),
    r.concat([r.concat([r.stack([a]), r.stack([b])]), r.permute(r.stack([c, d]), (0, 1, 2))], 1),
    r.concat([r.stack([half, half], 1), r.stack([half, half], 1)], 1),
    r.permute(r.stack([a, b]), (1, 0, 2)),
    r.take_slice(r.stack([a, b]), 1, 0, 2, every=4),
]


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.untyped_storage().data_ptr()
    return begin, begin + tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("recipe", [*(one for one, _ in VIEWS), *COPIES], ids=str)
def test_pieces_are_the_tensor(recipe: Recipe) -> None:
    found, wanted = pieces_of(recipe, FILES.__getitem__, {}), recipe.execute(FILES.__getitem__)
    assert (found.dtype, found.shape, found.nbytes) == (wanted.dtype, wanted.shape, wanted.nbytes)
    assert found.meta().shape == wanted.shape and all(piece.dtype == wanted.dtype for piece in found.tensors)
    assert torch.equal(torch.cat([piece.flatten() for piece in found.tensors]), wanted.flatten())


@pytest.mark.parametrize(("recipe", "count"), VIEWS, ids=str)
def test_pieces_are_views_of_the_checkpoint(recipe: Recipe, count: int) -> None:
    found = pieces_of(recipe, FILES.__getitem__, {})
    files = {memory_of(tensor) for tensor in FILES.values()}
    assert len(found.tensors) == count and {memory_of(piece) for piece in found.tensors} <= files


def test_a_stack_of_neighbours_is_a_view() -> None:
    for name, shape in (("stacked", (8, 1 << 16)), ("wide", (1 << 16, 8))):
        found = r.stack(experts(name, shape)).execute(FILES.__getitem__, {})
        assert found.data_ptr() == FILES[name].data_ptr() and found.is_contiguous()
        assert torch.equal(found, FILES[name].reshape(3, *shape))


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made[::-1],
        lambda made: [made[0], made[0]],
        lambda made: [made[0], made[2]],
        lambda made: [bitcast(made[0], torch.uint8), r.source("wide_bytes")],
        lambda made: [r.take_slice(one, 1, 0, 1 << 15) for one in made],
    ],
)
def test_a_stack_of_others_is_their_copy(change: Callable[[list[Recipe]], list[Recipe]]) -> None:
    files = {**FILES, "wide_bytes": FILES["stacked"][0].clone()}
    recipes = change(experts("stacked", (8, 1 << 16)))
    found = r.stack(recipes).execute(files.__getitem__, {})
    assert torch.equal(found, torch.stack([one.execute(files.__getitem__) for one in recipes]))


def test_a_row_of_pieces_is_no_row_of_another_number_of_rows() -> None:
    pieces = Pieces(torch.float32, (3, 2), (torch.ones(2), torch.ones(2, 2)))
    assert pieces.rows() is None
    assert Pieces(torch.float32, (2, 2), (torch.ones(4),)).rows() is None


@pytest.mark.parametrize("format", ["int4_g32", "int8_tensor", "nvfp4"])
@pytest.mark.parametrize(
    "recipe",
    [
        r.stack([a, b, c]),
        r.concat([r.stack([a, b]), r.stack([c, d])], 1),
        r.concat([r.stack([a, b]), r.source("wide_rows")]),
        r.concat(halves, 1),
    ],
    ids=str,
)
def test_a_stack_in_pieces_is_quantized_once(recipe: Recipe, format: str) -> None:
    files = {**FILES, "wide_rows": FILES["wide"][:2, :4, : 1 << 15], "stacked": FILES["wide"]}
    reads: list[str] = []

    def read(name: str) -> torch.Tensor:
        reads.append(name)
        return files[name]

    memo: dict[Recipe, r.Results] = {}
    wanted: dict[Recipe, r.Results] = {}
    for part in r.quantize(recipe, format).values():
        (found,) = pieces_of(part, read, memo).tensors
        expected = part.execute(files.__getitem__, wanted)
        assert found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert len(reads) == len(set(reads))


def test_a_stack_that_cannot_be_quantized_is_an_error_with_its_shape() -> None:
    part = r.quantize(r.stack([a, r.affine(b, math.inf, 0.0)]), "int4_g32")["scales"]
    with pytest.raises(CheckpointError) as caught:
        pieces_of(part, FILES.__getitem__, {})
    problem = "'quantize' cannot be applied to shapes ([2, 4, 32768]): ValueError: the weight holds NaN"
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "recipe",
    [
        r.concat([a, small]),
        r.concat([a, r.stack([small])], 1),
        r.concat([a, r.stack([a])]),
        r.concat([]),
        r.stack([a, small]),
        r.take_slice(a, 0, 0, 1, every=3),
    ],
    ids=str,
)
def test_errors_are_those_of_the_recipe(recipe: Recipe) -> None:
    texts = []
    for make in (pieces_of, Recipe.execute):
        with pytest.raises(CheckpointError) as caught:
            make(recipe, FILES.__getitem__, {})
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
