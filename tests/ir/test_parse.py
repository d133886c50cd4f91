"""Bad text: a ParseError that names the line and the column. Random edits stand in `tests/fuzz`."""

import pytest

from ingot.ir.errors import ParseError, VerifyError
from ingot.ir.parse import parse_program, parse_programs, parse_recipe, parse_type
from ingot.ir.verify import verify

HEAD = "program p stage=NORMAL\ndim T in [1, 8]\n"
X = HEAD + "input x: f32[T, 4]\n"

# (text, line, column, part of the message)
BAD = [
    ("", 1, 1, "the text ends too early"),
    ("# nothing but a comment", 1, 1, "the text ends too early"),
    ("module p stage=NORMAL", 1, 1, "unexpected 'module'"),
    ("program", 1, 8, "the line ends too early"),
    ("program p", 1, 10, "the line ends too early"),
    ("program p level=NORMAL", 1, 11, "a program needs a stage"),
    ("program p stage:NORMAL", 1, 16, "unexpected ':'"),
    ("program p stage=DONE", 1, 17, "unknown stage 'DONE'"),
    ("program p stage=NORMAL stage=NORMAL", 1, 24, "unexpected 'stage'"),
    ("program p stage=NORMAL bucket=b tokens=[1] q_max=1", 1, 40, "1 bounds"),
    ("program p stage=NORMAL bucket=b tokens=[1, 2]", 1, 46, "the line ends too early"),
    ("program p stage=NORMAL bucket=b tokens=[1, 2] q_max=some", 1, 53, "unexpected 'some'"),
    ("program p stage=NORMAL bucket=b tokens=[1, 2] q_max=1 +", 1, 56, "the line ends too early"),
    ("program p stage=NORMAL\ndim Q in [1, 8]", 2, 5, "unknown dim 'Q'"),
    ("program p stage=NORMAL\ndim T in [0, 8]", 2, 5, "is empty"),
    ("program p stage=NORMAL\ndim T in [1, 8, 9]", 2, 10, "3 bounds"),
    ("program p stage=NORMAL\ndim T in [1, 8.5]", 2, 14, "'8.5' is not a whole number"),
    ("program p stage=NORMAL\ndim T in [1, T]", 2, 14, "unexpected 'T'"),
    (HEAD + "dim T in [1, 8]", 3, 5, "dim 'T' is defined twice"),
    (HEAD + "   output x", 3, 4, "unknown statement 'output'"),
    (HEAD + "42", 3, 1, "unexpected '42'"),
    (HEAD + "input x f32[T]", 3, 9, "unexpected 'f32'"),
    (HEAD + "input x: f33[T]", 3, 10, "unknown dtype 'f33'"),
    (HEAD + "input x: f32 [N]", 3, 15, "unexpected 'N'"),
    (HEAD + "input x: f32[4, -1]", 3, 17, "size -1 is negative"),
    (HEAD + "input x: f32[4 4]", 3, 16, "unexpected '4'"),
    (HEAD + "input x: f32[4, 4; 1]", 3, 10, "1 strides for 2 sizes"),
    (HEAD + "input x: f32[4, 4", 3, 18, "the line ends too early"),
    (HEAD + "input x: f32[4] f32", 3, 17, "unexpected 'f32'"),
    (HEAD + "input x: (f32[4], f32[4])", 3, 10, "unexpected '('"),
    (HEAD + "input x: state<x>", 3, 10, "unknown dtype 'state'"),
    (X + "input x: f32[T]", 4, 7, "'x' is defined twice"),
    (HEAD + "param w: f32[4]", 3, 16, "the line ends too early"),
    (HEAD + "param w: f32[4] tp=spilt(0) = source()", 3, 20, "unknown placement 'spilt'"),
    (HEAD + "param w: f32[4] tp=shard(0) tp=split(0) = source()", 3, 32, "unknown placement 'split'"),
    (HEAD + "param w: f32[4] tp=split(0, size=2) = source()", 3, 29, "'size' is given twice or is not an option"),
    (HEAD + "param w: f32[4] tp=split(0, unit=2, unit=2) = source()", 3, 37, "'unit' is given twice"),
    (HEAD + "param w: f32[4] tp=split(0, unit=0) = source()", 3, 17, "a split in units of 0 of dim 0"),
    (HEAD + "param w: f32[4] tp=shard = source()", 3, 26, "unexpected '='"),
    (HEAD + "param w: f32[4] tp=shard(0, parts=[4]) = source()", 3, 29, "unknown option of a shard"),
    (HEAD + 'param w: f32[4] = sauce(name="w")', 3, 19, "unknown recipe step 'sauce'"),
    (HEAD + 'param w: f32[4] = source.w(name="w")', 3, 19, "unknown recipe step 'source.w'"),
    (HEAD + 'param w: f32[4] = source(name="w)', 3, 31, "unexpected character '\"'"),
    (HEAD + 'param w: f32[4] = source(name="\\w")', 3, 31, "bad string"),
    (HEAD + "param w: f32[4] = source(name=w)", 3, 31, "unknown constant 'w'"),
    (HEAD + 'param w: f32[4] = source(name="w", name="v")', 3, 36, "'name' is given twice"),
    (HEAD + 'param w: f32[4] = source(name="w"', 3, 34, "the line ends too early"),
    (HEAD + "state s: row i32[4] unit=token group=g", 3, 21, "unexpected 'unit'"),
    (HEAD + "state s: row i32[4] group=g unit=page", 3, 34, "unknown state unit 'page'"),
    (X + "%y = ingot.blur(%x) : f32[T, 4]", 4, 6, "unknown op 'ingot.blur'"),
    (X + "%y = torch.relu(%x) : f32[T, 4]", 4, 6, "unknown op 'torch.relu'"),
    (X + "%y = aten.add.Tensor(%x, %z) : f32[T, 4]", 4, 26, "unknown value %z"),
    (X + "%y = aten.add.Tensor(%x, %y) : f32[T, 4]", 4, 26, "unknown value %y"),
    (X + "%x = aten.add.Tensor(%x, %x) : f32[T, 4]", 4, 1, "%x is defined twice"),
    (X + "%y = aten.add.Tensor(%x, yes) : f32[T, 4]", 4, 26, "unknown argument 'yes'"),
    (X + "%y = aten.add.Tensor(%x, alpha=1, %x) : f32[T, 4]", 4, 35, "a positional argument follows a named one"),
    (X + "%y = aten.add.Tensor(%x, %x, alpha=1, alpha=2) : f32[T, 4]", 4, 39, "'alpha' is given twice"),
    (X + "%y = aten.add.Tensor(%x %x) : f32[T, 4]", 4, 25, "unexpected '%x'"),
    (X + "%y = aten.add.Tensor(%x, %x)", 4, 29, "the line ends too early"),
    (X + "%y = aten.add.Tensor(%x, %x) : state<", 4, 38, "the line ends too early"),
    (X + "%y = aten.add.Tensor(%x, %x) : f32[T, 4] @", 4, 43, "the line ends too early"),
    (X + "%y = aten.add.Tensor(%x, %x) : f32[T, 4] @a b", 4, 45, "unexpected 'b'"),
    (X + "%y = aten.mul.Tensor(%x, 'two') : f32[T, 4]", 4, 26, 'unexpected character "\'"'),
    (X + "%y\t= aten.mul.Tensor(%x, 2) : f32[T, 4]", 4, 3, "unexpected character '\\t'"),
    (X + "return x=%y", 4, 10, "unknown value %y"),
    (X + "return %x", 4, 8, "unexpected '%x'"),
    (X + "return y=1", 4, 10, "an output must be a value"),
    (X + "return y=%x, y=%x", 4, 14, "output 'y' is returned twice"),
    (X + "return y=%x z=%x", 4, 13, "unexpected 'z'"),
    (X, 3, 1, "the text ends too early"),
    (X + "return x=%x\n\n# more\nreturn x=%x", 7, 1, "unexpected 'return'"),
    (X + "region r {", 4, 10, "unexpected '{'"),
    (X + "region r @b", 4, 12, "the line ends too early"),
    (X + "region r @b {\n  return\n", 5, 1, "the text ends too early"),
    (X + "region r @b {\n  return\nreturn x=%x", 6, 1, "unexpected 'return'"),
    (X + "region r @b {\n  return y=%x\n}", 5, 12, "unknown value %x"),
    (X + "region r @b {\ndim B in [1, 4]\nreturn\n}", 5, 5, "dim 'B' of a region in [1, 4]"),
    (X + "region r @b {\ndim T in [1, 9]\nreturn\n}", 5, 5, "dim 'T' of a region in [1, 9]"),
    (X + "region r @b {\ndim T in [2, 3]\ndim T in [2, 3]\nreturn\n}", 6, 5, "dim 'T' is defined twice"),
    (X + "region r @b {\nreturn\n}\nregion r @b {\nreturn\n}", 7, 8, "region 'r' is defined twice"),
    (X + "region r @b {\n region s @b {\n return\n }\n return\n}", 5, 2, "a region may not contain a region"),
]


