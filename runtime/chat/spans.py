"""Detection of the characters in a rendered chat that come from messages, by rendering disguised messages too.

A template is rendered twice: with the messages, and with their characters shifted into Unicode's private-use planes. A
character that is equal in both renderings comes from the template. A character that is shifted in the second
rendering comes from a message. Disguising does not shift white space, so that trimming has the same effect, nor quotes,
backslashes and control characters, so that JSON escapes the same. A control token made only of these characters would
count as the template's.
"""

import re
from typing import Final

_KEPT = frozenset('"\\')
# Private-use planes of Unicode 15, chapter 23.5: U+F0000 to U+FFFFD and U+100000 to U+10FFFD.
_PLANE, _OTHER_PLANE = 0xF0000, 0x100000
_SHIFTED: Final = re.compile("[\U000f0000-\U0010ffff]+")


class _Shift(dict[int, int]):
    """A table for `str.translate` that replaces characters by private-use characters of Unicode. The new character has
    the low 16 bits of the old one.

    White space, quotes, backslashes and control characters are not replaced. A private-use character moves to the other
    private-use plane. The table computes a character's entry at its first use.
    """

    def __missing__(self, code: int) -> int:
        if chr(code) in _KEPT or chr(code).isspace() or code < 0x20:
            shifted = code
        else:
            shifted = (_OTHER_PLANE if _PLANE <= code < _OTHER_PLANE else _PLANE) + (code & 0xFFFF)
        if len(self) < 1 << 16:  # bounds the memory of a long-lived process
            self[code] = shifted
        return shifted


_SHIFT = _Shift()


def disguise(text: str, keep: re.Pattern[str] | None = None) -> str:
    """Return a message's text with its characters replaced by private-use characters of Unicode. In a rendered chat,
    these show which text comes from the message.

    White space, quotes, backslashes and control characters are not replaced, and neither is text that matches `keep`.
    """
    if keep is None:
        return text.translate(_SHIFT)
    pieces: list[str] = []
    end = 0
    for match in keep.finditer(text):
        pieces += text[end : match.start()].translate(_SHIFT), match[0]
        end = match.end()
    return "".join([*pieces, text[end:].translate(_SHIFT)])


def content_spans(text: str, disguised: str) -> list[tuple[int, int]] | None:
    """Return the spans [begin, end) of a rendered chat that come from messages.

    text        the rendered chat
    disguised   the chat rendered from messages that `disguise` has changed

    Return None if the two texts do not correspond character by character.
    """
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
        for place in range(begin, last):  # the template's own private-use characters may be among them
            if shifted[place] == disguised[place]:
                spans.append((place, place + 1))
            elif text[place] != disguised[place]:
                return None
    return spans if text[end:] == disguised[end:] else None
