"""Groups of caches: what lives as long lies in pages of the same numbers.

A group is named by its lifetime. `full` keeps every token as long as its sequence runs. `window_N` serves attention
that reads the last N tokens: a page that no later token reads is given back. Each group has a pool, a page table and
slots of its own, so one sequence holds pages of each.

Page 0 of a group with a window is never handed out. It stands in page tables for what was given back, and its zeros are
masked like every position before the window.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_FULL = "full"
_WINDOW = re.compile(r"window_([1-9]\d{0,9})")
_TABLE, _SLOTS = "page_table", "slots"


@dataclass(frozen=True)
class CacheGroup:
    """`window`: tokens that a query reads, its own among them; None: all."""

    window: int | None = None

    @staticmethod
    def named(name: str) -> "CacheGroup":
        """The group of a state by the name that its type says; what is no window keeps every token."""
        found = _WINDOW.fullmatch(name)
        return CacheGroup(int(found[1])) if found else FULL

    @property
    def name(self) -> str:
        return _FULL if self.window is None else f"window_{self.window}"

    @property
    def page_table(self) -> str:
        """The step input with the pages of each sequence."""
        return _TABLE if self.window is None else f"{_TABLE}_{self.name}"

    @property
    def slots(self) -> str:
        """The step input that says where each token fed is written."""
        return _SLOTS if self.window is None else f"{_SLOTS}_{self.name}"

    @property
    def reserved(self) -> int:
        """Pages of its pool that are never handed out."""
        return 0 if self.window is None else 1

    def held(self, pages: Iterable[int]) -> list[int]:
        """Of the pages of a sequence those that it holds: not what stands for those that it gave back."""
        return [page for page in pages if page >= self.reserved]

    def first_page(self, position: int, page_size: int) -> int:
        """The first page that a query at `position` or a later one reads."""
        return 0 if self.window is None else max(0, position + 1 - self.window) // page_size

    def pages_between_steps(self, num_tokens: int, page_size: int) -> int:
        """Pages that a sequence of `num_tokens` tokens holds at most while no step feeds several of them."""
        pages = -(-num_tokens // page_size)
        # A window that begins within a page reads one page more than its tokens fill.
        return pages if self.window is None else min(pages, -(-self.window // page_size) + 1)


FULL = CacheGroup()


def ordered(groups: Iterable[CacheGroup]) -> list[CacheGroup]:
    """Each group once: the one that keeps every token first, then by window."""
    return sorted(set(groups), key=lambda group: group.window or 0)


def group_of_input(name: str) -> CacheGroup | None:
    """The group whose page table or slots the step input `name` holds; None for any other input."""
    for kind in (_TABLE, _SLOTS):
        if name == kind:
            return FULL
        found = _WINDOW.fullmatch(name.removeprefix(f"{kind}_"))
        if found and name == f"{kind}_{found[0]}":
            return CacheGroup(int(found[1]))
    return None


def table_groups(inputs: Iterable[str]) -> list[CacheGroup]:
    """The groups whose page tables are among these step inputs, in order."""
    found = [group for name in inputs if (group := group_of_input(name)) is not None and name == group.page_table]
    return ordered(found)
