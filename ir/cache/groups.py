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
    """A group of KV caches that keep the same tokens, and so share a pool of pages and a page table.

    `lifetime` is the attention mask that decides which tokens are kept. With a window mask, a page is freed once no
    later query can see its tokens. `causal` keeps every token.
    """

    lifetime: Mask = CAUSAL

    @staticmethod
    def named(name: str) -> "CacheGroup":
        """Return the cache group with this name, such as "window_1024" or "chunked_256".

        Any other name, such as "full", means the group FULL, which keeps every token.
        """
        try:
            return CacheGroup.of(Mask.named(name))
        except VerifyError:
            return FULL

    @staticmethod
    def of(mask: Mask) -> "CacheGroup":
        """Return the group of the KV caches that attention with this mask reads.

        It is FULL, which keeps every token, unless the mask is a window or chunks.
        """
        return CacheGroup(mask) if mask.forgets else FULL

    @property
    def forgets(self) -> bool:
        """Return whether pages are freed while their sequence still runs: for window and chunked attention."""
        return self.lifetime.forgets

    @property
    def name(self) -> str:
        return self.lifetime.name if self.forgets else _FULL

    @property
    def page_table(self) -> str:
        """Return the name of the step input that holds the page table of the group."""
        return f"{_TABLE}_{self.name}" if self.forgets else _TABLE

    @property
    def slots(self) -> str:
        """Return the name of the step input with the cache slots (page * page size + offset) of the step's tokens.

        Each cache group has an input of its own.
        """
        return f"{_SLOTS}_{self.name}" if self.forgets else _SLOTS

    @property
    def reserved(self) -> int:
        """Return how many pages at the start of the group's pool are never allocated: 1 if it frees pages, else 0.

        Page tables of such a group contain page 0 in place of a freed page.
        """
        return int(self.forgets)

    def held(self, pages: Iterable[int]) -> list[int]:
        """Return the page numbers in `pages`, the list of a sequence, without those of freed pages.

        A group that frees pages has page 0 in place of each of them.
        """
        return [page for page in pages if page >= self.reserved]

    def first_page(self, position: int, page_size: int) -> int:
        """Return the index, in a sequence's list of pages, of the first page that queries from `position` on read."""
        return max(0, self.lifetime.first(position)) // page_size

    def pages_between_steps(self, num_tokens: int, page_size: int) -> int:
        """Return the most pages that a sequence of `num_tokens` tokens holds between steps and in decode steps.

        A window group frees earlier pages. During a step with a prompt chunk a sequence holds more.
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
        """Return the most pages that a step fills and no later step reads, for a prompt chunk of `num_tokens` tokens.

        Example: after a chunk of 4096 tokens, a window of 1024 needs only the last pages. Pages that a sequence needs
        to resume from the chunk's last page boundary do not count. For several chunks in one step, pass the sum of
        their tokens: this bounds the sum of their pages.
        """
        if not self.forgets:
            return 0
        kept = self.lifetime.size if self.lifetime.kind == "window" else 1  # a chunk may begin at its end
        return max(0, num_tokens - kept) // page_size


FULL = CacheGroup()


def ordered(groups: Iterable[CacheGroup]) -> list[CacheGroup]:
    """Return the cache groups without duplicates: FULL, which keeps all tokens, then by the number of tokens kept."""
    return sorted(set(groups), key=lambda group: (group.forgets, group.lifetime.size, group.name))


def group_of_input(name: str) -> CacheGroup | None:
    """Return the cache group for which the step input `name` is the page table or the slots.

    None for any other input.
    """
    for kind in (_TABLE, _SLOTS):
        if name == kind:
            return FULL
        if name.startswith(f"{kind}_") and (group := CacheGroup.named(name.removeprefix(f"{kind}_"))).forgets:
            return group
    return None


def table_groups(inputs: Iterable[str]) -> list[CacheGroup]:
    """Return the cache groups that have a page table among the step inputs with these names.

    The group FULL, which keeps every token, comes first.
    """
    found = [group for name in inputs if (group := group_of_input(name)) is not None and name == group.page_table]
    return ordered(found)
