"""Random edits of program texts: each parses to a verified program, or is refused with a line and a column.

The texts are those of several families at every stage. The edits depend on the commit: see `run_seed`.
"""

import random
import re
import time
from collections.abc import Sequence

import pytest
from run_seed import again, run_seed
from staged import staged, traced
from tiny import TINY

from ingot.ir.errors import IngotError, VerifyError
from ingot.ir.parse import parse_program
from ingot.ir.text import print_program
from ingot.ir.verify import verify

FAMILIES = ("llama-biased", "gemma3_text-old", "cohere-normed", "phi3-long", "smollm3-nope")
TESTS, EDITS = 5, 100
QUICK = 1  # tests of every run: others differ by their draws alone
SLOWEST = 10.0  # seconds for one text, of some hundred lines: a parse takes a hundredth of one

# What stands in for a piece of text: numbers at their limits, names of every kind, punctuation, and what is no ASCII.
SPARE = ["0", "-1", "9" * 25, "9" * 5000, "1e-05", "1e999", "inf", "nan", "None", "True", '"text"', "%x", "f32", "bf16"]
SPARE += ["T", "B", "pages", "state", "source", "return", "region", "param", "input", "dim", "getitem", "group", "unit"]
SPARE += [
    "aten.view.default",
    "aten.slice.Tensor",
    "ingot.kv_append",
    "ingot.linear",
    "region.r0",
    "tp=shard(0) ",
    "tp=split(0, unit=2) ",
]
SPARE += [*"()[]{}<>=:;,@+.", "#", " ", "\t", "\r", "\0", "\\", '"', '"\\ud800"', "é", "٣", "𝟜", "\u2028", "\u202e"]
PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|[\w.%-]+|\s|[^\w\s]')
EDIT_KINDS = ("token", *("alike",) * 9, "line", "splice", "cut", "character", "scope")


def kind_of(piece: str) -> str:
    """Values, numbers, dotted names and plain ones: a piece for another of its kind mostly parses."""
    if piece[0] in '%"':
        return piece[0]
    return "0" if piece[0].isdigit() else "." if "." in piece[1:-1] else "a" if piece[0].isalpha() else piece


def edited(text: str, texts: Sequence[str], draw: random.Random) -> str:
    """`text` after a few edits; lines may come from any of `texts`."""
    for _ in range(draw.choice([1, 1, 1, 1, 2, 4])):
        text = _edited_once(text, texts, draw)
    return text


def _edited_once(text: str, texts: Sequence[str], draw: random.Random) -> str:
    kind = draw.choice(EDIT_KINDS)
    if kind == "cut":
        return text[: draw.randrange(len(text) + 1)]
    pieces = text.splitlines(keepends=True) if kind in ("line", "splice", "scope") else PIECE.findall(text)
    pieces = list(text) if kind == "character" else pieces
    if not pieces:
        return text
    place, other = draw.randrange(len(pieces)), draw.randrange(len(pieces))
    if kind == "splice":
        lines = draw.choice(texts).splitlines(keepends=True)
        begin = draw.randrange(len(lines))
        pieces[place : place + draw.randrange(3)] = lines[begin : begin + draw.randrange(1, 6)]
    elif kind == "scope":  # a run of lines elsewhere: into a region, out of it, before what it reads
        run = pieces[place : place + draw.randrange(1, 5)]
        del pieces[place : place + len(run)]
        pieces[other:other] = run
    elif kind == "alike":
        same = [piece for piece in pieces if kind_of(piece) == kind_of(pieces[place])]
        pieces[place] = draw.choice(same)
    else:
        _change(pieces, place, other, draw)
    return "".join(pieces)


def _change(pieces: list[str], place: int, other: int, draw: random.Random) -> None:
    match draw.choice(["delete", "double", "replace", "spare", "swap"]):
        case "delete":
            del pieces[place]
        case "double":
            pieces.insert(place, pieces[place])
        case "replace":
            pieces[place] = pieces[other]
        case "spare":
            pieces[place] = draw.choice(SPARE)
        case "swap":
            pieces[place], pieces[other] = pieces[other], pieces[place]


def fate(text: str) -> str:
    """How the text fares: "parse" or "verify" when refused there, else "pass"."""
    try:
        program = parse_program(text)
    except IngotError as error:
        _check_place(error, text)
        return "parse"
    printed = print_program(program)
    assert print_program(parse_program(printed)) == printed
    try:
        verify(program)
    except VerifyError as error:
        _check_place(error, text)
        return "verify"
    return "pass"


def _check_place(error: IngotError, text: str) -> None:
    """The error names a place that the text has."""
    found = re.search(r"\bline (\d+), column (\d+)\b", error.where)
    assert found, f"refused without line and column: {error}"
    line, column = map(int, found.groups())
    lines = text.split("\n")
    assert 1 <= line <= len(lines) and 1 <= column <= len(lines[line - 1]) + 1, f"no such place: {error}"


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Every text that the passes leave and that is a program by itself: a plan has no place in the text."""
    found: list[str] = []
    for name in FAMILIES:
        steps, _ = staged(traced(TINY[name].config))
        for step in steps:
            text = print_program(step.program)
            if text not in found:  # else of a pass that changed nothing
                try:
                    verify(parse_program(text))
                except VerifyError:
                    continue
            found.append(text)
    stages = {re.search(r"stage=(\w+)", text).group(1) for text in found}  # type: ignore[union-attr]
    assert stages == {"TRACED", "NORMAL", "CACHED", "FUSED", "LOWERED"}
    return found


@pytest.mark.xdist_group("fuzz-text")
@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.slow] * (number >= QUICK)) for number in range(TESTS)]
)
def test_an_edited_text_is_a_program_or_is_refused_at_a_place(number: int, texts: list[str]) -> None:
    fates: list[str] = []
    every = {"parse", "verify", "pass"}
    # One in twenty edits ends in the verifier, so 100 of them may all end elsewhere.
    for edit in range(5 * EDITS):
        if edit >= EDITS and set(fates) == every:
            break
        draw = random.Random(f"{run_seed()} {number} {edit}")
        text = edited(draw.choice(texts), texts, draw)
        begin = time.perf_counter()
        try:
            fates.append(fate(text))
        except Exception as error:
            raise AssertionError(f"{again(edit)}\n{text}") from error
        assert time.perf_counter() - begin < SLOWEST, again(edit)
    assert set(fates) == every, f"the edits are too wild or too tame: {again('all')}"
