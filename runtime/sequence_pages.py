"""The pages that sequences hold in each group of caches: taken for what they feed, given back when nothing reads them.

A group that keeps every token gives a sequence the pages of its whole prompt when it is admitted, so what was admitted
can be computed. One with a window gives the pages of a piece of the prompt when that piece is fed, and takes back those
that no later token reads; page 0 then stands in their places. States that stand once per sequence lie in slots
(`ingot.runtime.state_slots`), which come and go with the pages.

Of a long piece most pages are read by its own step alone. Where the pool is short, they are scratch pages
(`ingot.ir.cache.scratch_pages`): they stand in the page table of that step, and the sequence never holds them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ingot.ir.cache.groups import FULL, CacheGroup, ordered
from ingot.runtime.blocks import ONE_BY_ONE, Blocks
from ingot.runtime.pages import PagePool
from ingot.runtime.request import Request
from ingot.runtime.row_tables import RowTables
from ingot.runtime.state_slots import StateSlots

Pools = Mapping[CacheGroup, PagePool]
_PLENTY = 1 << 62  # tokens or pages, where nothing bounds them


@dataclass(frozen=True)
class Found:
    """What a waiting request need not compute: the first `count` pages of its tokens. `pages` has those that it then
    holds in each group, 0 in place of those that no later token reads, and `slot` holds its state after them. After
    `branch` pages, where that is more, pages are there and no slot."""

    count: int
    pages: tuple[list[int], ...]
    slot: int | None = None
    branch: int = 0

    @staticmethod
    def nothing(groups: int) -> "Found":
        return Found(0, tuple([] for _ in range(groups)))


class SequencePages:
    """The pages of `pools`, by group of caches, and what each sequence holds of them: `Request.pages` has a list for
    each group, in the order of `groups`, and `tables` the same by device row. Without a group, sequences hold no pages
    and need none. `slots`: those of a model that has states that stand once per sequence. `blocks`: those that tokens
    fall into."""

    def __init__(
        self,
        pools: Pools,
        tables: RowTables,
        page_size: int,
        slots: StateSlots | None = None,
        blocks: Blocks = ONE_BY_ONE,
    ) -> None:
        self.groups = tuple(pools)
        self.pools = tuple(pools.values())
        self.numbered = tuple(enumerate(self.pools))
        self.reserved = [group.reserved for group in self.groups]
        self.slots = slots
        self._allocators = self.pools if slots is None else (*self.pools, slots.pool)
        self.page_size = page_size
        self._tables = tables
        self._blocks = blocks
        # Pages that a piece can leave to later steps beyond those of a window: it need not end with a granule.
        unit = math.lcm(max(blocks.granule, blocks.denoised), page_size) // page_size
        self._beyond = unit - 1 + self.pages_for(blocks.denoised)
        self._scratch: list[tuple[int, Request, range]] = []  # places of sequences, by group, in the step being made
        self._fed_with_scratch: set[Request] = set()  # by the step that was made last
        self._num_sequences = 0  # that hold pages
        self.windows = [(place, group, pool) for place, (group, pool) in enumerate(pools.items()) if group.forgets]

    @property
    def num_free(self) -> int:
        """Pages of each group that can be taken now."""
        return min([pool.num_free for pool in self.pools], default=_PLENTY)

    @property
    def num_held(self) -> int:
        return sum(pool.num_held for pool in self.pools)

    @property
    def num_releasing(self) -> int:
        return sum(pool.num_releasing for pool in self.pools)

    @property
    def occupied(self) -> tuple[int, int, int, int]:
        """Pages that sequences hold, that steps in flight keep, that the prefix cache finds, and all."""
        kept = sum(pool.num_kept for pool in self.pools)
        return self.num_held, self.num_releasing, kept, sum(pool.capacity for pool in self.pools)

    def pages_for(self, num_tokens: int) -> int:
        """Pages of a group that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def tokens_held(self, request: Request) -> int:
        """For how many tokens a sequence has a place in every group. Those with a window, which come last, take pages
        together, and never before one that keeps every token."""
        return len(request.pages[-1]) * self.page_size if request.pages else _PLENTY

    def tokens_within(self, request: Request, num_tokens: int) -> int:
        """Of so many tokens how many have a place once what is free is taken, in this step at least."""
        for place, pool in self.numbered:
            most = len(request.pages[place]) + pool.num_free
            if self.pages_for(num_tokens) > most:
                # Of the end that is asked for and of every earlier one: others may cut the piece further.
                left = self.pages_for(request.num_computed) + self._survive(self.groups[place])
                if left > most and request in self._fed_with_scratch and left <= most + pool.num_releasing:
                    return request.num_computed  # once the step in flight has retired a long piece can be fed
                if left > most or not self._unread(request, place, num_tokens):
                    num_tokens = most * self.page_size
        return num_tokens

    def _survive(self, group: CacheGroup) -> int:
        """The pages of a piece of a prompt, however long, that later steps may read."""
        return group.pages_between_steps(_PLENTY, self.page_size) + self._beyond

    def _unread(self, request: Request, place: int, num_tokens: int) -> int:
        """Once a step feeds a sequence up to so many tokens: how many pages after those that are written are read in
        that step alone, and can be scratch pages. The last page boundary before the end stays a place where a sequence
        can go on: the prefix cache finds it."""
        if not self.pools[place].num_scratch:
            return 0
        known = min(num_tokens, request.num_known)
        boundary = self._blocks.shared((known - 1) // self.page_size, self.page_size) * self.page_size
        first = self.groups[place].first_page(boundary, self.page_size)
        return max(0, first - self.pages_for(request.num_computed))

    def admits(self, request: Request, found: Found, num_tokens: int, at_once: int) -> bool:
        """Whether there are pages for a request that comes to `num_tokens` tokens before it decodes, and feeds at least
        `at_once` of them together; those that were found are shared."""
        for group, pool, shared in zip(self.groups, self.pools, found.pages, strict=True):
            own = group.held(shared)
            if self.least(group, num_tokens, at_once) - len(own) > pool.num_free_beside(own):
                return False
        return self.slots is None or self.slots.admits

    def least(self, group: CacheGroup, num_tokens: int, at_once: int) -> int:
        """Pages of a group with which a sequence can come to `num_tokens` tokens, of which it feeds `at_once` at a
        time."""
        between = group.pages_between_steps(num_tokens, self.page_size)
        beside = self.pages_for(at_once - 1)
        if self.pools[self.groups.index(group)].num_scratch:
            beside = min(beside, self._survive(group))
        return min(self.pages_for(num_tokens), between + beside)

    def begin(self, request: Request, found: Found) -> None:
        """Give a request that gets its row what was found."""
        for place, (group, pool, pages) in enumerate(zip(self.groups, self.pools, found.pages, strict=True)):
            pool.share(group.held(pages))
            self._tables.add_pages(place, request.row, pages, 0)
            request.pages[place] += pages
        request.given_back = [0] * len(self.groups)
        self._num_sequences += 1
        if self.slots is not None:
            self.slots.begin(request, found.slot)

    def take(self, request: Request, num_tokens: int, *, keeping: bool = False, feeding: bool = False) -> None:
        """Give a sequence pages for so many tokens in every group; `keeping`: in those that keep every token. With
        `feeding` the step that is being made feeds up to them, so that scratch pages may stand for what no later step
        reads. They do where the pool would be left without a page for each sequence: the prefix cache finds what lies
        in its pages, and sequences that decode need some before those of this step come back."""
        count = self.pages_for(num_tokens)
        for place, pool in self.numbered:
            held = request.pages[place]
            if (more := count - len(held)) > 0 and not (keeping and self.groups[place].forgets):
                if feeding and more > pool.num_free - self._num_sequences:
                    more = self._take_scratch(request, place, num_tokens)
                pages = pool.allocate(more)
                self._tables.add_pages(place, request.row, pages, len(held))
                held += pages

    def _take_scratch(self, request: Request, place: int, num_tokens: int) -> int:
        """Put scratch pages where the step alone reads; pages that the sequence got there stand after them. Gives how
        many it lacks then."""
        held, pool, begin = request.pages[place], self.pools[place], self.pages_for(request.num_computed)
        lacking = self.pages_for(num_tokens) - len(held)
        if (unread := min(self._unread(request, place, num_tokens), lacking)) == 0:
            return lacking
        places, got = range(begin, begin + unread), held[begin:]
        held[begin:] = [*[0] * unread, *got]
        self._tables.add_pages(place, request.row, [*pool.take_scratch(unread), *got], begin)
        self._scratch.append((place, request, places))
        return lacking - unread

    def scratch_end(self, request: Request) -> int:
        """In the step that is being made, the place after the last scratch page of a sequence; 0 where it has none."""
        return max((places.stop for _, one, places in self._scratch if one is request), default=0)

    def end_step(self) -> None:
        """The inputs of the step are made: let page 0 stand where scratch pages stood."""
        if not self.windows:
            return
        for place, request, places in self._scratch:
            self._tables.clear_pages(place, request.row, places)
        self._fed_with_scratch = {request for _, request, _ in self._scratch}
        self._scratch.clear()
        for _, _, pool in self.windows:
            pool.end_scratch()

    def withdraw(self, request: Request, busy_until: int | None) -> None:
        """A step that fed a sequence did not run. Where scratch pages stood in it, the sequence gives back what it took
        for it in groups with a window: the next step may cut the prompt otherwise."""
        count = self.pages_for(request.num_computed)
        if any(0 in request.pages[place][count:] for place, _, _ in self.windows):
            for place, group, pool in self.windows:
                pool.free(group.held(request.pages[place][count:]), busy_until)
                del request.pages[place][count:]
                self._tables.cut_pages(place, request.row, count)

    def short(self, request: Request, num_tokens: int) -> list[tuple[PagePool, int]]:
        """The pools of which a sequence lacks pages for so many tokens, and how many."""
        needed = -(-num_tokens // self.page_size)
        return [
            (pool, needed - held)
            for held, pool in zip(map(len, request.pages), self.pools, strict=True)
            if held < needed
        ]

    def give_back(self, request: Request, position: int, busy_until: int | None) -> None:
        """Take from a sequence the pages that no token at `position` or after it reads."""
        for place, group, pool in self.windows:
            held, end = request.pages[place], group.first_page(position, self.page_size)
            if request.cached.hashes is not None:
                end = min(end, request.cached.num_kept)  # first it is to be found
            begin = request.given_back[place]
            if begin < end:
                # The pool gives up the last of them first, and a sequence goes on from a late place.
                pool.free(group.held(held[begin:end])[::-1], busy_until)
                held[begin:end] = [0] * (end - begin)
                self._tables.clear_pages(place, request.row, range(begin, end))
                request.given_back[place] = end

    def exchange(self, request: Request, others: Sequence[Iterable[tuple[int, int]]], busy_until: int | None) -> None:
        """Let a request hold other pages of equal content at some places of each group."""
        for place, (pool, changes) in enumerate(zip(self.pools, others, strict=True)):
            held = request.pages[place]
            given = [held[one] for one, _ in changes]
            if given:
                pool.share([page for _, page in changes])
                pool.free(given, busy_until)
                for one, page in changes:
                    held[one] = page
                    self._tables.set_page(place, request.row, one, page)

    def release(self, request: Request, busy_until: int | None, *, worthless: bool = False) -> None:
        """Take all pages from a sequence that gives up its row. `worthless`: none is to be found any more."""
        for group, pool, held in zip(self.groups, self.pools, request.pages, strict=True):
            own = group.held(held)
            if worthless:
                pool.forget(own)
            pool.free(own, busy_until)
        request.pages = [[] for _ in self.groups]
        self._fed_with_scratch.discard(request)
        self._num_sequences -= 1
        if self.slots is not None:
            self.slots.release(request, busy_until, worthless=worthless)

    def retire(self, step: int) -> None:
        for pool in self._allocators:
            pool.retire(step)

    def forget_all(self) -> None:
        for pool in self._allocators:
            pool.forget_all()


def pools_of(pages: Mapping[str, int], page_size: int, scratch: Mapping[str, range]) -> Pools:
    """A pool for each group of caches by name, the one that keeps every token first; `scratch`: the numbers of the
    scratch pages of groups that have such."""
    return {
        group: PagePool(
            pages[group.name], page_size, reserved=group.reserved, scratch=scratch.get(group.name, range(0))
        )
        for group in ordered(map(CacheGroup.named, pages))
    }


def one_pool(pool: PagePool) -> Pools:
    """The pools of a model whose caches all keep every token."""
    return {FULL: pool}
