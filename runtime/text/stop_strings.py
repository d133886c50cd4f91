"""Search for stop strings in text that arrives in pieces, in linear time."""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Finds stop strings in a text that arrives character by character (an Aho-Corasick automaton). It is immutable,
    and the n sequences of a request share it.

    A state is an integer. It stands for the part of a stop string with which the text ends. `depth[state]` is the
    length of that part. For the stop string "END", the text "the EN" has a state of depth 2.
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
        """Return the state after one more `character` of the text. `state` is the state before it. Takes amortized
        constant time."""
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)


class StopMatcher:
    """Finds stop strings in the text of one sequence, and returns the text before them. The text arrives in pieces.
    `matched` is the stop string that was found, or None.

    With `include`, the returned text includes the stop string. Without, text that may become a stop string is held back
    until that is known. The stop string that is complete first counts. Of several that end at one character, the
    longest counts.
    """

    def __init__(self, strings: StopStrings, include: bool) -> None:
        self._strings = strings
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, stop: bool = True) -> str:
        """Add the next piece of text, and return the text that belongs to the output now. Return "" once a stop string
        was found.

        stop   False: a stop string that is complete within this piece does not count. This is for tokens before
               min_tokens
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
        """Return the text that was held back. The sequence has ended, so this text does not become a stop string."""
        held, self._held = self._held, ""
        return held if self.matched is None else ""
