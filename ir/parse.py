"""Parse the text form of a program. Bad text raises a ParseError with line and column."""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

from torch import fx

from ingot.ir.artifact.plan import BucketClass
from ingot.ir.errors import ParseError
from ingot.ir.features.feature import EndingUse
from ingot.ir.parse_types import read_ending, read_placements, read_recipe, read_split, read_tensor, read_type
from ingot.ir.program import ParamSpec, Program, Region, Stage, StateSpec, target_of
from ingot.ir.recipe import Recipe
from ingot.ir.scan import Line, scan
from ingot.ir.types import DTYPES, Dim, TensorType


def _only_line(text: str) -> Line:
    lines = scan(text)
    if len(lines) > 1:
        raise ParseError("unexpected end of the line", where=f"line 1, column {len(text.partition(chr(10))[0]) + 1}")
    return Line(lines[0], 1)


@lru_cache(maxsize=4096)  # the layers of a plan repeat a few types
def parse_type(text: str) -> TensorType:
    """Parse a tensor type from its text form, such as "f32[T, 64]". Raises ParseError."""
    line = _only_line(text)
    result = read_tensor(line)
    line.end()
    return result


def parse_ending(text: str) -> EndingUse:
    """Parse an ending from its text, such as "sample" or "verify(drafted=3)". Raises ParseError.

    An ending is what a program does with the model's outputs.
    """
    line = _only_line(text)
    result = read_ending(line)
    line.end()
    return result


def parse_recipe(text: str) -> Recipe:
    """Parse a weight's recipe, such as `cast(source(name="w"), dtype="f32")`. Raises ParseError.

    A recipe says how the weight is made from checkpoint tensors.
    """
    line = _only_line(text)
    result = read_recipe(line)
    line.end()
    return result


def _argument(line: Line, values: dict[str, fx.Node]) -> Any:
    match line.kind():
        case "value":
            name = line.take("value", "a value")[1:]
            if name not in values:
                line.place -= 1
                raise line.error(f"unknown value %{name}", "a value that is defined above")
            return values[name]
        case "string":
            return line.string()
        case "number":
            return line.number_value()
    if line.skip("["):
        return line.listed(lambda: _argument(line, values), "]")
    word = line.name("an argument")
    if word in DTYPES:
        return DTYPES[word]
    constants = {"None": None, "True": True, "False": False, "inf": float("inf"), "nan": float("nan")}
    if word not in constants:
        line.place -= 1
        raise line.error(f"unknown argument '{word}'", "a value, a constant or a dtype")
    return constants[word]


def _call(line: Line, program: Program, values: dict[str, fx.Node]) -> None:
    name = line.take("value", "a statement")[1:]
    if name in values:
        line.place -= 1
        raise line.error(f"%{name} is defined twice")
    line.need("=")
    start = line.place
    target_text = line.name("an op")
    target = target_of(target_text)
    if target is None:
        line.place = start
        raise line.error(f"unknown op '{target_text}'")
    line.need("(")
    args: list[Any] = []
    kwargs: dict[str, Any] = {}

    def item() -> None:
        following = line.tokens[line.place + 1].text if line.place + 1 < len(line.tokens) else ""
        if line.kind() == "name" and following == "=":
            key = line.name()
            if key in kwargs:
                line.place -= 1
                raise line.error(f"'{key}' is given twice")
            line.need("=")
            kwargs[key] = _argument(line, values)
        elif kwargs:
            raise line.error("a positional argument follows a named one")
        else:
            args.append(_argument(line, values))

    line.listed(item, ")")
    line.need(":")
    value_type = line.guarded(lambda: read_type(line))
    node = program.graph.create_node("call_function", target, tuple(args), kwargs, name=name.replace(".", "_"))
    node.meta.update(type=value_type, place=line.where(0))
    if placement := read_placements(line):
        node.meta["placement"] = placement
    if line.skip("@"):
        node.meta["backend"] = line.name("a backend")
    if line.comment:
        node.meta["origin"] = line.comment
    line.end()
    values[name] = node