@pytest.mark.parametrize(("text", "line", "column", "message"), BAD)
def test_bad_text_is_located(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse_program(text)
    assert message in caught.value.what
    assert caught.value.where == f"line {line}, column {column}"
    assert str(caught.value).startswith(caught.value.what)


def test_one_program_is_one_program() -> None:
    text = X + "return x=%x\n"
    assert len(parse_programs(text * 3)) == 3
    with pytest.raises(ParseError, match="unexpected 'program'") as caught:
        parse_program(text * 2)
    assert caught.value.where == "line 5, column 1"


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ("%y = aten.add.Tensor(%x, %x) : f32[T, 5]\nreturn y=%y", 4, "declared as"),
        ("%y = aten.add.Tensor(%x, %x) : f32[T, 4]\nreturn x=%x", 4, "nothing uses"),
        ("state s: row i32[4] group=g unit=sequence\nreturn x=%x", 5, "is returned as nothing"),
        ("input z: f32[B]\nreturn x=%x", 4, "dim B is not declared"),
        ("region r @b {\n  input y: f32[T]\n  return y=%y\n}\nreturn x=%x", 5, "is never called"),
    ],
)
def test_what_the_verifier_refuses_is_located_in_the_text(body: str, line: int, message: str) -> None:
    with pytest.raises(VerifyError, match=message) as caught:
        verify(parse_program(X + body))
    assert f", line {line}, column " in caught.value.where


