"""The grammar of one sequence while it is served."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ingot.runtime.grammar.limits import SLOW_SECONDS

if TYPE_CHECKING:
    import llguidance


class Matcher:
    """Follows the output of one sequence through its grammar.

    backend     llguidance's matcher, at the start of the grammar
    end_tokens  the model's end tokens
    goes_on     whether the output goes on without a grammar after an end token (`ignore_eos`)
    seconds     (attribute) the CPU time of its slow masks
    """

    def __init__(self, backend: "llguidance.LLMatcher", end_tokens: Collection[int], *, goes_on: bool) -> None:
        self.backend = backend
        self.seconds = 0.0
        self._end_tokens, self._goes_on = frozenset(end_tokens), goes_on
        self._taken = 0  # outputs that the matcher has
        self._ended = False  # by an end token

    @property
    def free(self) -> bool:
        """Return whether the grammar has ended and any token may follow."""
        return self._ended and self._goes_on

    @property
    def complete(self) -> bool:
        """Return whether the output so far is a whole text of the grammar."""
        return self._ended or (not self.backend.is_error() and self.backend.is_accepting())

    @property
    def error(self) -> str:
        """Return why the sequence cannot go on; "" if it can."""
        if self.seconds > SLOW_SECONDS:
            return f"its masks took {self.seconds:.1f} s"
        return self.backend.get_error() if self.backend.is_error() else ""

    def advance(self, output_ids: Sequence[int]) -> None:
        """Take the outputs that are new since the last call. `output_ids` are all outputs so far."""
        for token in output_ids[self._taken :]:
            self._taken += 1
            if not self._ended and not self.backend.is_error():
                self.backend.consume_token(token)
                self._ended = token in self._end_tokens

    def rollback(self, count: int) -> None:
        """Take back the last `count` outputs, for drafts that were rejected. None of them may be an end token."""
        self._taken -= count
        self.backend.rollback(count)