class _Lines:
    """A cursor over the lines of a program's text, without empty lines and comments."""

    def __init__(self, text: str) -> None:
        numbered = [(number, tokens) for number, tokens in enumerate(scan(text), 1) if tokens]
        self.lines = [Line(tokens, number) for number, tokens in numbered if tokens[0].kind != "comment"]
        self.place = 0

    def next(self, expected: str) -> Line:
        if self.place == len(self.lines):
            number = self.lines[-1].number if self.lines else 1
            raise ParseError("the text ends too early", where=f"line {number}, column 1", expected=expected)
        self.place += 1
        return self.lines[self.place - 1]


def _declare(line: Line, program: Program, values: dict[str, fx.Node], keyword: str) -> None:
    """Parse the rest of a line that declares an input, param or state, and add its placeholder to `program`.

    `keyword` is the first word of the line: "input", "param" or "state". `values` gets the new placeholder by its name.
    """
    name = line.name()
    if name in values:
        line.place -= 1
        raise line.error(f"'{name}' is defined twice")
    line.need(":")
    if keyword == "input":
        values[name] = program.add_input(name, line.guarded(lambda: read_tensor(line)))
    elif keyword == "param":
        value_type = line.guarded(lambda: read_tensor(line))
        split = read_split(line)
        placements = read_placements(line)
        line.need("=")
        recipe = line.guarded(lambda: read_recipe(line))
        values[name] = program.add_param(name, ParamSpec(value_type, recipe, placements, split))
    else:
        kind = line.name("a kind of state")
        value_type = line.guarded(lambda: read_tensor(line))
        options: dict[str, str] = {}
        for option in ("group", "unit"):
            line.need(option)
            line.need("=")
            options[option] = line.name()
        unit = line.place - 1
        make = partial(StateSpec, kind, options["group"], options["unit"], value_type, read_placements(line))
        spec = line.guarded(make, at=unit)
        values[name] = program.add_state(name, spec)
    values[name].meta["place"] = line.where(0)
    line.end()


def _statements(lines: _Lines, program: Program, *, in_region: bool = False) -> None:
    values: dict[str, fx.Node] = {}
    while True:
        line = lines.next("a return line")
        if line.kind() == "value":
            _call(line, program, values)
            continue
        keyword = line.name("input, param, state, region, a value or return")
        if keyword in ("input", "param", "state"):
            _declare(line, program, values, keyword)
        elif keyword == "region":
            if in_region:
                line.place -= 1
                raise line.error("a region may not contain a region")
            _region(line, lines, program)
        elif keyword == "return":
            outputs: dict[str, fx.Node] = {}
            while line.kind() != "end":
                if outputs:
                    line.need(",")
                name = line.name("an output's name")
                if name in outputs:
                    line.place -= 1
                    raise line.error(f"output '{name}' is returned twice")
                line.need("=")
                value = _argument(line, values)
                if not isinstance(value, fx.Node):
                    line.place -= 1
                    raise line.error("an output must be a value", "%name")
                outputs[name] = value
            program.set_outputs(outputs)
            program.graph.output_node().meta["place"] = line.where(0)
            return
        else:
            line.place -= 1
            raise line.error(f"unknown statement '{keyword}'", "input, param, state, region, a value or return")


def _region(line: Line, lines: _Lines, program: Program) -> None:
    name = line.name("a region's name")
    if name in program.regions:
        line.place -= 1
        raise line.error(f"region '{name}' is defined twice")
    line.need("@")
    backend = line.name("a backend")
    line.need("{")
    line.end()
    body = Program(name, program.stage, {}, bucket=program.bucket)
    own = _dims(lines, within=program.dims)
    _statements(lines, body, in_region=True)
    used = body.symbols()
    body.dims = {symbol: own.get(symbol, dim) for symbol, dim in program.dims.items() if symbol in used}
    closing = lines.next("'}'")
    closing.need("}")
    closing.end()
    program.regions[name] = Region(name, body, backend)


