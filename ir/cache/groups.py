"""Groups of caches: what lives as long lies in pages of the same numbers.

A group is named by its lifetime. `full` keeps every token as long as its sequence runs. `window_N` and `chunked_N`
serve attention by the masks of these names (`ingot.ir.masks`): a page that no later token reads is given back. Each
group has a pool, a page table and slots of its own, so one sequence holds pages of each.

Page 0 of a group that gives pages back is never handed out. It stands in page tables for what was given back, and its
zeros are masked like every position that a query does not see.
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
    """`lifetime`: a mask by which no query sees what the group has given back; `causal` where it keeps every token."""

    lifetime: Mask = CAUSAL

    @staticmethod
    def named(name: str) -> "CacheGroup":
        """The group of a state by the name that its type says; what names no mask that forgets keeps every token."""
        try:
            return CacheGroup.of(Mask.named(name))
        except VerifyError:
            return FULL

    @staticmethod
    def of(mask: Mask) -> "CacheGroup":
        """The group of caches that attention by a mask reads."""
        return CacheGroup(mask) if mask.forgets else FULL

    @property
    def forgets(self) -> bool:
        """Whether it gives pages back before their sequence ends."""
        return self.lifetime.forgets

    @property
    def name(self) -> str:
        return self.lifetime.name if self.forgets else _FULL

    @property
    def page_table(self) -> str:
        """The step input with the pages of each sequence."""
        return f"{_TABLE}_{self.name}" if self.forgets else _TABLE

    @property
    def slots(self) -> str:
        """The step input that says where each token fed is written."""
        return f"{_SLOTS}_{self.name}" if self.forgets else _SLOTS

    @property
    def reserved(self) -> int:
        """Pages of its pool that are never handed out."""
        return int(self.forgets)

    def held(self, pages: Iterable[int]) -> list[int]:
        """Of the pages of a sequence those that it holds: not what stands for those that it gave back."""
        return [page for page in pages if page >= self.reserved]

    def first_page(self, position: int, page_size: int) -> int:
        """The first page that a query at `position` or a later one reads."""
        return max(0, self.lifetime.first(position)) // page_size

    def pages_between_steps(self, num_tokens: int, page_size: int) -> int:
        """Pages that a sequence of `num_tokens` tokens holds at most while no step feeds several of them."""
        pages = -(-num_tokens // page_size)
        if not self.forgets:
            return pages
        # Where what is held begins within its page: anywhere, or where a chunk can begin.
        size = self.lifetime.size
        latest = page_size - (1 if self.lifetime.kind == "window" else math.gcd(size, page_size))
        return min(pages, -(-(latest + size) // page_size))

    def pages_read_at_once(self, num_tokens: int, page_size: int) -> int:
        """Most pages of a piece of a prompt of so many tokens that no later step reads, nor a sequence that goes on
        from the last page boundary before the end of the piece. Several pieces have no more than one of all their
        tokens."""
        if not self.forgets:
            return 0
        kept = self.lifetime.size if self.lifetime.kind == "window" else 1  # a chunk may begin with the last token
        return max(0, num_tokens - kept) // page_size


FULL = CacheGroup()


def ordered(groups: Iterable[CacheGroup]) -> list[CacheGroup]:
    """Each group once: the one that keeps every token first, then by the size of what they keep."""
    return sorted(set(groups), key=lambda group: (group.forgets, group.lifetime.size, group.name))


def group_of_input(name: str) -> CacheGroup | None:
    """The group whose page table or slots the step input `name` holds; None for any other input."""
    for kind in (_TABLE, _SLOTS):
        if name == kind:
            return FULL
        if name.startswith(f"{kind}_") and (group := CacheGroup.named(name.removeprefix(f"{kind}_"))).forgets:
            return group
    return None


def table_groups(inputs: Iterable[str]) -> list[CacheGroup]:
    """The groups whose page tables are among these step inputs, in order."""
    found = [group for name in inputs if (group := group_of_input(name)) is not None and name == group.page_table]
    return ordered(found)
