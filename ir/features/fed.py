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
    """The rows of logits in a step from which the prompt_logprobs of one sequence are computed.

    first         the index of the first of these rows; the next rows follow it
    targets       the prompt token of each row; the step returns its log-probability
    num_logprobs  how many of the most likely tokens the step returns for each row, besides the prompt token
    """

    first: int
    targets: Sequence[int]
    num_logprobs: int


def _unknown() -> Array:
    raise InternalError("the lengths of the sequences of a step are not known")


@dataclass
class Fed:
    """The contents of a step, from which the host fills the step's input tensors.

    A step has B sequences, T tokens and L rows of logits. The tokens of the first sequence come first, then those of
    the second, and so on. A sequence's device row is its row in states on the device.

    rows           i32[B], the device row of each sequence
    lengths        i32[B], its number of tokens in the step
    starts         i32[B], the position of its first token; -1: the device has it in a state
    tokens         i32[T], ids; -1: the last sampled token; -2 - i: draft i of the sequence; in a model that denoises
                   blocks, -1 is a masked position and -2 - i is position i of the sequence's block
    logit_rows     i32[L], the token index of each row of logits
    sample_index   i32[B], the row of logits from which the sequence's token is sampled; -1: none
    request_rows   i32[L], the device row with the sampling parameters of each row of logits; -1: none, as for
                   prompt_logprobs
    tables         request values such as temperatures: by the table's name, an array indexed by device row
    pages          i32[rows, P], the pages of each device row, for all KV cache groups that `group_pages` lacks
    group_pages    the pages of each device row, by KV cache group
    page_size      tokens of a page
    totals         a function that returns i32[n] for the first n rows of logits, which sample a token: the most tokens
                   that each row's sequence can have with this token
    prompt_logprobs
                   the rows of logits that compute prompt_logprobs
    sampled        the sequences that sample tokens, in the order of their rows of logits
    places         i32[B], the position of each sequence's first token, also where `starts` is -1; None: not known
    sharing        i32[B, 6], the table of shared prefixes (`ingot.ir.features.sharing`); None: nothing is shared
    state_read     i32[B], the slot from which the step reads a sequence's recurrent state (such as of convolutions);
                   -1: it has none yet; None: the model has no recurrent state
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
        """Return i32[rows, P]: the pages of each device row (row of a running sequence) in a KV cache group."""
        return self.group_pages.get(group, self.pages)

    def drop_requests(self) -> None:
        """Drop all references to requests, so that their memory can be freed. The arrays stay."""
        self.totals, self.prompt_logprobs, self.sampled = _unknown, (), ()

    @cached_property
    def ends(self) -> Array:
        """Return i32[B]: for each sequence, one more than the index of its last token among the step's tokens."""
        return np.cumsum(self.lengths, dtype=np.int32)

    @cached_property
    def seqs(self) -> Array:
        """Return i32[T]: the index of each token's sequence in the step."""
        return np.repeat(np.arange(len(self.rows), dtype=np.int32), self.lengths)

    @cached_property
    def has_idle_rows(self) -> bool:
        """Return whether there is a row of logits without sampling parameters (-1 in `request_rows`)."""
        return bool((self.request_rows < 0).any())

    @property
    def known_places(self) -> Array:
        """Return i32[B]: the position of each sequence's first token in the step.

        Raises InternalError if only the device knows these positions.
        """
        if self.places is None:
            raise InternalError("only the device knows the positions of this step")
        return self.places

    @cached_property
    def positions(self) -> Array:
        """Return i32[T]: the position of each token in its sequence.

        Raises InternalError if only the device knows the positions.
        """
        begins = self.known_places - (self.ends - self.lengths)
        found: Array = begins[self.seqs] + np.arange(len(self.tokens), dtype=np.int32)
        return found
