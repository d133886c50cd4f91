"""Search for stop strings in text that arrives in pieces, in linear time."""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """An Aho-Corasick automaton of stop strings; immutable, so the sequences of a request share it.

    A state represents the longest suffix of the text that is a prefix of a stop string. Its depth is the number of
    characters that may still become a stop string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.first = frozenset(string[0] for string in strings)  # characters; text without them matches nothing
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.match: list[str | None] = [None]  # the longest stop string that ends in this state
        for string in strings:
            self._insert(string)
        self._link()

    def _insert(self, string: str) -> None:
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = self._next[state][character]
        self.match[state] = string

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], character)
                if self.match[child] is None:
                    self.match[child] = self.match[self._fail[child]]
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character of the text, given the state before. Takes amortized constant
        time."""
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)


class StopMatcher:
    """Passes the text of one sequence through, piece by piece, until a stop string is complete in it. `matched` is then
    that stop string, else None.

    With `include`, the stop string is part of the text. Without, text that may still become one is held back. The
    stop string that is complete first wins; of those that end at the same character, the longest. So the result does
    not depend on how the text is split into tokens.
    """

    def __init__(self, strings: StopStrings, include: bool) -> None:
        self._strings = strings
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, stop: bool = True) -> str:
        """Add the next piece of text. Return the text that is certain now. After a match, drop all further text.

        With `stop` False, a stop string that is complete within `text` counts as ordinary text.
        """
        if self.matched is not None:
            return ""
        strings, state = self._strings, self._state
        if not state and strings.first.isdisjoint(text):
            return text
        for index, character in enumerate(text):
            state = strings.step(state, character)
            self.matched = strings.match[state] if stop else None
            if self.matched is not None:
                if self._include:
                    return text[: index + 1]
                until_match = self._held + text[: index + 1]
                return until_match[: len(until_match) - len(self.matched)]
        self._state = state
        if self._include:
            return text
        so_far = self._held + text
        split = len(so_far) - strings.depth[state]
        self._held = so_far[split:]
        return so_far[:split]

    def finish(self) -> str:
        """Return the text that was held back. No more text comes, so it is no stop string."""
        held, self._held = self._held, ""
        return held if self.matched is None else ""
