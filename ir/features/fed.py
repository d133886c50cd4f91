"""What a step feeds, in the terms that inputs are filled from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ingot.ir.cache.groups import CacheGroup
from ingot.ir.errors import InternalError
from ingot.ir.features.asking import Array, Asking


@dataclass(frozen=True)
class Rated:
    """Rows of logits from `first` on that rate the next tokens of a prompt, `targets`, with `count` likely ones."""

    first: int
    targets: Sequence[int]
    count: int


def _unknown() -> Array:
    raise InternalError("how many tokens the sequences of a step have is not known")


@dataclass
class Fed:
    """B sequences, the tokens that each feeds, laid end to end, and the rows of logits that are asked for.

    rows           i32[B], the device row of each sequence
    lengths        i32[B], the tokens that it feeds
    starts         i32[B], the position of the first of them; -1: the device's own
    tokens         i32[T]; -1: the last token of the row; -2 - i: draft i of the row. Of a block that is denoised, -1: a
                   masked position; -2 - i: position i of the row's block
    logit_rows     i32[L], which of T
    sample_index   i32[B], the last of its rows of logits, from which a token is taken; -1: none
    asking         i32[L], the device row that says how a token is chosen there; -1: nothing is asked
    tables         what sequences ask for by device row, by the name of the table
    pages          i32[rows, P], the pages of every device row
    group_pages    the same for each group of caches; a group that is not there has `pages`
    page_size      tokens of a page
    totals         gives i32[n], for each of the first n rows of logits: tokens that its sequence then has at most
    rated          the rows of logits that rate prompts
    sampled        the sequences from whose first rows of logits tokens are taken, in their order
    places         i32[B], where each sequence stands, also where `starts` leaves it to the device; None: not known
    sharing        i32[B, 6], the table of shared prefixes (`ingot.ir.features.sharing`); None: nothing is shared
    state_read     i32[B], the slot that holds the state of each sequence; -1: it has none yet. None: no model state
                   stands once per sequence
    state_write    i32[B], the slot that the step leaves it in
    """

    rows: Array
    lengths: Array
    starts: Array
    tokens: Array
    logit_rows: Array
    sample_index: Array
    asking: Array
    tables: Mapping[str, Array]
    pages: Array
    page_size: int
    totals: Callable[[], Array] = _unknown
    rated: Sequence[Rated] = ()
    sampled: Sequence[Asking] = ()
    places: Array | None = None
    group_pages: Mapping[CacheGroup, Array] = field(default_factory=dict)
    sharing: Array | None = None
    state_read: Array | None = None
    state_write: Array | None = None

    def pages_of(self, group: CacheGroup) -> Array:
        """i32[rows, P]: the pages of every device row in a group of caches."""
        return self.group_pages.get(group, self.pages)

    def let_go(self) -> None:
        """Refer to no sequence any longer; what is kept by device row stays."""
        self.totals, self.rated, self.sampled = _unknown, (), ()

    @cached_property
    def ends(self) -> Array:
        """i32[B]: where in T each sequence ends."""
        return np.cumsum(self.lengths, dtype=np.int32)

    @cached_property
    def seqs(self) -> Array:
        """i32[T]: the sequence of each token."""
        return np.repeat(np.arange(len(self.rows), dtype=np.int32), self.lengths)

    @cached_property
    def has_idle_rows(self) -> bool:
        """Whether some row of logits is there for which no sequence asks anything."""
        return bool((self.asking < 0).any())

    @property
    def known_places(self) -> Array:
        """`places`, where they are known. Raises InternalError."""
        if self.places is None:
            raise InternalError("the positions of a step are asked for, which only the device knows")
        return self.places

    @cached_property
    def positions(self) -> Array:
        """i32[T]: the position of each token, where it is known."""
        begins = self.known_places - (self.ends - self.lengths)
        found: Array = begins[self.seqs] + np.arange(len(self.tokens), dtype=np.int32)
        return found
