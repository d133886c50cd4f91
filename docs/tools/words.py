"""Count words that make prose hard to read, per thousand lines of prose in each room.

    python docs/tools/words.py                  print the counts by room; exit with 1 if a room is over its limit
    python docs/tools/words.py --files [ROOM]   print the counts by file too, most first
    python docs/tools/words.py --lines PATH …   print each word found in these files, with its line and replacement
    python docs/tools/words.py --lower          write present counts into word_limits.json where they are lower

Prose is docstrings and comments of Python files outside tests, and text and tables of markdown pages. Code blocks,
code in backticks, doctest lines and generated tables are left out.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMITS = Path(__file__).with_name("word_limits.json")
LIMIT = 4  # words per thousand lines of prose, for every room that word_limits.json does not list
ROOMS = ("ir", "models", "frontend", "passes", "backends", "runtime", "ingot", "benchmarks", "docs")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")  # of the root, counted with docs
GENERATED = ("docs/reference.md", "docs/benchmarks.md")  # their tables come from code and results

# Each expression, with what to write instead. `(?!…)` and `(?<!…)` hold the exceptions: plain technical meanings.
WORDS = {
    r"behind(?! (?:a|the) (?:proxy|load balancer|firewall))": "after",
    r"in front of(?! a (?:server|proxy))": "before",
    r"(?<!inner )(?<!outer )(?<!dot )(?<!matrix )(?<!cross )(?<!scalar )(?<!Kronecker )"
    r"(?<!sum of )(?<!unsigned )(?<!GPU )"
    r"products?(?!'s name| name| of (?:(?:the |its |all )?(?:sizes|dims|factors)|numbers))": "matmul",
    r"(?<!people )(?<!users )(?<!user )(?<!readers )(?<!someone )who": "that, or the component's name",
    r"whoever|whom": "the component's name",
    r"nobody|somebody|anybody": "none, no caller, a caller",
    r"spots?": "place, row, column",
    r"told(?! apart)": "passed, reported",
    r"rated(?! (?:power|bandwidth))": "scored",
    r"feed(?:s|ing)? (?:a )?prompts?|what a step feeds": "prefill, the tokens of a step",
    r"reckon(?:s|ed|ing)?": "count, compute",
    r"shall": "must, will",
    r"beside": "next to, with, besides",
    r"gives(?! (?:back|up))": "returns, yields",
    r"ask(?:s|ed|ing)? for": "request, need",
    r"(?:stands?|stood)(?! for\b)(?!-)(?! by)": "is, is stored",
    r"lies|lay(?! (?:out|down))|(?<!-)lie": "is, is stored",
    r"go(?:es)? round": "loop",
    r"hardly": "rarely, almost none",
    r"alike": "equal, the same",
    r"hence|thereby": "so",
    r"meanwhile": "at the same time",
    r"at hand": "available",
    r"had better": "should",
    r"(?:has|have|had) to do with": "concerns",
    r"comes? to(?= (?:\d|the same|nothing|little))": "is, totals",
    r"go(?:es)? by": "follows",
    r"(?<!each )(?<!two )of which": "a sentence of its own",
}
_WORDS = re.compile("|".join(rf"(?P<w{n}>\b(?:{word})\b)" for n, word in enumerate(WORDS)), re.I)
_REPLACEMENTS = list(WORDS.values())
# A sentence with such a beginning that is no question is nearly always a riddle.
_RIDDLE = re.compile(r"(?:^|(?<=[.!:] ))(?:What|Where)\b[^.?!:]*(?=[.!:]|$)")
_DIRECTIVE = re.compile(r"#\s*(?:noqa|type:|ruff:|mypy:|pragma|fmt:|!/)[^#]*")
_CODE = re.compile(r"``.*?``|`[^`]*`")
_BLOCK = re.compile(r"^( *)```.*?^\1```$|^(?: {4,}|\t)(?![-*\d])[^\n]*$|<!--.*?-->", re.M | re.S)
_LINK = re.compile(r"\]\([^)\s]*\)")


@dataclass(frozen=True)
class Found:
    line: int
    word: str
    instead: str


@dataclass(frozen=True)
class Count:
    """Lines of prose and the words found in them."""

    lines: int
    found: tuple[Found, ...]


def paragraphs(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the paragraphs of prose of a file: their first line's number, and their lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        tables = path.relative_to(ROOT).as_posix() not in GENERATED if path.is_relative_to(ROOT) else True
        text = _BLOCK.sub(lambda found: "\n" * found[0].count("\n"), text)
        text = re.sub(r"^(#+ .*|\|[-| ]*)$", "", text, flags=re.M)
        blocks = [(1, text if tables else re.sub(r"^\|.*$", "", text, flags=re.M))]
    else:
        blocks = [*_docstrings(text), *_comments(text)]
    for first, block in blocks:
        yield from _split(first, block)


def _docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings of modules, classes and functions, and of fields: strings that are statements."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            # Doctest lines, and the names of lists of fields, are code.
            yield node.lineno, re.sub(r"^ *>>> .*$|^ *\w+(?= {2,}\S)", "", node.value.value, flags=re.M)


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield comments. Whole lines that follow each other are one block."""
    begin, block, last = 0, list[str](), -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        comment, line = _DIRECTIVE.sub("", token.string).lstrip("# ").rstrip(), token.start[0]
        alone = token.line.lstrip().startswith("#")
        if not (alone and line == last + 1):
            if block:
                yield begin, "\n".join(block)
            begin, block = line, []
        block.append(comment)
        last = line if alone else -1
    if block:
        yield begin, "\n".join(block)


