"""The KV pages of each sequence in each cache group: allocated for its tokens, freed when no later token reads them.

A group that keeps every token allocates the pages of the whole prompt at admission, so an admitted prompt can be
computed. A group with a window allocates pages for each chunk of the prompt, and frees pages that no later token reads.
Page 0 then replaces them. Per-sequence states have slots (`ingot.runtime.state_slots`), allocated and freed with the
pages.

Most pages of a long chunk are read only by the chunk's own step. If the pool is short, these are scratch pages
(`ingot.ir.cache.scratch_pages`): they are in the page table of that step, and the sequence never holds them.
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
_PLENTY = 1 << 62  # tokens or pages without a bound


@dataclass(frozen=True)
class Found:
    """The cached prefix from which a waiting request can resume: the first `count` pages of its tokens.

    pages    for each cache group (KV caches with a common page table) the `count` pages; 0 in place of a page that no
             later token reads, because of a sliding window
    slot     in models with per-sequence states (Mamba): the slot of the state after the prefix; None for other models
    branch   how many first pages are cached in all, including pages after `count`, where no state is kept
    """

    count: int
    pages: tuple[list[int], ...]
    slot: int | None = None
    branch: int = 0

    @staticmethod
    def nothing(groups: int) -> "Found":
        return Found(0, tuple([] for _ in range(groups)))


class SequencePages:
    """Allocates KV pages to sequences. `Request.pages` has a list of pages for each cache group (KV caches with a
    common page table), in the order of `groups`.

    pools    the page pool of each cache group; empty for a model without KV caches, whose sequences need no pages
    tables   the page tables of running sequences, which are updated too
    slots    the state slots of a model with per-sequence states, such as Mamba; None for other models
    blocks   the block sizes that attention masks or block diffusion require
    """

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
        # Pages that later steps may read besides those of a window, because a chunk need not end with a granule.
        unit = math.lcm(max(blocks.granule, blocks.denoised), page_size) // page_size
        self._beyond = unit - 1 + self.pages_for(blocks.denoised)
        self._scratch: list[tuple[int, Request, range]] = []  # (group, request, places) in the step being built
        self._fed_with_scratch: set[Request] = set()  # by the step built last
        self._num_sequences = 0  # that hold pages
        self.windows = [(place, group, pool) for place, (group, pool) in enumerate(pools.items()) if group.forgets]

    @property
    def num_free(self) -> int:
        """The number of pages that can be allocated now, in the cache group (KV caches with a common page table) that
        has fewest."""
        return min([pool.num_free for pool in self.pools], default=_PLENTY)

    @property
    def num_held(self) -> int:
        return sum(pool.num_held for pool in self.pools)

    @property
    def num_releasing(self) -> int:
        return sum(pool.num_releasing for pool in self.pools)

    @property
    def occupied(self) -> tuple[int, int, int, int]:
        """Four numbers of pages: held by sequences, waiting for steps in flight before they become free, found by the
        prefix cache, and all pages."""
        kept = sum(pool.num_kept for pool in self.pools)
        return self.num_held, self.num_releasing, kept, sum(pool.capacity for pool in self.pools)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages of one cache are needed for `num_tokens` tokens; the last page may be partly filled."""
        return -(-num_tokens // self.page_size)

    def tokens_held(self, request: Request) -> int:
        """Return for how many tokens the sequence has pages in every cache group (KV caches with a common page table).

        This is the number in the last group: groups with a sliding window come last, and never have more pages than the
        groups that keep all tokens.
        """
        return len(request.pages[-1]) * self.page_size if request.pages else _PLENTY

    def tokens_within(self, request: Request, num_tokens: int) -> int:
        """Return how many of a sequence's first `num_tokens` tokens the step being built can process with the available
        pages: the sequence's own pages, free pages, and scratch pages (which only one step uses)."""
        for place, pool in self.numbered:
            most = len(request.pages[place]) + pool.num_free
            if self.pages_for(num_tokens) > most:
                # This must hold for every earlier end too: others may shorten the chunk.
                left = self.pages_for(request.num_computed) + self._survive(self.groups[place])
                if left > most and request in self._fed_with_scratch and left <= most + pool.num_releasing:
                    return request.num_computed  # wait: a long chunk fits once the step in flight retires
                if left > most or not self._unread(request, place, num_tokens):
                    num_tokens = most * self.page_size
        return num_tokens

    def _survive(self, group: CacheGroup) -> int:
        """Return the most pages of one prompt chunk, of any length, that later steps may read in a cache group (KV
        caches with a common page table). With a sliding window, these are few."""
        return group.pages_between_steps(_PLENTY, self.page_size) + self._beyond

    def _unread(self, request: Request, place: int, num_tokens: int) -> int:
        """Return how many pages of a long prompt chunk, which ends at token `num_tokens`, only the step that writes
        them reads, because of a sliding window. These can be scratch pages, which the next step reuses.

        Pages that a sequence needs to resume at the last page boundary are not counted, so that the prefix cache can
        keep them. `place` is the index of the cache group (KV caches with a common page table).
        """
        if not self.pools[place].num_scratch:
            return 0
        known = min(num_tokens, request.num_known)
        boundary = self._blocks.shared((known - 1) // self.page_size, self.page_size) * self.page_size
        first = self.groups[place].first_page(boundary, self.page_size)
        return max(0, first - self.pages_for(request.num_computed))

    def admits(self, request: Request, found: Found, num_tokens: int, at_once: int) -> bool:
        """Return whether enough pages are free to admit a waiting request, and in a model with per-sequence states
        (Mamba) also a state slot.

        found        the request's cached prefix, whose pages it shares
        num_tokens   the number of tokens for which it must have room before it decodes
        at_once      how many of these tokens a step must process together, at least
        """
        for group, pool, shared in zip(self.groups, self.pools, found.pages, strict=True):
            own = group.held(shared)
            if self.least(group, num_tokens, at_once) - len(own) > pool.num_free_without(own):
                return False
        return self.slots is None or self.slots.admits

    def least(self, group: CacheGroup, num_tokens: int, at_once: int) -> int:
        """Return the fewest pages of a cache group (KV caches with a common page table) with which a sequence can reach
        `num_tokens` tokens, if each step processes `at_once` of them. A sliding window needs fewer pages than tokens
        fill."""
        between = group.pages_between_steps(num_tokens, self.page_size)
        fed = self.pages_for(at_once - 1)
        if self.pools[self.groups.index(group)].num_scratch:
            fed = min(fed, self._survive(group))
        return min(self.pages_for(num_tokens), between + fed)

    def begin(self, request: Request, found: Found) -> None:
        """Give a request that has just been admitted the pages of its cached prefix `found`, and in a model with
        per-sequence states (Mamba) a state slot."""
        for place, (group, pool, pages) in enumerate(zip(self.groups, self.pools, found.pages, strict=True)):
            pool.share(group.held(pages))
            self._tables.add_pages(place, request.row, pages, 0)
            request.pages[place] += pages
        request.given_back = [0] * len(self.groups)
        self._num_sequences += 1
        if self.slots is not None:
            self.slots.begin(request, found.slot)

    def take(self, request: Request, num_tokens: int, *, keeping: bool = False, feeding: bool = False) -> None:
        """Allocate the pages that a sequence lacks for its first `num_tokens` tokens, in every cache group (KV caches
        with a common page table).

        keeping   only in groups that keep every token, not in those with a sliding window
        feeding   the step being built processes the sequence up to token `num_tokens`. Pages that no later step reads
                  may then be scratch pages, which the next step reuses

        Scratch pages are used only if the pool would keep less than one free page per sequence. Pool pages are better
        for the prefix cache, but decoding sequences need some before this step returns its pages.
        """
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
        """Put scratch pages, which the next step reuses, into a sequence's page table, for positions that only the step
        being built reads. Pages that the sequence already has for these positions are moved to later ones.

        `place` is the index of the cache group (KV caches with a common page table). Return how many pages the sequence
        still lacks for its first `num_tokens` tokens.
        """
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
        """Return the index after a sequence's last scratch page, in its list of pages in the step being built; 0 if it
        has no scratch page. (A scratch page is used by one step only.)"""
        return max((places.stop for _, one, places in self._scratch if one is request), default=0)

    def end_step(self) -> None:
        """Take all scratch pages, which only the step being built uses, out of the page tables; page 0 replaces them.
        Call it once the step's inputs are built."""
        if not self.windows:
            return
        for place, request, places in self._scratch:
            self._tables.clear_pages(place, request.row, places)
        self._fed_with_scratch = {request for _, request, _ in self._scratch}
        self._scratch.clear()
        for _, _, pool in self.windows:
            pool.end_scratch()

    def withdraw(self, request: Request, busy_until: int | None) -> None:
        """Undo the allocations of a sequence for a step that did not run. Do nothing if it had no scratch pages (pages
        that only that step uses) in it.

        In cache groups with a sliding window, the step's pages are freed, because the next step may split the prompt
        differently. They can be allocated again once step number `busy_until` is complete; None: at once.
        """
        count = self.pages_for(request.num_computed)
        if any(0 in request.pages[place][count:] for place, _, _ in self.windows):
            for place, group, pool in self.windows:
                pool.free(group.held(request.pages[place][count:]), busy_until)
                del request.pages[place][count:]
                self._tables.cut_pages(place, request.row, count)

    def short(self, request: Request, num_tokens: int) -> list[tuple[PagePool, int]]:
        """Return (page pool, number of missing pages) of each cache group (KV caches with a common page table) in which
        a sequence lacks pages for its first `num_tokens` tokens."""
        needed = -(-num_tokens // self.page_size)
        return [
            (pool, needed - held)
            for held, pool in zip(map(len, request.pages), self.pools, strict=True)
            if held < needed
        ]

    def give_back(self, request: Request, position: int, busy_until: int | None) -> None:
        """Free the pages of a sequence that its sliding windows have passed: no token at or after `position` reads
        them. They can be allocated again once step number `busy_until` is complete; None: at once."""
        for place, group, pool in self.windows:
            held, end = request.pages[place], group.first_page(position, self.page_size)
            if request.cached.hashes is not None:
                end = min(end, request.cached.num_kept)  # pages must be registered before they are freed
            begin = request.given_back[place]
            if begin < end:
                # Reversed: the pool evicts the last freed page first, and sequences resume at late pages.
                pool.free(group.held(held[begin:end])[::-1], busy_until)
                held[begin:end] = [0] * (end - begin)
                self._tables.clear_pages(place, request.row, range(begin, end))
                request.given_back[place] = end

    def exchange(self, request: Request, others: Sequence[Iterable[tuple[int, int]]], busy_until: int | None) -> None:
        """Replace pages of a request by other pages of equal content, and free the old ones. `others` has, for each
        cache group (KV caches with a common page table), pairs (index among the request's pages, new page).

        The old pages can be allocated again once step number `busy_until` is complete; None: at once.
        """
        for place, (pool, changes) in enumerate(zip(self.pools, others, strict=True)):
            held = request.pages[place]
            given = [held[one] for one, _ in changes]
            if given:
                pool.share([page for _, page in changes])
                pool.free(given, busy_until)
                for one, page in changes:
                    held[one] = page
                    self._tables.set_page(place, request.row, one, page)

    def release(self, request: Request, busy_until: int | None, *, forget: bool = False) -> None:
        """Free all KV pages of a sequence that stops running, and its state slots in models with per-sequence states
        (Mamba). They can be allocated again once step number `busy_until` is complete; None: at once.

        `forget`: the prefix cache must no longer find the pages and states.
        """
        for group, pool, held in zip(self.groups, self.pools, request.pages, strict=True):
            own = group.held(held)
            if forget:
                pool.forget(own)
            pool.free(own, busy_until)
        request.pages = [[] for _ in self.groups]
        self._fed_with_scratch.discard(request)
        self._num_sequences -= 1
        if self.slots is not None:
            self.slots.release(request, busy_until, forget=forget)

    def retire(self, step: int) -> None:
        for pool in self._allocators:
            pool.retire(step)

    def forget_all(self) -> None:
        for pool in self._allocators:
            pool.forget_all()


def pools_of(pages: Mapping[str, int], page_size: int, scratch: Mapping[str, range]) -> Pools:
    """Return a page pool for each cache group (KV caches with a common page table). The group that keeps every token,
    if there is one, comes before those with a sliding window.

    pages     the number of pages of each group, by its name
    scratch   the page numbers of the group's scratch pages (pages that only one step uses), by its name
    """
    return {
        group: PagePool(
            pages[group.name], page_size, reserved=group.reserved, scratch=scratch.get(group.name, range(0))
        )
        for group in ordered(map(CacheGroup.named, pages))
    }


def one_pool(pool: PagePool) -> Pools:
    """Return the page pools of a model with only one cache group, which keeps every token: `pool` alone."""
    return {FULL: pool}