def _header(line: Line) -> Program:
    if line.name("program") != "program":
        line.place -= 1
        raise line.error(f"unexpected '{line.peek()}'", "program NAME stage=STAGE")
    name = line.name("a program's name")
    if line.name("stage") != "stage":
        raise line.error("a program needs a stage", "stage=", at=line.place - 1)
    line.need("=")
    stage = line.name("a stage")
    if stage not in Stage.__members__:
        line.place -= 1
        raise line.error(f"unknown stage '{stage}'", ", ".join(Stage.__members__))
    program = Program(name, Stage[stage], {})
    if line.skip("bucket"):
        line.need("=")
        bucket = line.name("a bucket class's name")
        line.need("tokens")
        line.need("=")
        tokens = line.bounds()
        line.need("q_max")
        line.need("=")
        q_max = None if line.skip("any") else line.integer()
        features = []
        while line.skip("+"):
            features.append(line.name("a feature"))
        program.bucket = BucketClass(name=bucket, tokens=tokens, q_max=q_max, features=tuple(features))
    line.end()
    return program


def _mesh(line: Line, program: Program) -> None:
    line.need("mesh")
    while line.kind() != "end" or not program.mesh:
        axis = line.name("a mesh axis")
        if axis in program.mesh:
            line.place -= 1
            raise line.error(f"mesh axis '{axis}' is given twice")
        line.need("=")
        size = line.integer()
        if size < 1:
            line.place -= 1
            raise line.error(f"mesh axis {axis} is {size}", "a size above 0")
        program.mesh[axis] = size


def _program(lines: _Lines) -> Program:
    program = _header(lines.next("a program"))
    if lines.place < len(lines.lines) and lines.lines[lines.place].peek() == "mesh":
        _mesh(lines.next("a mesh"), program)
    if lines.place < len(lines.lines) and lines.lines[lines.place].peek() == "ending":
        line = lines.next("an ending")
        line.need("ending")
        program.ending = read_ending(line)
        line.end()
    program.dims = _dims(lines)
    _statements(lines, program)
    return program


def _dims(lines: _Lines, within: Mapping[str, Dim] | None = None) -> dict[str, Dim]:
    """Parse the `dim` lines at the cursor, and return the dims by name. A dim bounds the size of a symbol such as "T".

    `within` holds the dims of the program around a region (calls that are compiled together). A region may only narrow
    their bounds. None outside regions.
    """
    dims: dict[str, Dim] = {}
    while lines.place < len(lines.lines) and lines.lines[lines.place].peek() == "dim":
        line = lines.next("a dim")
        line.need("dim")
        name = line.name("a dim's name")
        if name in dims:
            line.place -= 1
            raise line.error(f"dim '{name}' is defined twice")
        line.need("in")
        lo, hi = line.bounds()
        dims[name] = line.guarded(partial(Dim, name, lo, hi), at=1)
        outer = dims[name] if within is None else within.get(name)
        if outer is None or not outer.lo <= lo <= hi <= outer.hi:
            raise line.error(f"dim '{name}' of a region in [{lo}, {hi}]", f"within the program's, {outer}", at=1)
        line.end()
    return dims


def parse_program(text: str) -> Program:
    """Parse the text of one program. Raises ParseError.

    The types in the text are not checked: call `verify` afterwards.
    """
    lines = _Lines(text)
    program = _program(lines)
    if lines.place < len(lines.lines):
        following = lines.lines[lines.place]
        raise following.error(f"unexpected '{following.peek()}'", "the end of the text, after one program")
    return program


def parse_programs(text: str) -> list[Program]:
    """Parse a text of several programs, one after the other. Raises ParseError."""
    lines = _Lines(text)
    programs = [_program(lines)]
    while lines.place < len(lines.lines):
        programs.append(_program(lines))
    return programs
