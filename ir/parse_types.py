"""Parse the parts of a line of a program's text: types, splits, placements, recipes and endings.

Each function reads at the cursor `line`, moves it past what it read, and raises ParseError.
"""

from functools import partial
from typing import Any

from ingot.ir.features.feature import Attribute, EndingUse
from ingot.ir.recipe import STEPS, Attr, Recipe
from ingot.ir.scan import Line
from ingot.ir.types import DIM_MEANINGS, DTYPES, Placement, Size, Split, StateType, TensorType, TupleType, ValueType


def read_type(line: Line) -> ValueType:
    """Parse a type at the cursor `line`: a tensor, a state, or a tuple of them. Raises ParseError."""
    if line.skip("("):
        return TupleType(tuple(line.listed(lambda: read_type(line), ")")))
    name = line.name("a type")
    if name == "state":
        line.need("<")
        state = StateType(line.name())
        line.need(">")
        return state
    return _tensor_rest(line, name)


def _tensor_rest(line: Line, dtype: str) -> TensorType:
    if dtype not in DTYPES:
        line.place -= 1
        raise line.error(f"unknown dtype '{dtype}'", ", ".join(DTYPES))
    start = line.place - 1
    line.need("[")
    sizes: list[Size] = []
    strides: tuple[int, ...] | None = None
    while not line.skip("]"):
        if sizes and not line.skip(","):
            line.need(";")
            strides = tuple(line.listed(line.integer, "]"))
            break
        if line.kind() == "name" and line.peek() in DIM_MEANINGS:
            sizes.append(line.name())
        else:
            size = line.integer()
            if size < 0:
                line.place -= 1
                raise line.error(f"size {size} is negative")
            sizes.append(size)
    if strides is not None and len(strides) != len(sizes):
        raise line.error(f"{len(strides)} strides for {len(sizes)} sizes", at=start)
    return TensorType(DTYPES[dtype], tuple(sizes), strides)


def read_tensor(line: Line) -> TensorType:
    """Parse a tensor type at the cursor `line`: a dtype, sizes, and strides unless row-major. Raises ParseError."""
    return _tensor_rest(line, line.name("a tensor type"))


def read_split(line: Line) -> Split | None:
    """Parse how a mesh may split a param, such as `tp=split(0, unit=64)`, at the cursor `line`.

    Returns None if the text has no split here.
    """
    ahead = [token.text for token in line.tokens[line.place + 1 : line.place + 3]]
    if line.kind() != "name" or ahead != ["=", "split"]:
        return None
    start = line.place
    axis = line.name("a mesh axis")
    line.place += 2
    line.need("(")
    dim = line.integer()
    options: dict[str, Any] = {}
    while line.skip(","):
        option = line.name("segments, unit, repeat or optional")
        if option in options or option not in ("segments", "unit", "repeat", "optional"):
            raise line.error(f"'{option}' is given twice or is not an option of a split", at=line.place - 1)
        if option in ("segments", "unit"):
            line.need("=")
        if option == "segments":
            line.need("[")
            options[option] = tuple(line.listed(line.integer, "]"))
        else:
            options[option] = line.integer() if option == "unit" else True
    line.need(")")
    needed = not options.pop("optional", False)
    split: Split = line.guarded(partial(Split, axis, dim, needed=needed, **options), at=start)
    return split


def read_placements(line: Line) -> tuple[Placement, ...]:
    """Parse how a value is distributed over mesh axes, such as `tp=shard(0)`, at the cursor `line`.

    Returns one placement per mesh axis in the text; empty if there are none.
    """
    placements = []
    while line.kind() == "name":
        axis = line.name("a mesh axis")
        line.need("=")
        start = line.place
        kind = line.name("replicated, shard or partial")
        dim = 0
        segments: tuple[int, ...] = ()
        if kind == "shard":
            line.need("(")
            dim = line.integer()
            if line.skip(","):
                if line.name("segments") != "segments":
                    raise line.error("unknown option of a shard", "segments", at=line.place - 1)
                line.need("=")
                line.need("[")
                segments = tuple(line.listed(line.integer, "]"))
            line.need(")")
        placements.append(line.guarded(partial(Placement, axis, kind, dim, segments), at=start))
    return tuple(placements)


def _attr(line: Line) -> Attr:
    if line.kind() == "string":
        return line.string()
    if line.kind() == "number":
        return line.number_value()
    if line.skip("["):
        return tuple(line.listed(lambda: _attr(line), "]"))
    word = line.name("a constant")
    words: dict[str, Attr] = {"true": True, "false": False, "null": None}
    if word not in words:
        line.place -= 1
        raise line.error(f"unknown constant '{word}'", "a string, a number, a list, true, false or null")
    return words[word]


def read_recipe(line: Line) -> Recipe:
    """Parse a weight's recipe at the cursor `line`, such as `cast(source(name="w"), dtype="f32")`. Raises ParseError.

    A recipe says how the weight is made from checkpoint tensors.
    """
    start = line.place
    step, output = line.name("a recipe step"), ""
    if step not in STEPS:
        line.place = start
        raise line.error(f"unknown recipe step '{step}'", ", ".join(STEPS))
    line.need("(")
    inputs: list[Recipe] = []
    attrs: list[tuple[str, Attr]] = []

    def item() -> None:
        following = line.tokens[line.place + 1].text if line.place + 1 < len(line.tokens) else ""
        if following == "=":
            name = line.name()
            if any(name == known for known, _ in attrs):
                line.place -= 1
                raise line.error(f"'{name}' is given twice")
            line.need("=")
            attrs.append((name, _attr(line)))
        else:
            inputs.append(read_recipe(line))

    line.listed(item, ")")
    if line.skip("."):
        output = line.name("a result's name")
    return Recipe(step, tuple(inputs), tuple(attrs), output)


def read_ending(line: Line) -> EndingUse:
    """Parse an ending at the cursor `line`, such as `sample` or `verify(drafted=3)`. Raises ParseError.

    An ending is what a program does with the model's outputs. The brackets hold its options (NAME=NUMBER or NAME=NAME)
    and names of features, in any order. They may be absent.
    """
    name = line.name("an ending's name")
    attributes: list[tuple[str, Attribute]] = []
    features: list[str] = []

    def item() -> None:
        found = line.name("an attribute or a feature")
        if not line.skip("="):
            features.append(found)
            return
        value = line.name() if line.kind() == "name" else line.integer()
        if isinstance(value, int) and value < 0:
            raise line.error(f"the attribute '{found}' is {value}", "0 or more", at=line.place - 1)
        attributes.append((found, value))

    if line.skip("("):
        line.listed(item, ")")
    return EndingUse(name, tuple(attributes), tuple(features))
