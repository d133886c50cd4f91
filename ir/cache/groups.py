"""Cache groups: KV caches that keep the same tokens use the same page numbers.

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
    """A KV cache group: caches that keep the same tokens. They share a pool of pages and a page table.

    `lifetime` is the attention mask that decides how long a token is kept. With a window or chunks, a page is freed
    when no later query can see its tokens. With `causal`, all tokens are kept.
    """

    lifetime: Mask = CAUSAL

    @staticmethod
    def named(name: str) -> "CacheGroup":
        """Return the KV cache group of this name, such as "window_1024" or "chunked_256".

        Any other name, such as "full", means the group FULL, which keeps all tokens.
        """
        try:
            return CacheGroup.of(Mask.named(name))
        except VerifyError:
            return FULL

    @staticmethod
    def of(mask: Mask) -> "CacheGroup":
        """Return the KV cache group for attention with this mask.

        For a window or chunks it is a group that frees pages. For other masks it is FULL, which keeps all tokens.
        """
        return CacheGroup(mask) if mask.forgets else FULL

    @property
    def forgets(self) -> bool:
        """Return whether the group frees pages of a sequence that still runs, as with windows and chunks."""
        return self.lifetime.forgets

    @property
    def name(self) -> str:
        return self.lifetime.name if self.forgets else _FULL

    @property
    def page_table(self) -> str:
        """Return the name of the step input with the group's page table, such as "page_table_window_1024"."""
        return f"{_TABLE}_{self.name}" if self.forgets else _TABLE

    @property
    def slots(self) -> str:
        """Return the name of the step input with the group's cache slots, such as "slots_window_1024".

        A cache slot is the place of a token in the caches: page * page size + offset.
        """
        return f"{_SLOTS}_{self.name}" if self.forgets else _SLOTS

    @property
    def reserved(self) -> int:
        """Return how many pages at the start of the group's pool are never allocated.

        A group that frees pages has one: in page tables, page 0 stands for freed pages. Other groups have none.
        """
        return int(self.forgets)

    def held(self, pages: Iterable[int]) -> list[int]:
        """Return the page numbers in a sequence's list `pages`, without freed pages.

        In a group that frees pages, page 0 stands for each freed page.
        """
        return [page for page in pages if page >= self.reserved]

    def first_page(self, position: int, page_size: int) -> int:
        """Return the first page that queries at `position` and later read, as an index into a sequence's pages."""
        return max(0, self.lifetime.first(position)) // page_size

    def pages_between_steps(self, num_tokens: int, page_size: int) -> int:
        """Return the most pages that a sequence of `num_tokens` tokens holds between steps, and in decode steps.

        In a step with a prompt chunk, a sequence may hold more pages.
        """
        pages = -(-num_tokens // page_size)
        if not self.forgets:
            return pages
        # The greatest offset, within its page, of the first position that is kept. A window may begin at any offset,
        # chunks only at multiples of their size.
        size = self.lifetime.size
        latest = page_size - (1 if self.lifetime.kind == "window" else math.gcd(size, page_size))
        return min(pages, -(-(latest + size) // page_size))

    def pages_read_at_once(self, num_tokens: int, page_size: int) -> int:
        """Return the most pages that a prompt chunk of `num_tokens` tokens fills and no later step reads.

        Example: after a chunk of 4096 tokens, a window of 1024 needs only the last pages. Pages that are needed to
        resume the sequence from the chunk's last page boundary do not count. For several chunks in one step, pass the
        sum of their tokens. The result is then a limit for the sum of their pages.
        """
        if not self.forgets:
            return 0
        kept = self.lifetime.size if self.lifetime.kind == "window" else 1  # a chunk may begin at its end
        return max(0, num_tokens - kept) // page_size


FULL = CacheGroup()


def ordered(groups: Iterable[CacheGroup]) -> list[CacheGroup]:
    """Sort KV cache groups by how many tokens they keep, without duplicates.

    FULL, which keeps all tokens, comes first. Then small windows come before large ones.
    """
    return sorted(set(groups), key=lambda group: (group.forgets, group.lifetime.size, group.name))


def group_of_input(name: str) -> CacheGroup | None:
    """Return the KV cache group to which the step input `name` belongs; None if it belongs to none.

    It belongs to a group if it is the group's page table, or the cache slots of the step's tokens in the group.
    """
    for kind in (_TABLE, _SLOTS):
        if name == kind:
            return FULL
        if name.startswith(f"{kind}_") and (group := CacheGroup.named(name.removeprefix(f"{kind}_"))).forgets:
            return group
    return None


def table_groups(inputs: Iterable[str]) -> list[CacheGroup]:
    """Return the KV cache groups that have a page table among the step inputs `inputs`.

    The group FULL, which keeps all tokens, comes first.
    """
    found = [group for name in inputs if (group := group_of_input(name)) is not None and name == group.page_table]
    return ordered(found)
