"""The KV pages of each sequence in each cache group: allocated for its tokens, freed when no later token reads them.

A group that keeps every token allocates the pages of the whole prompt at admission, so an admitted prompt can be
computed. A group with a window allocates pages for each chunk of the prompt, and frees pages that no later token reads.
Page 0 then replaces them. Per-sequence states have slots (`ingot.runtime.pages.state_slots`), allocated and freed with
the pages.

Most pages of a long chunk are read only by the chunk's own step. If the pool is short, these are scratch pages
(`ingot.ir.cache.scratch_pages`): they are in the page table of that step, and the sequence never holds them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ingot.ir.cache.groups import FULL, CacheGroup, ordered
from ingot.runtime.pages.pool import PagePool
from ingot.runtime.pages.state_slots import StateSlots
from ingot.runtime.scheduling.blocks import ONE_BY_ONE, Blocks
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.row_tables import RowTables

Pools = Mapping[CacheGroup, PagePool]
_PLENTY = 1 << 62  # tokens or pages without a bound


@dataclass(frozen=True)
class Found:
    """The cached prefix from which a waiting request can resume.

    count    the prefix is this many first pages of the request's tokens
    pages    for each cache group its `count` pages. 0 stands for a page that no later token reads, because of a sliding
             window. A cache group is KV caches that share one page table
    slot     with per-sequence states (Mamba): the slot of the state after the prefix; None: there is none
    branch   how many first pages are cached; more than `count` if no state is kept after the later ones
    """

    count: int
    pages: tuple[list[int], ...]
    slot: int | None = None
    branch: int = 0

    @staticmethod
    def nothing(groups: int) -> "Found":
        return Found(0, tuple([] for _ in range(groups)))


class SequencePages:
    """Allocates KV pages to sequences, and frees them. `Request.pages` has a list of pages for each cache group, in the
    order of `groups`. A cache group is KV caches that share one page table.

    pools       the page pool of each cache group; empty for a model without KV caches
    tables      the page tables of running sequences; they are updated too
    page_size   tokens of a page
    slots       the slots of per-sequence states, such as Mamba's; None: the model has none
    blocks      the block sizes that attention masks or block diffusion require
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
        """The fewest pages that can be allocated now in any cache group. A cache group is KV caches that share one page
        table."""
        return min([pool.num_free for pool in self.pools], default=_PLENTY)

    @property
    def num_held(self) -> int:
        return sum(pool.num_held for pool in self.pools)

    @property
    def num_releasing(self) -> int:
        return sum(pool.num_releasing for pool in self.pools)

    @property
    def occupied(self) -> tuple[int, int, int, int]:
        """Counts of pages: (held by sequences, waiting for steps in flight to complete, in the prefix cache, all)."""
        kept = sum(pool.num_kept for pool in self.pools)
        return self.num_held, self.num_releasing, kept, sum(pool.capacity for pool in self.pools)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages `num_tokens` tokens need in one cache. The last page may be partly filled."""
        return -(-num_tokens // self.page_size)

    def tokens_held(self, request: Request) -> int:
        """Return for how many tokens the sequence has pages in every cache group. A cache group is KV caches that share
        one page table.

        The last group decides. Groups with a sliding window come last, and never have more pages than other groups.
        """
        return len(request.pages[-1]) * self.page_size if request.pages else _PLENTY

    def steady_end(self, request: Request) -> int:
        """Return up to how many tokens a sequence can decode one by one before the scheduler must check it: until it
        needs a page, or until the prefix cache may keep its state."""
        held = self.tokens_held(request)
        return held if self.slots is None else min(held, self.slots.next_end(request))

    def tokens_within(self, request: Request, num_tokens: int) -> int:
        """Return how many of a sequence's first `num_tokens` tokens can get pages for the step being built. The
        sequence can use its pages, free pages, and scratch pages (which only one step uses)."""
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
        """Return the most pages of one prompt chunk that later steps may read, in one cache group. The chunk may have
        any length. With a sliding window, later steps read few pages. A cache group is KV caches that share one page
        table."""
        return group.pages_between_steps(_PLENTY, self.page_size) + self._beyond

    def _unread(self, request: Request, place: int, num_tokens: int) -> int:
        """Return how many pages of a long prompt chunk are not read by later steps, because of a sliding window. These
        can be scratch pages, which the next step reuses.

        place        the index of the cache group; a cache group is KV caches that share one page table
        num_tokens   the chunk ends at this token of the sequence

        Pages that a sequence needs to resume at the chunk's last full page do not count: the prefix cache can keep
        these.
        """
        if not self.pools[place].num_scratch:
            return 0
        known = min(num_tokens, request.num_known)
        boundary = self._blocks.shared((known - 1) // self.page_size, self.page_size) * self.page_size
        first = self.groups[place].first_page(boundary, self.page_size)
        return max(0, first - self.pages_for(request.num_computed))

    def admits(self, request: Request, found: Found, num_tokens: int, at_once: int) -> bool:
        """Return whether a waiting request can be admitted: enough pages are free. With per-sequence states (Mamba), a
        state slot must be free too.

        found        the request's cached prefix; its pages are shared
        num_tokens   the number of tokens that must have pages before the request decodes
        at_once      how many of these tokens a step must process together, at least
        """
        for group, pool, shared in zip(self.groups, self.pools, found.pages, strict=True):
            own = group.held(shared)
            if self.least(group, num_tokens, at_once) - len(own) > pool.num_free_without(own):
                return False
        return self.slots is None or self.slots.admits

    def least(self, group: CacheGroup, num_tokens: int, at_once: int) -> int:
        """Return the fewest pages of a cache group that a sequence of `num_tokens` tokens needs. A cache group is KV
        caches that share one page table. With a sliding window, pages are freed while the sequence grows, so fewer
        suffice.

        at_once   how many tokens one step processes
        """
        between = group.pages_between_steps(num_tokens, self.page_size)
        fed = self.pages_for(at_once - 1)
        if self.pools[self.groups.index(group)].num_scratch:
            fed = min(fed, self._survive(group))
        return min(self.pages_for(num_tokens), between + fed)

    def begin(self, request: Request, found: Found) -> None:
        """Let a request that has just been admitted hold the pages of its cached prefix `found`. With per-sequence
        states (Mamba), also assign state slots to it."""
        for place, (group, pool, pages) in enumerate(zip(self.groups, self.pools, found.pages, strict=True)):
            pool.share(group.held(pages))
            self._tables.add_pages(place, request.row, pages, 0)
            request.pages[place] += pages
        request.given_back = [0] * len(self.groups)
        self._num_sequences += 1
        if self.slots is not None:
            self.slots.begin(request, found.slot)

    def take(self, request: Request, num_tokens: int, *, keeping: bool = False, feeding: bool = False) -> None:
        """Allocate the pages that a sequence lacks for its first `num_tokens` tokens, in every cache group. A cache
        group is KV caches that share one page table.

        keeping   only in groups that keep every token, not in groups with a sliding window
        feeding   the step being built processes the sequence up to this token. Pages that no later step reads may then
                  be scratch pages, which the next step reuses

        Scratch pages are used only if the pool would keep less than one free page per sequence. Decoding sequences may
        need these before the step returns its pages. Otherwise pool pages are better, because the prefix cache can keep
        them.
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
        """Put scratch pages into a sequence's page table, for positions that no later step reads. The next step reuses
        scratch pages. Pages that the sequence has for these positions move to later positions.

        place   the index of the cache group; a cache group is KV caches that share one page table

        Return how many pages the sequence still lacks for its first `num_tokens` tokens.
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
        """Return the index after the last scratch page in a sequence's list of pages; 0 if it has none. Only the step
        being built uses scratch pages."""
        return max((places.stop for _, one, places in self._scratch if one is request), default=0)

    def end_step(self) -> None:
        """Replace all scratch pages in the page tables by page 0, so that the next step can reuse them. Call it once
        the step's inputs are built."""
        if not self.windows:
            return
        for place, request, places in self._scratch:
            self._tables.clear_pages(place, request.row, places)
        self._fed_with_scratch = {request for _, request, _ in self._scratch}
        self._scratch.clear()
        for _, _, pool in self.windows:
            pool.end_scratch()

    def withdraw(self, request: Request, busy_until: int | None) -> None:
        """Free the pages of a prompt chunk whose step did not run, in cache groups with a sliding window. A cache group
        is KV caches that share one page table.

        This is needed only if the chunk used scratch pages. Only one step can use these, so some positions of the chunk
        now have no page. The next step allocates pages again.

        request      the chunk's sequence; its `num_computed` is the chunk's first position
        busy_until   the pages can be allocated again after the step of this number; None: at once
        """
        count = self.pages_for(request.num_computed)
        if any(0 in request.pages[place][count:] for place, _, _ in self.windows):
            for place, group, pool in self.windows:
                pool.free(group.held(request.pages[place][count:]), busy_until)
                del request.pages[place][count:]
                self._tables.cut_pages(place, request.row, count)

    def short(self, request: Request, num_tokens: int) -> list[tuple[PagePool, int]]:
        """Return the cache groups in which a sequence lacks pages for its first `num_tokens` tokens, each as (page
        pool, number of missing pages). A cache group is KV caches that share one page table."""
        needed = -(-num_tokens // self.page_size)
        return [
            (pool, needed - held)
            for held, pool in zip(map(len, request.pages), self.pools, strict=True)
            if held < needed
        ]

    def give_back(self, request: Request, position: int, busy_until: int | None) -> None:
        """Free the pages of a sequence that its sliding windows have passed: no token at or after `position` reads
        them. They can be allocated again after step number `busy_until`; None: at once."""
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
        """Replace pages of a request by pages with equal content, and free the old ones.

        others       for each cache group, pairs (index among the request's pages, new page); a cache group is KV caches
                     that share one page table
        busy_until   the old pages can be allocated again after the step of this number; None: at once
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
        """Free all KV pages of a sequence that stops running. With per-sequence states (Mamba), free its state slots
        too.

        busy_until   they can be allocated again after the step of this number; None: at once
        forget       remove the pages and states from the prefix cache
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
    """Return a page pool for each cache group (KV caches that share one page table). The group that keeps every token,
    if there is one, comes before groups with a sliding window.

    pages       name of a group -> number of its pages
    page_size   tokens of a page
    scratch     name of a group -> page numbers of its scratch pages (only one step uses them)
    """
    return {
        group: PagePool(
            pages[group.name], page_size, reserved=group.reserved, scratch=scratch.get(group.name, range(0))
        )
        for group in ordered(map(CacheGroup.named, pages))
    }


def one_pool(pool: PagePool) -> Pools:
    """Return page pools for a model with a single cache group, which keeps every token. `pool` is its pool."""
    return {FULL: pool}