def _split(first: int, block: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the paragraphs of a block, without code, links' targets and list marks. A table's row is one."""
    begin, lines = first, list[str]()
    # Code becomes as many line breaks as it had, so that lines keep their numbers.
    block = _LINK.sub("]", _CODE.sub(lambda found: "code" + "\n" * found[0].count("\n"), block))
    for number, line in enumerate(block.split("\n"), first):
        stripped = line.strip()
        if lines and (not stripped or re.match(r"[-*|]\s|\d+\. ", stripped)):
            yield begin, lines
            lines = []
        if stripped:
            begin = begin if lines else number
            lines.append(re.sub(r"^(?:[-*] |\d+\. )", "", stripped))
    if lines:
        yield begin, lines


def count(path: Path) -> Count:
    """Count the words of WORDS, and the sentences that begin with What or Where, in a file."""
    total, found = 0, list[Found]()
    for first, lines in paragraphs(path):
        total += len(lines)
        text = " ".join(lines)
        starts = [sum(len(line) + 1 for line in lines[:n]) for n in range(len(lines))]

        def number(at: int, first: int = first, starts: Sequence[int] = tuple(starts)) -> int:
            return first + max(n for n, start in enumerate(starts) if start <= at)

        for match in _WORDS.finditer(text):
            assert match.lastgroup is not None
            instead = _REPLACEMENTS[int(match.lastgroup.removeprefix("w"))]
            found.append(Found(number(match.start()), match[0], instead))
        found += [
            Found(number(match.start()), f"{match[0][:40]} …", "subject first") for match in _RIDDLE.finditer(text)
        ]
    return Count(total, tuple(sorted(found, key=lambda one: one.line)))


def files(room: str) -> list[Path]:
    """Return the files of a room that have prose: links to rooms are not followed, so each file is counted once."""
    pages = [ROOT / page for page in PAGES] if room == "docs" else []
    own = [path for path in (ROOT / room).rglob("*") if path.suffix in (".py", ".md") and path.is_file()]
    own = [path for path in own if not {"tests", "build", "results"} & set(path.relative_to(ROOT).parts)]
    return sorted(own) + pages


def rooms(names: Sequence[str] = ROOMS) -> dict[str, dict[Path, Count]]:
    """Return the counts of each file by room."""
    return {room: {path: count(path) for path in files(room)} for room in names}


def per_thousand(counts: Sequence[Count]) -> float:
    return 1000 * sum(len(one.found) for one in counts) / max(1, sum(one.lines for one in counts))


def limits() -> dict[str, int]:
    """Return the limit of each room, in words per thousand lines."""
    return dict.fromkeys(ROOMS, LIMIT) | json.loads(LIMITS.read_text(encoding="utf-8"))


def lowered(allowed: Mapping[str, int], now: Mapping[str, float]) -> dict[str, int]:
    """Return the limits above LIMIT after they have fallen to the present counts. No limit rises."""
    fallen = {room: min(limit, ceil(now.get(room, limit))) for room, limit in allowed.items()}
    return {room: limit for room, limit in fallen.items() if limit > LIMIT}


def _print_words(given: Sequence[Path]) -> None:
    every = [path for one in given for path in (sorted(one.rglob("*")) if one.is_dir() else [one])]
    for path in every:
        if path.suffix in (".py", ".md"):
            for found in count(path.resolve()).found:
                print(f"{path}:{found.line}: {found.word} -> {found.instead}")


def _print_files(by_file: Mapping[Path, Count]) -> None:
    for path, counted in sorted(by_file.items(), key=lambda item: -len(item[1].found)):
        if counted.found:
            print(f"  {len(counted.found):4} in {counted.lines:5} lines  {path.relative_to(ROOT)}")


def _most(counts: Iterable[Count]) -> str:
    words = Counter(
        "What …" if "…" in found.word else found.word.lower() for counted in counts for found in counted.found
    )
    return ", ".join(f"{word} {times}" for word, times in words.most_common(6))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="?", const="", metavar="ROOM", help="counts by file")
    parser.add_argument("--lines", nargs="+", type=Path, metavar="PATH", help="the words of these files or folders")
    parser.add_argument("--lower", action="store_true", help="lower the limits to the present counts")
    options = parser.parse_args()
    if options.lines:
        _print_words(options.lines)
        return 0
    counted = rooms((options.files,) if options.files else ROOMS)
    now = {room: per_thousand(list(by_file.values())) for room, by_file in counted.items()}
    if options.lower:
        LIMITS.write_text(json.dumps(lowered(limits(), now), indent=2) + "\n", encoding="utf-8")
    allowed = limits()
    for room, by_file in counted.items():
        print(f"{room:10} {now[room]:6.1f} per thousand lines, limit {allowed[room]:3}   {_most(by_file.values())}")
        if options.files is not None:
            _print_files(by_file)
    over = [room for room in now if now[room] > allowed[room]]
    if over:
        print(f"over the limit: {', '.join(over)}; `--lines PATH` shows the words and what to write instead")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
