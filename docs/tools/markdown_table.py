"""Tables of Markdown."""

from collections.abc import Iterable, Iterator


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """The lines of a table. A bar in a cell is escaped."""
    head = list(head)
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
