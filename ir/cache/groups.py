"""Cache groups: caches whose entries have the same lifetime share page numbers.

A group is named by its lifetime. `full` keeps every token while its sequence runs. `window_N` and `chunked_N` serve
attention with the masks of these names (`ingot.ir.masks`), and free a page that no later token reads. Each group has
its own pool, page table and slots, so one sequence holds pages of each.

Page 0 of a group that frees pages is never allocated. It replaces freed pages in page tables. Its zeros are masked,
like every position that a query does not see.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ingot.ir.errors import VerifyError
from ingot.ir.masks import CAUSAL, Mask

_FULL = "full"
_TABLE, _SLOTS = "page_table", "slots"


@dataclass(frozen=True)
class CacheGroup:
    """A cache group. `lifetime` is a mask with which no query sees a freed page; `causal` if the group keeps every
    token."""

    lifetime: Mask = CAUSAL

    @staticmethod
    def named(name: str) -> "CacheGroup":
        """Return the group of this name; FULL unless the name is that of a mask that forgets."""
        try:
            return CacheGroup.of(Mask.named(name))
        except VerifyError:
            return FULL

    @staticmethod
    def of(mask: Mask) -> "CacheGroup":
        """Return the group of the caches that attention with this mask reads."""
        return CacheGroup(mask) if mask.forgets else FULL

    @property
    def forgets(self) -> bool:
        """Return whether the group frees pages before their sequence ends."""
        return self.lifetime.forgets

    @property
    def name(self) -> str:
        return self.lifetime.name if self.forgets else _FULL

    @property
    def page_table(self) -> str:
        """Return the name of the step input with the pages of each sequence."""
        return f"{_TABLE}_{self.name}" if self.forgets else _TABLE

    @property
    def slots(self) -> str:
        """Return the name of the step input with the slot of each token."""
        return f"{_SLOTS}_{self.name}" if self.forgets else _SLOTS

    @property
    def reserved(self) -> int:
        """Return the number of pages of its pool that are never allocated."""
        return int(self.forgets)

    def held(self, pages: Iterable[int]) -> list[int]:
        """Return the pages of a sequence without the placeholders of freed ones."""
        return [page for page in pages if page >= self.reserved]

    def first_page(self, position: int, page_size: int) -> int:
        """Return the index of the first page that a query at `position` or later reads."""
        return max(0, self.lifetime.first(position)) // page_size

    def pages_between_steps(self, num_tokens: int, page_size: int) -> int:
        """Return the most pages that a sequence of `num_tokens` tokens holds while no step holds several of its
        tokens."""
        pages = -(-num_tokens // page_size)
        if not self.forgets:
            return pages
        # The greatest offset of the first held position in its page: any for a window, a chunk's start for chunks.
        size = self.lifetime.size
        latest = page_size - (1 if self.lifetime.kind == "window" else math.gcd(size, page_size))
        return min(pages, -(-(latest + size) // page_size))

    def pages_read_at_once(self, num_tokens: int, page_size: int) -> int:
        """Return the most pages in a prompt chunk of `num_tokens` tokens that nothing reads later. Readers are later
        steps, and sequences that resume from the last page boundary before the chunk's end. Several chunks have no more
        than one chunk of all their tokens."""
        if not self.forgets:
            return 0
        kept = self.lifetime.size if self.lifetime.kind == "window" else 1  # a chunk may begin there
        return max(0, num_tokens - kept) // page_size


FULL = CacheGroup()


def ordered(groups: Iterable[CacheGroup]) -> list[CacheGroup]:
    """Return each group once: FULL first, then by the number of tokens that they keep."""
    return sorted(set(groups), key=lambda group: (group.forgets, group.lifetime.size, group.name))


def group_of_input(name: str) -> CacheGroup | None:
    """Return the group of the page table or slots in the step input `name`; None for any other input."""
    for kind in (_TABLE, _SLOTS):
        if name == kind:
            return FULL
        if name.startswith(f"{kind}_") and (group := CacheGroup.named(name.removeprefix(f"{kind}_"))).forgets:
            return group
    return None


def table_groups(inputs: Iterable[str]) -> list[CacheGroup]:
    """Return the groups with a page table among these step inputs, in order."""
    found = [group for name in inputs if (group := group_of_input(name)) is not None and name == group.page_table]
    return ordered(found)
