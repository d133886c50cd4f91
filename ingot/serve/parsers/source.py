"""The text that a machine reads while it arrives, and the steps that machines are made of.

A step is a generator: it yields when it needs more text, and is resumed when there is more. So a machine is written as
if it had the whole text. No step reads text again, apart from the beginning of a marker, so the work is linear.
"""

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

Value = TypeVar("Value")
Steps = Generator[None, None, Value]
Sink = Callable[[str], None]

_NOT_BLANK = re.compile(r"\S")


class Malformed(Exception):
    """The text is not what the format expects. Machines catch it; it never leaves a parser."""


class Markers:
    """A set of texts to search for. None of them may contain another one, except at its end.

    Without this rule, a found marker could turn out to be a part of a longer one when more text arrives.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        inside = [(one, other) for one in texts for other in texts if one in other[:-1]]
        if inside or "" in texts:
            raise ValueError(f"markers that contain each other, or an empty one: {inside or texts}")
        self.texts = tuple(texts)
        self._found = re.compile("|".join(re.escape(text) for text in texts) or r"(?!)")
        self._first = re.compile("[" + "".join(re.escape(text[0]) for text in texts) + "]" if texts else r"(?!)")
        self._begins = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self._longest = max(map(len, texts), default=1)

    def find(self, text: str, begin: int) -> tuple[int, str | None]:
        """Return the position of the first marker from `begin` on, and the marker. Without one, return the position
        from which the text may become a marker, and None."""
        if found := self._found.search(text, begin):
            return found.start(), found.group()
        for first in self._first.finditer(text, max(begin, len(text) - self._longest + 1)):
            if text[first.start() :] in self._begins:
                return first.start(), None
        return len(text), None


@lru_cache(maxsize=256)
def markers(*texts: str) -> Markers:
    """Return the set of these texts."""
    return Markers(texts)


class Source:
    """The text of one message so far, read from left to right.

    ended   whether all text is here
    """

    def __init__(self) -> None:
        self.ended = False
        self._text, self._at = "", 0
        self._kept: list[str] | None = None

    @property
    def exhausted(self) -> bool:
        """Return whether all text is here and read."""
        return self.ended and self._at == len(self._text)

    def add(self, text: str) -> None:
        """Append text. Nothing that was read is copied again."""
        self._text, self._at = self._text[self._at :] + text, 0

    def take(self, size: int) -> str:
        """Read `size` characters, which must be here."""
        piece = self._text[self._at : self._at + size]
        self._at += size
        if self._kept is not None:
            self._kept.append(piece)
        return piece

    def keep(self) -> None:
        """From now on, keep the text that is read, so that `release` can return it."""
        self._kept = []

    def release(self) -> str:
        """Return the text that was read since `keep`, and keep no more."""
        kept, self._kept = self._kept, None
        return "".join(kept or ())

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; "" at the end."""
        while self._at >= len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def blank(self) -> Steps[str]:
        """Read white space, and return the character after it, as `peek`."""
        while True:
            if found := _NOT_BLANK.search(self._text, self._at):
                if found.start() > self._at:
                    self.take(found.start() - self._at)
                return found.group()
            self.take(len(self._text) - self._at)
            if self.ended:
                return ""
            yield

    def literal(self, *texts: str) -> Steps[str | None]:
        """Read the one of `texts` that comes next; the longest, if several do. Return it, or None."""
        longest = max(map(len, texts), default=0)
        while True:
            here = self._text[self._at : self._at + longest]
            if not self.ended and any(len(text) > len(here) and text.startswith(here) for text in texts):
                yield
                continue
            found = max((text for text in texts if here.startswith(text)), key=len, default=None)
            if found is not None:
                self.take(len(found))
            return found

    def until(self, ends: Markers, sink: Sink) -> Steps[str | None]:
        """Read up to the first of the markers, and pass the text to `sink` in pieces. Return the marker, which is not
        read; None at the end of the text."""
        while True:
            end, found = ends.find(self._text, self._at)
            if self.ended and found is None:
                end = len(self._text)
            if end > self._at:
                sink(self.take(end - self._at))
            if found is not None or self.ended:
                return found
            yield

    def short(self, ends: Markers, limit: int) -> Steps[tuple[str, str]]:
        """Read up to the first of the markers. Return the text and the marker, which is not read.

        Raises Malformed if there is no marker after at most `limit` characters.
        """
        pieces: list[str] = []
        while True:
            end, found = ends.find(self._text, self._at)
            size = end - self._at
            pieces.append(self.take(min(size, limit)))
            if size > limit:
                raise Malformed
            limit -= size
            if found is not None:
                return "".join(pieces), found
            if self.ended:
                raise Malformed
            yield

    def run(self, characters: re.Pattern[str], limit: int) -> Steps[str]:
        """Read as many characters as match the pattern of one or more characters, and return them.

        Raises Malformed after `limit` characters."""
        pieces: list[str] = []
        while True:
            found = characters.match(self._text, self._at)
            size = found.end() - self._at if found else 0
            pieces.append(self.take(min(size, limit)))
            if size > limit:
                raise Malformed
            limit -= size
            if self._at < len(self._text) or self.ended:
                return "".join(pieces)
            yield

    def exactly(self, size: int) -> Steps[str]:
        """Read `size` characters, which are few. Raises Malformed if the text ends before."""
        while len(self._text) - self._at < size:
            if self.ended:
                raise Malformed
            yield
        return self.take(size)
