"""Which characters of a rendered text come from messages: the text compared with a rendering of disguised messages.

A template is rendered twice, once with the messages as they are and once with their characters shifted into Unicode's
private-use planes. Where both renderings have the same character, the template wrote it; where the second one has the
shifted character of the first, a message did. White space stays as it is, so that trimming does the same to both, and
so do quotes, backslashes and control characters, so that JSON escapes the same. A control token of these
alone would be taken for the template's.
"""

import re
from typing import Final

_KEPT = frozenset('"\\')
# Private-use planes of Unicode 15, chapter 23.5: U+F0000 to U+FFFFD and U+100000 to U+10FFFD.
_PLANE, _OTHER_PLANE = 0xF0000, 0x100000
_SHIFTED: Final = re.compile("[\U000f0000-\U0010ffff]+")


class _Shift(dict[int, int]):
    """For `str.translate`: the low 16 bits of a character, in a plane that it is not in. Filled as characters come."""

    def __missing__(self, code: int) -> int:
        if chr(code) in _KEPT or chr(code).isspace() or code < 0x20:
            shifted = code
        else:
            shifted = (_OTHER_PLANE if _PLANE <= code < _OTHER_PLANE else _PLANE) + (code & 0xFFFF)
        if len(self) < 1 << 16:  # a bound on what a long-lived process keeps
            self[code] = shifted
        return shifted


_SHIFT = _Shift()


def disguise(text: str, keep: re.Pattern[str] | None = None) -> str:
    """The text with its characters shifted, but for what `keep` matches."""
    if keep is None:
        return text.translate(_SHIFT)
    pieces: list[str] = []
    end = 0
    for match in keep.finditer(text):
        pieces += text[end : match.start()].translate(_SHIFT), match[0]
        end = match.end()
    return "".join([*pieces, text[end:].translate(_SHIFT)])


def content_spans(text: str, disguised: str) -> list[tuple[int, int]] | None:
    """Spans [begin, end) of `text` that come from messages; None when the two renderings do not match."""
    if len(text) != len(disguised):
        return None
    shifted = text.translate(_SHIFT)
    spans: list[tuple[int, int]] = []
    end = 0
    for match in _SHIFTED.finditer(disguised):
        begin, last = match.span()
        if text[end:begin] != disguised[end:begin]:
            return None
        end = last
        if shifted[begin:last] == match[0]:
            spans.append((begin, last))
            continue
        for place in range(begin, last):  # private-use characters of the template's own among them
            if shifted[place] == disguised[place]:
                spans.append((place, place + 1))
            elif text[place] != disguised[place]:
                return None
    return spans if text[end:] == disguised[end:] else None
