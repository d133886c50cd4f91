"""The grammar of one sequence while it is served."""

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from ingot.runtime.grammar.limits import FAST_SECONDS, SLOW_SECONDS

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
        self._taken = 0  # outputs that the matcher has, with those that `look_ahead` has found
        self._found: list[int] = []  # the last of them, from `look_ahead`
        self._ended = False  # by an end token
        self._suspect = False  # whether `look_ahead` took long the last time

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

    def forced(self, num_outputs: int) -> Sequence[int]:
        """Return the tokens that the grammar forces after the first `num_outputs` outputs, as far as `look_ahead` has
        found them."""
        left = self._taken - num_outputs
        return self._found[-left:] if left > 0 else ()

    def look_ahead(self, num_outputs: int, most: int, exists: Callable[[int], bool]) -> bool:
        """Find up to `most` tokens that the grammar forces after the first `num_outputs` outputs, which are all so far.
        Return whether there are several.

        A token is forced if the mask allows no other. llguidance makes such a mask of the first of its fast-forward
        tokens, which spell the bytes that must come next. It may spell them differently after each token, so they are
        computed again after each. End tokens are left to the mask, and so are tokens that the model does not have: then
        `exists` is False.
        """
        found = list(self.forced(num_outputs))
        # The clock of the thread leaves out other work of a busy machine, but takes longer to read.
        clock = time.thread_time if self._suspect else time.perf_counter
        begin = last = clock()
        while len(found) < most and last - begin < FAST_SECONDS and not (self._ended or self.backend.is_error()):
            tokens = self.backend.compute_ff_tokens()
            if not tokens or tokens[0] in self._end_tokens or not exists(tokens[0]):
                break
            self.backend.consume_token(tokens[0])
            found.append(tokens[0])
            before, last = last, clock()
            if last - before > FAST_SECONDS and self._suspect:
                self.seconds += last - before
        self._suspect = last - begin > FAST_SECONDS
        self._found, self._taken = found, num_outputs + len(found)
        return len(found) > 1

    def rollback(self, count: int) -> None:
        """Take back the last `count` outputs, for drafts that were rejected. None of them may be an end token."""
        self._taken -= count
        self.backend.rollback(count)
