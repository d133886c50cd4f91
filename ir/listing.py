"""How an error message lists many findings: one a line, cut at a number that still fits a screen."""

from collections.abc import Sequence

LISTED = 20


def listed(lines: Sequence[str]) -> str:
    """Returns the first LISTED lines, indented, long ones cut, and how many more there are."""
    more = [f"    … and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
    return "\n".join([*(f"    {line if len(line) <= 400 else line[:400] + '…'}" for line in lines[:LISTED]), *more])