@pytest.mark.parametrize("text", ["program p stage=NORMAL\ndim T in [1, ٣]", "program é stage=NORMAL"])
def test_numbers_and_names_are_ascii(text: str) -> None:
    with pytest.raises(ParseError, match="unexpected character"):
        parse_program(text)


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 1, "the line ends too early"),
        ("f32", 4, "the line ends too early"),
        ("f32[4] f32[4]", 8, "unexpected 'f32'"),
        ("f32[4]\nf32[4]", 7, "unexpected end of the line"),
        ("(f32[4])", 1, "unexpected '('"),
        ("f32[4,]", 7, "unexpected ']'"),
        ("f32[Q]", 5, "unexpected 'Q'"),
        ("f32[1e3]", 5, "'1e3' is not a whole number"),
    ],
)
def test_bad_types(text: str, column: int, message: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse_type(text)
    assert message in caught.value.what and caught.value.where == f"line 1, column {column}"


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 1, "the line ends too early"),
        ("source", 7, "the line ends too early"),
        ("source() source()", 10, "unexpected 'source'"),
        ("source()\nsource()", 9, "unexpected end of the line"),
        ("source(a=[1, [2)", 16, "unexpected ')'"),
        ("source().", 10, "the line ends too early"),
        ("source(a=" + "9" * 5000 + ")", 10, "a number of too many digits"),
        ("source(a=" + "[" * 5000, 74, "nested deeper than 64 levels"),
        ("concat(" * 5000, 65 * 7 + 1, "nested deeper than 64 levels"),
    ],
)
def test_bad_recipes(text: str, column: int, message: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse_recipe(text)
    assert message in caught.value.what and caught.value.where == f"line 1, column {column}"


@pytest.mark.parametrize(
    "line",
    [
        "%y = ingot.kv_append(%x, %x, %x, %x) : f32[T, 4]",  # no state where one belongs
        "%y = ingot.kv_append(kv=%x, k=%x, v=%x, slots=%x) : f32[T, 4]",
        "%y = getitem(%x) : f32[T, 4]",
        "%y = getitem(%x, 0) : f32[T, 4]",
        "%y = getitem(1, 0) : f32[T, 4]",
        "%y = getitem(%x, None) : f32[T, 4]",
        "%y = getitem([%x], 0) : f32[T, 4]",
        "%y = getitem(a=%x) : f32[T, 4]",
        "%y = region.r(1) : f32[T, 4]",
        "%y = ingot.linear(1, 2) : f32[T, 4]",
        "%y = ingot.linear() : f32[T, 4]",
        "%y = ingot.linear(%x, %x, %x, %x) : f32[T, 4]",
        '%y = ingot.rms_norm(%x, %x, eps="a") : f32[T, 4]',
        "%y = ingot.rms_norm(%x, %x, sigma=1.0) : f32[T, 4]",
        "%y = ingot.cast(%x, dtype=99999999999999999999) : f32[T, 4]",
        "%y = aten.view.default(%x, [99999999999999999999]) : f32[T, 4]",
        "%y = aten.view.default(%x, [3, 7]) : f32[T, 4]",
        "%y = aten.view.default(%x, [-1]) : f32[T, 4]",  # a size that is arithmetic on a symbol
        "%y = aten.slice.Tensor(%x, 0, 0, 3, 0) : f32[T, 4]",
        "%y = aten.slice.Tensor(%x, 7) : f32[T, 4]",
        "%y = aten.add.Tensor(%x, None) : f32[T, 4]",
        "%y = aten.add.Tensor(%x, %huge) : f32[T, 4]",
        "%y = aten.add.Tensor(%x, %wide) : f32[T, 4]",
        "%y = aten.add.Tensor(%x, %backwards) : f32[T, 4]",
    ],
)
def test_calls_that_no_op_takes_end_in_a_verify_error(line: str) -> None:
    huge = "input huge: f32[99999999999999999999]\ninput wide: f32[4000000000, 4000000000]\n"
    text = X + huge + "input backwards: f32[4, 4; -4, 1]\n" + line + "\nreturn y=%y\n"
    with pytest.raises(VerifyError):
        verify(parse_program(text))
