"""Printing that all commands share: consoles, tables, sizes in bytes, JSON, program text."""

import itertools
import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

# A pipe has no width: rich would assume 80 columns and cut text that programs read.
_PIPE_WIDTH = 1 << 16


def console(*, stderr: bool = False) -> "Console":
    """Return a rich console for stdout or stderr. On a terminal it prints colours, in a pipe plain text of any
    width."""
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit here with its own exit code

    made = PlainConsole(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.width = _PIPE_WIDTH
    return made


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> "Table":
    """Return a table of `rows` without ruled lines. Cells are literal text.

    A column is aligned right if its name ends in ">".
    """
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title or None, title_justify="left")
    for column in columns:
        made.add_column(
            Text(column.removesuffix(">")), justify="right" if column.endswith(">") else "left", overflow="fold"
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


def facts(rows: Sequence[tuple[str, object]]) -> "Table":
    """Return a table with a row for each (name, value) pair. Names are bold."""
    from rich.text import Text

    made = table(("", ""), [(Text(name, "bold"), value) for name, value in rows])
    made.show_header = False
    return made


def print_table(out: "Console", made: "Table") -> None:
    """Print a table. In a pipe, lines end without blanks."""
    if out.is_terminal:
        out.print(made)
        return
    with out.capture() as captured:
        out.print(made)
    for line in captured.get().splitlines():
        out.print(line.rstrip(), markup=False, soft_wrap=True)


def size_text(count: int) -> str:
    """Return a number of bytes as text in decimal units, such as "13.6 MB"."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.95 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


class ByteCount(int):
    """A number of bytes that prints as in "13.6 MB". A progress callback gets it for phases that count bytes."""

    def __str__(self) -> str:
        return size_text(self)


def counts_text(counts: dict[str, int]) -> str:
    """Return counts as text, largest first, as in "reference 40, inductor 25". Return "none" if `counts` is empty."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count}" for name, count in ordered) or "none"


def print_json(value: Any) -> None:
    """Print one JSON value to stdout. The text is ASCII, so that it works with every terminal encoding."""
    sys.stdout.write(json_text(value))


def json_text(value: Any) -> str:
    """Return indented JSON that ends with a newline. Fields keep their order."""
    return json.dumps(value, indent=2) + "\n"


def print_program_text(text: str, dim: Sequence[bool] = ()) -> None:
    """Print the text of programs: coloured on a terminal, unchanged in a pipe.

    On a terminal, line n is dimmed if `dim[n]` is true.
    """
    out = console()
    if not out.is_terminal:
        sys.stdout.write(text)
        return
    for line, faint in itertools.zip_longest(text.splitlines(), dim, fillvalue=False):
        out.print(_coloured(str(line)), soft_wrap=True, style="dim" if faint else None)


_STYLES = {"comment": "dim", "value": "cyan", "op": "bold", "backend": "magenta", "keyword": "green"}
_PARTS = re.compile(
    r"""(?P<comment>[ ][ ]\#.*$)
      | (?P<value>%[\w.]+)
      | (?P<op>\b(?:ingot|aten|region)\.[\w.]+(?=\())
      | (?P<backend>@\w+)
      | ^\s*(?P<keyword>program|dim|input|param|state|region|return)\b""",
    re.VERBOSE,
)


def _coloured(line: str) -> "Text":
    from rich.text import Text

    text = Text(line)
    for match in _PARTS.finditer(line):
        kind = match.lastgroup or ""
        text.stylize(_STYLES[kind], *match.span(kind))
    return text
