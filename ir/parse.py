"""The text form of a program, read back. Bad text ends in a ParseError with line and column."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from torch import fx

from ingot.ir.errors import IngotError, ParseError
from ingot.ir.plan import BucketClass
from ingot.ir.program import ParamSpec, Program, Region, Stage, StateSpec, target_of
from ingot.ir.recipe import STEPS, Attr, Recipe
from ingot.ir.types import DIM_MEANINGS, DTYPES, Dim, Placement, Size, StateType, TensorType, TupleType, ValueType

_TOKEN = re.compile(
    r"""(?P<space>[ ]+)
      | (?P<comment>\#.*)
      | (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<number>-?(?:inf\b|nan\b|Infinity\b|NaN\b|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?))
      | (?P<value>%[A-Za-z_0-9][\w.]*)
      | (?P<name>[A-Za-z_][\w-]*(?:\.[\w-]+)*)
      | (?P<punct>[()\[\]{}<>=:;,@+.])""",
    re.VERBOSE | re.ASCII,
)


MAX_DEPTH = 64  # of lists and recipes: real ones stay below ten, and Python's stack holds more


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int
    column: int


def _tokens(text: str) -> list[list[_Token]]:
    """The tokens of each line; comments are kept, for they carry origins."""
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        tokens, place = [], 0
        while place < len(line):
            match = _TOKEN.match(line, place)
            if match is None:
                raise ParseError(f"unexpected character {line[place]!r}", where=f"line {number}, column {place + 1}")
            kind = match.lastgroup or ""
            if kind != "space":
                tokens.append(_Token(kind, match.group(), number, place + 1))
            place = match.end()
        lines.append(tokens)
    return lines


class _Line:
    """A cursor over the tokens of one line."""

    def __init__(self, tokens: list[_Token], number: int) -> None:
        self.comment = tokens.pop().text[1:].strip() if tokens and tokens[-1].kind == "comment" else ""
        self.tokens, self.number, self.place, self.depth = tokens, number, 0, 0

    def where(self, at: int | None = None) -> str:
        """Line and column of the token `at`, by default the next one."""
        place = self.place if at is None else at
        if place < len(self.tokens):
            column = self.tokens[place].column
        else:
            column = self.tokens[-1].column + len(self.tokens[-1].text) if self.tokens else 1
        return f"line {self.number}, column {column}"

    def error(self, what: str, expected: str = "", *, at: int | None = None) -> ParseError:
        """An error at the token `at`, by default the next one."""
        return ParseError(what, where=self.where(at), expected=expected)

    def peek(self) -> str:
        return self.tokens[self.place].text if self.place < len(self.tokens) else ""

    def kind(self) -> str:
        return self.tokens[self.place].kind if self.place < len(self.tokens) else "end"

    def take(self, kind: str, expected: str) -> str:
        if self.kind() != kind:
            raise self.error(f"unexpected {self.peek()!r}" if self.peek() else "the line ends too early", expected)
        self.place += 1
        return self.tokens[self.place - 1].text

    def skip(self, text: str) -> bool:
        """Take the token if it is `text`."""
        if self.peek() == text and self.kind() != "string":
            self.place += 1
            return True
        return False

    def need(self, text: str) -> None:
        if not self.skip(text):
            raise self.error(f"unexpected {self.peek()!r}" if self.peek() else "the line ends too early", f"'{text}'")

    def name(self, expected: str = "a name") -> str:
        return self.take("name", expected)

    def integer(self) -> int:
        text = self.take("number", "a whole number")
        try:
            return int(text)
        except ValueError:
            self.place -= 1
            raise self.error(f"'{text}' is no whole number", "a whole number") from None

    def number_value(self) -> int | float:
        text = self.take("number", "a number")
        try:
            return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        except ValueError:  # Python reads no int of more than 4300 digits
            self.place -= 1
            raise self.error("a number of too many digits") from None

    def string(self) -> str:
        text = self.take("string", "a quoted string")
        try:
            return str(json.loads(text))
        except json.JSONDecodeError:
            self.place -= 1
            raise self.error(f"bad string {text}", "a JSON string") from None

    def listed(self, item: Callable[[], Any], close: str) -> list[Any]:
        """Items separated by commas up to `close`, which is taken."""
        items: list[Any] = []
        if self.skip(close):
            return items
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"nested deeper than {MAX_DEPTH} levels")
        while True:
            items.append(item())
            if self.skip(close):
                self.depth -= 1
                return items
            self.need(",")

    def end(self) -> None:
        if self.place < len(self.tokens):
            raise self.error(f"unexpected {self.peek()!r}", "the end of the line")

    def guarded(self, make: Callable[[], Any], *, at: int | None = None) -> Any:
        """`make()`, with this line's place in the error of a value that breaks a rule."""
        try:
            return make()
        except ParseError:
            raise
        except IngotError as error:
            raise self.error(error.what, error.expected, at=at) from error

    def bounds(self) -> tuple[int, int]:
        start = self.place
        self.need("[")
        found = self.listed(self.integer, "]")
        if len(found) != 2:
            raise self.error(f"{len(found)} bounds", "[lo, hi]", at=start)
        return found[0], found[1]


def _type(line: _Line) -> ValueType:
    if line.skip("("):
        return TupleType(tuple(line.listed(lambda: _type(line), ")")))
    name = line.name("a type")
    if name == "state":
        line.need("<")
        state = StateType(line.name())
        line.need(">")
        return state
    return _tensor_rest(line, name)


def _tensor_rest(line: _Line, dtype: str) -> TensorType:
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


def _tensor(line: _Line) -> TensorType:
    return _tensor_rest(line, line.name("a tensor type"))


def _only_line(text: str) -> _Line:
    lines = _tokens(text)
    if len(lines) > 1:
        raise ParseError("unexpected end of the line", where=f"line 1, column {len(text.partition(chr(10))[0]) + 1}")
    return _Line(lines[0], 1)


@lru_cache(maxsize=4096)  # the layers of a plan repeat a few types
def parse_type(text: str) -> TensorType:
    """A tensor type from its text form."""
    line = _only_line(text)
    result = _tensor(line)
    line.end()
    return result


def _attr(line: _Line) -> Attr:
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


def _recipe(line: _Line) -> Recipe:
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
            inputs.append(_recipe(line))

    line.listed(item, ")")
    if line.skip("."):
        output = line.name("a result's name")
    return Recipe(step, tuple(inputs), tuple(attrs), output)


def parse_recipe(text: str) -> Recipe:
    """A recipe from its text form."""
    line = _only_line(text)
    result = _recipe(line)
    line.end()
    return result


def _placements(line: _Line) -> tuple[Placement, ...]:
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


def _argument(line: _Line, values: dict[str, fx.Node]) -> Any:
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


def _call(line: _Line, program: Program, values: dict[str, fx.Node]) -> None:
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
    value_type = line.guarded(lambda: _type(line))
    node = program.graph.create_node("call_function", target, tuple(args), kwargs, name=name.replace(".", "_"))
    node.meta.update(type=value_type, place=line.where(0))
    if line.skip("@"):
        node.meta["provider"] = line.name("a provider")
    if line.comment:
        node.meta["origin"] = line.comment
    line.end()
    values[name] = node


class _Lines:
    """The lines of a text that hold something, in order."""

    def __init__(self, text: str) -> None:
        numbered = [(number, tokens) for number, tokens in enumerate(_tokens(text), 1) if tokens]
        self.lines = [_Line(tokens, number) for number, tokens in numbered if tokens[0].kind != "comment"]
        self.place = 0

    def next(self, expected: str) -> _Line:
        if self.place == len(self.lines):
            number = self.lines[-1].number if self.lines else 1
            raise ParseError("the text ends too early", where=f"line {number}, column 1", expected=expected)
        self.place += 1
        return self.lines[self.place - 1]


def _declare(line: _Line, program: Program, values: dict[str, fx.Node], keyword: str) -> None:
    """An input, param or state line after its keyword."""
    name = line.name()
    if name in values:
        line.place -= 1
        raise line.error(f"'{name}' is defined twice")
    line.need(":")
    if keyword == "input":
        values[name] = program.add_input(name, line.guarded(lambda: _tensor(line)))
    elif keyword == "param":
        value_type = line.guarded(lambda: _tensor(line))
        placements = _placements(line)
        line.need("=")
        values[name] = program.add_param(name, ParamSpec(value_type, line.guarded(lambda: _recipe(line)), placements))
    else:
        kind = line.name("a kind of state")
        value_type = line.guarded(lambda: _tensor(line))
        options: dict[str, str] = {}
        for option in ("group", "unit"):
            line.need(option)
            line.need("=")
            options[option] = line.name()
        make = partial(StateSpec, kind, options["group"], options["unit"], value_type)
        spec = line.guarded(make, at=line.place - 1)
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
                raise line.error("a region inside a region")
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


def _region(line: _Line, lines: _Lines, program: Program) -> None:
    name = line.name("a region's name")
    if name in program.regions:
        line.place -= 1
        raise line.error(f"region '{name}' is defined twice")
    line.need("@")
    backend = line.name("a backend")
    line.need("{")
    line.end()
    body = Program(name, program.stage, {}, bucket=program.bucket)
    _statements(lines, body, in_region=True)
    used = body.symbols()
    body.dims = {symbol: dim for symbol, dim in program.dims.items() if symbol in used}
    closing = lines.next("'}'")
    closing.need("}")
    closing.end()
    program.regions[name] = Region(name, body, backend)


def _header(line: _Line) -> Program:
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


def _program(lines: _Lines) -> Program:
    program = _header(lines.next("a program"))
    while lines.place < len(lines.lines) and lines.lines[lines.place].peek() == "dim":
        line = lines.next("a dim")
        line.need("dim")
        name = line.name("a dim's name")
        if name in program.dims:
            line.place -= 1
            raise line.error(f"dim '{name}' is defined twice")
        line.need("in")
        lo, hi = line.bounds()
        program.dims[name] = line.guarded(partial(Dim, name, lo, hi), at=1)
        line.end()
    _statements(lines, program)
    return program


def parse_program(text: str) -> Program:
    """The program that the text describes. Types are taken as written: verify it before use."""
    lines = _Lines(text)
    program = _program(lines)
    if lines.place < len(lines.lines):
        following = lines.lines[lines.place]
        raise following.error(f"unexpected '{following.peek()}'", "the end of the text, after one program")
    return program


def parse_programs(text: str) -> list[Program]:
    """All programs of a text, one after the other."""
    lines = _Lines(text)
    programs = [_program(lines)]
    while lines.place < len(lines.lines):
        programs.append(_program(lines))
    return programs
