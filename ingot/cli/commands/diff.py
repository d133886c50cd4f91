"""`ingot diff`: show the semantic differences between two artifacts, programs after passes, or program files."""

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ingot.cli.commands import AsJson
from ingot.cli.console import console, print_json
from ingot.ir.errors import OptionError

if TYPE_CHECKING:
    from ingot.debug.diff import PairDiff, SidesDiff

DIFFERS = 3  # distinct from the general exit codes
_STYLES = {"~": "yellow", "-": "red", "+": "green"}


def diff_artifacts(
    before: str,
    after: str,
    /,
    *,
    exit_code: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    variant: str | None = None,
    json: AsJson = False,
) -> int:
    """Show the differences in meaning between two artifacts, or between two steps of a compile.

    Names, order and spelling are not compared. Consequences of a listed difference are left out.

    Parameters
    ----------
    before
        An artifact. Or its programs after a pass, as in NAME.ingot:merge-linears, NAME.ingot:choose-backends@decode or
        NAME.ingot:cse@NORMAL. Or its programs at the end of a stage, as in NAME.ingot:FUSED. Or a file of programs,
        NAME.ir.
    after
        What to compare with it, in one of these forms.
    exit_code
        Exit with 3 if they differ.
    variant
        The variant of fat artifacts, by its target, as in sm_90. Two, as in sm_80,sm_90: the one of `before`, and the
        one of `after`. Default: the one for this machine.
    """
    from ingot.debug.diff import diff_sides
    from ingot.debug.sides import read_side

    first, second = _variants(variant)
    found = diff_sides(read_side(before, first), read_side(after, second))
    if json:
        print_json(found.to_json())
    else:
        _print(found)
    return DIFFERS if exit_code and found else 0


def _variants(text: str | None) -> tuple[str | None, str | None]:
    """Return the variants of the two sides, given the value of --variant."""
    if text is None:
        return None, None
    first, *others = text.split(",")
    if len(others) > 1:
        raise OptionError(f"--variant {text:.80}", expected="one variant, or two with a comma between them")
    return first, (others or [first])[0]


def _print(found: "SidesDiff") -> None:
    from rich.text import Text

    out = console()
    if not found:
        out.print("no differences")
        return
    for line in _lines(found):
        sign = line.lstrip(" ")[:1]
        out.print(Text(line, style=_STYLES.get(sign, "bold")), soft_wrap=True)


def _lines(found: "SidesDiff") -> list[str]:
    lines = [f"~ {one.what} {one.field} {one.old} -> {one.new}" for one in found.facts if one.what != "weight"]
    weights = [one for one in found.facts if one.what == "weight"]
    if not any(one.what == "param" for pair in found.programs for one in (*pair.diff.changed, *pair.diff.added)):
        lines += [f"- weight {one.before}: {one.old}" for one in weights if one.before]
        lines += [f"+ weight {one.after}: {one.new}" for one in weights if one.after]
    elif weights:
        lines.append(f"~ weights: {len(weights)} are made differently, as the programs below show")
    for text, pairs in _alike(found.programs).items():
        if len(found.programs) > 1 or not text:
            lines.append(f"program {', '.join(pair.title for pair in pairs)}:")
        lines += [f"- {pair.title}" for pair in pairs if pair.after is None]
        lines += [f"+ {pair.title}" for pair in pairs if pair.before is None]
        lines += text.splitlines()
    return lines


def _alike(pairs: "tuple[PairDiff, ...]") -> "dict[str, list[PairDiff]]":
    """Return the pairs of programs that differ, grouped by the text of their difference.

    Programs of several bucket classes (ranges of step sizes) often differ in the same way. Their difference is printed
    once.
    """
    found: dict[str, list[PairDiff]] = {}
    for pair in pairs:
        if pair:
            found.setdefault(str(pair.diff), []).append(pair)
    return found
