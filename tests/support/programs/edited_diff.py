"""Diffs of a program's text and the text after edits."""

from ingot.ir.diff import Difference, ProgramDiff
from ingot.ir.parse import parse_program


def edited_diff(text: str, *edits: tuple[str, str]) -> ProgramDiff:
    """Return the diff from a program's text to the text after some replacements. Each replaces one place or more."""
    after = text
    for old, new in edits:
        assert old in after, old
        after = after.replace(old, new)
    return parse_program(text).diff(parse_program(after))


def only(found: ProgramDiff) -> Difference:
    """Return the one difference of a diff, and check that it has no other."""
    everything = [*found.header, *found.changed, *found.added, *found.removed]
    assert len(everything) == 1 and len(str(found).splitlines()) == 1, f"\n{found}"
    return everything[0]
