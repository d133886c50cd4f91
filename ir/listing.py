"""List many findings in an error message: one a line, and only as many as fit a screen."""

from collections.abc import Sequence

LISTED = 20


def listed(lines: Sequence[str]) -> str:
    """Return `lines` as one text for an error message: the first 20, indented and shortened, and how many follow."""
    more = [f"    … and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
    return "\n".join([*(f"    {line if len(line) <= 400 else line[:400] + '…'}" for line in lines[:LISTED]), *more])
