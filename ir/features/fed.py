"""The contents of a step (sequences, tokens, rows of logits), from which the step inputs are filled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ingot.ir.cache.groups import CacheGroup
from ingot.ir.errors import InternalError
from ingot.ir.features.request_view import Array, RequestView


@dataclass(frozen=True)
class PromptLogprobRows:
    """The rows of logits in a step that compute the prompt_logprobs of one sequence.

    first         the index of the first of these rows among the step's rows of logits; the others follow it
    targets       the prompt token of each row, whose log-probability the step returns
    num_logprobs  how many of the most likely tokens the step lists for each row, with their log-probabilities
    """

    first: int
    targets: Sequence[int]
    num_logprobs: int


def _unknown() -> Array:
    raise InternalError("the lengths of the sequences of a step are not known")


@dataclass
class Fed:
    """The contents of a step, from which the host fills its input tensors.

    It has B sequences, T tokens (those of the first sequence, then of the second, …), and L rows of logits to compute.
    The device row of a sequence is its row in states on the device.

    rows           i32[B], the device row of each sequence
    lengths        i32[B], the number of its tokens in the step
    starts         i32[B], the position of the first of them; -1: the device keeps it in the row's state
    tokens         i32[T], ids; -1: the last token of the row; -2 - i: draft i of the row. For a block that is denoised,
                   -1: a masked position; -2 - i: position i of the row's block
    logit_rows     i32[L], for each row of logits the index of its token among the T tokens
    sample_index   i32[B], the index of the row of logits from which the sequence's token is sampled; -1: none
    request_rows   i32[L], the device row whose sampling parameters apply to each row of logits; -1: none, as in rows of
                   logits that compute prompt_logprobs
    tables         the values that sequences request, such as temperatures: by the table's name, an array by device row
    pages          i32[rows, P], the pages of every device row
    group_pages    the same for other groups of KV caches; a group that is not in it has `pages`
    page_size      tokens of a page
    totals         returns i32[n] for the n rows of logits that sample a token, which are the first ones: the most
                   tokens that the sequence can then have, that token included
    prompt_logprobs
                   the rows of logits that compute prompt_logprobs
    sampled        the sequences that sample tokens, in the order of their rows of logits
    places         i32[B], the start position of each sequence, even if `starts` leaves it to the device; None:
                   not known
    sharing        i32[B, 6], the table of shared prefixes (`ingot.ir.features.sharing`); None: nothing is shared
    state_read     i32[B], the slot with the recurrent state (such as of convolutions) of each sequence; -1: it has none
                   yet. None: the model has no recurrent state
    state_write    i32[B], the slot to which the step writes this state
    """

    rows: Array
    lengths: Array
    starts: Array
    tokens: Array
    logit_rows: Array
    sample_index: Array
    request_rows: Array
    tables: Mapping[str, Array]
    pages: Array
    page_size: int
    totals: Callable[[], Array] = _unknown
    prompt_logprobs: Sequence[PromptLogprobRows] = ()
    sampled: Sequence[RequestView] = ()
    places: Array | None = None
    group_pages: Mapping[CacheGroup, Array] = field(default_factory=dict)
    sharing: Array | None = None
    state_read: Array | None = None
    state_write: Array | None = None

    def pages_of(self, group: CacheGroup) -> Array:
        """Return i32[rows, P]: the pages of every device row (row of a running sequence) in a group of KV caches."""
        return self.group_pages.get(group, self.pages)

    def drop_requests(self) -> None:
        """Drop all references to requests, so that they can be freed; keep the arrays."""
        self.totals, self.prompt_logprobs, self.sampled = _unknown, (), ()

    @cached_property
    def ends(self) -> Array:
        """Return i32[B]: for each sequence, the index after its last token among the step's tokens."""
        return np.cumsum(self.lengths, dtype=np.int32)

    @cached_property
    def seqs(self) -> Array:
        """Return i32[T]: for each token, the index of its sequence in the step."""
        return np.repeat(np.arange(len(self.rows), dtype=np.int32), self.lengths)

    @cached_property
    def has_idle_rows(self) -> bool:
        """Return whether the step has a row of logits that no request's sampling parameters apply to."""
        return bool((self.request_rows < 0).any())

    @property
    def known_places(self) -> Array:
        """Return i32[B]: the start position of each sequence. Raises InternalError if only the device knows them."""
        if self.places is None:
            raise InternalError("only the device knows the positions of this step")
        return self.places

    @cached_property
    def positions(self) -> Array:
        """Return i32[T]: the position of each token. Raises InternalError if only the device knows positions."""
        begins = self.known_places - (self.ends - self.lengths)
        found: Array = begins[self.seqs] + np.arange(len(self.tokens), dtype=np.int32)
        return found
