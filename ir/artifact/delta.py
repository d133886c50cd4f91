"""Deltas: a text stored as its difference from a base text, by ranges of the base's lines and by new lines.

A delta is text too, and exact:

    delta 1
    base trace/04-insert-ending.delta
    sha256 5c1d…                            of the resulting text, in UTF-8
    =1-40                                   lines 1 to 40 of the base
    +%linear = ingot.linear(…               a new line
"""

import hashlib
from collections.abc import Callable

from ingot.ir.errors import ArtifactError

_DELTA = "delta 1"  # the first line, with the version of the format


def encode_delta(text: str, base: str, base_file: str) -> str:
    """Return `text` as a delta of the text `base`: ranges of lines to copy from `base`, and new lines.

    A trace stores similar programs as deltas to save space. `base_file` is the name of the file that holds `base`. The
    ranges may be in any order. This keeps the time linear in the lengths of both texts.
    """
    lines, old = text.split("\n"), base.split("\n")
    first: dict[str, int] = {}
    for index, line in enumerate(old):
        first.setdefault(line, index)
    written = [_DELTA, f"base {base_file}", f"sha256 {_sha256(text)}"]
    place = following = 0
    while place < len(lines):
        # A line that occurs several times (a closing brace) is most likely the one after those taken last.
        ahead = following < len(old) and old[following] == lines[place]
        begin = following if ahead else first.get(lines[place])
        if begin is None:
            written.append("+" + lines[place])
            place += 1
            continue
        following = begin
        while place < len(lines) and following < len(old) and lines[place] == old[following]:
            place, following = place + 1, following + 1
        written.append(f"={begin + 1}-{following}")
    return "\n".join(written) + "\n"


def decode_delta(delta: str, read: Callable[[str], str], file: str) -> str:
    """Return the text that `delta` encodes. A delta copies lines from a base file and adds new lines.

    `read` returns the text of a file by name, here of the base file. `file` is the name of the delta's file, for
    messages. Raises ArtifactError if the delta is damaged.
    """
    lines = delta.split("\n")
    if lines[0] != _DELTA or len(lines) < 4 or lines[-1] != "":
        raise _damaged(file, f"begins with {lines[0][:80]!r}" if lines[0] != _DELTA else "is cut short")
    if not lines[1].startswith("base ") or not lines[2].startswith("sha256 "):
        raise _damaged(file, "has no base and digest in lines 2 and 3")
    old = read(lines[1].removeprefix("base ")).split("\n")
    text: list[str] = []
    for number, line in enumerate(lines[3:-1], 4):
        if line.startswith("+"):
            text.append(line[1:])
            continue
        begin, dash, end = line.removeprefix("=").partition("-")
        ranged = line.startswith("=") and dash and begin.isdecimal() and end.isdecimal()
        if not ranged or not 1 <= int(begin) <= int(end) <= len(old):
            raise _damaged(file, f"line {number} is {line[:80]!r}", f"+text, or =FIRST-LAST within {len(old)} lines")
        text += old[int(begin) - 1 : int(end)]
    found = "\n".join(text)
    if _sha256(found) != lines[2].removeprefix("sha256 "):
        raise _damaged(file, "yields another text than the recorded one")
    return found


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _damaged(file: str, what: str, expected: str = "an unchanged delta") -> ArtifactError:
    return ArtifactError(
        f"{file} {what}", where=file, expected=expected, hint="compile the model again, or copy the artifact again"
    )
