"""The prefix cache: sequences with equal prefixes share the KV pages of those prefixes.

Sequences share full pages only. A sequence writes each of its pages once, so none writes a page that another reads. A
page can be found, by its block's hash, once the step that writes its last token has been launched: steps run in launch
order. A sequence does not feed tokens that it finds, but always feeds its last token, for the logits. If every page is
found, it recomputes its last page, in a page of its own.

With per-sequence states, a sequence resumes only after a page with a kept state at its end
(`ingot.runtime.pages.state_slots`).

A waiting request waits for one step if that step writes at least half of the tokens that the request would feed itself.
Two sequences may still compute the same page at once; then the later one switches to the earlier one's page. So the
holder of a page holds the same earlier pages that `find` returns, and no page is evicted before its successors.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ingot.ir.cache.groups import CacheGroup
from ingot.runtime.pages.block_hashes import BlockHashes
from ingot.runtime.pages.sequence_pages import Found, SequencePages
from ingot.runtime.scheduling.blocks import Blocks
from ingot.runtime.scheduling.request import Request


@dataclass
class PrefixCacheStats:
    """Counts of tokens since the start, for the hit rate of the prefix cache.

    queries      tokens of requests that searched the cache when they were first admitted
    hits         how many of these tokens were in the cache
    recomputed   tokens of preempted requests that were computed twice, because the cache had lost them
    """

    queries: int = 0
    hits: int = 0
    recomputed: int = 0


class PrefixCache:
    """Finds the cached prefix of each request, and registers pages that a request fills, so that later requests find
    them.

    pages     the pages of all sequences
    blocks    the block sizes after which a sequence can resume
    enabled   False: it finds and registers nothing
    """

    def __init__(self, pages: SequencePages, blocks: Blocks, *, enabled: bool) -> None:
        self.enabled = enabled
        self.stats = PrefixCacheStats()
        self._pages = pages
        self._blocks = blocks
        self._page_size = pages.page_size
        # Digests of pages that others can find once the step being built is launched; and of the last pages of chunks,
        # after which others can then resume even if they cannot resume at an earlier page.
        self._coming: set[bytes] = set()
        self._coming_ends: set[bytes] = set()

    def begin(self, request: Request, like: Request | None = None) -> None:
        """Hash the full blocks of a new request's prompt. `like` is a request with the same prompt and salt: its hashes
        are copied. None: compute the hashes."""
        if like is not None and like.cached.hashes is not None:
            request.cached.hashes = like.cached.hashes.copy()
        elif self.enabled:
            given = request.given
            keys = [given.adapter_key] if given.adapter_key else []
            request.cached.hashes = BlockHashes(self._page_size, salt=given.cache_salt, extra_keys=keys)
            request.cached.hashes.extend(request.prompt_ids)

    def extend(self, request: Request) -> bool:
        """Hash the last block of a request's tokens if its newest token has filled the block. Return whether it has
        filled it."""
        hashes = request.cached.hashes
        if hashes is None or (known := request.num_known) < (len(hashes.digests) + 1) * self._page_size:
            return False
        hashes.extend(request.known_tokens(hashes.num_tokens, known))
        return True

    def find(self, request: Request) -> Found:
        """Return the longest cached prefix from which a waiting request can resume.

        Layers with full attention need all pages of the prefix. Layers with a sliding window need only the pages that
        the next token reads. With per-sequence states (such as Mamba's), a state must be kept at the end of the prefix.
        """
        if request.cached.hashes is None:
            return Found.nothing(len(self._pages.groups))
        digests = request.cached.hashes.digests[: self._most_cached(request) // self._page_size]
        whole = [
            pool.find(digests)
            for group, pool in zip(self._pages.groups, self._pages.pools, strict=True)
            if not group.forgets
        ]
        count = self._blocks.shared(min([len(digests), *map(len, whole)]), self._page_size)
        windows = [
            (group, [pool.find_one(digest) for digest in digests[:count]])
            for group, pool in zip(self._pages.groups, self._pages.pools, strict=True)
            if group.forgets
        ]
        count = branch = _readable(count, windows, self._page_size, self._blocks)
        slot = None
        if self._pages.slots is not None:
            count, slot = self._pages.slots.find(digests, count)
            while count and (readable := _readable(count, windows, self._page_size, self._blocks)) < count:
                count, slot = self._pages.slots.find(digests, readable)
        pages = [found[:count] for found in whole]
        for group, kept in windows:
            first = group.first_page(count * self._page_size, self._page_size)
            pages.append([0] * min(first, count) + [page for page in kept[first:count] if page is not None])
        return Found(count, tuple(pages), slot, branch)

    def begin_step(self) -> None:
        """Begin to build a step: forget which pages the step before writes. `feed` recorded them."""
        self._coming.clear()
        self._coming_ends.clear()

    def feed(self, request: Request, length: int) -> None:
        """Record that the step being built processes the next `length` tokens of a request. `is_coming` uses this to
        know which pages the step writes."""
        if request.cached.hashes is not None:
            size, start = self._page_size, request.num_computed
            end = self._blocks.final(min(start + length, request.num_known))
            if not (in_scratch := self._pages.scratch_end(request)):
                self._coming.update(request.cached.hashes.digests[start // size : end // size])
            if (end % size == 0 if self._pages.slots is not None else in_scratch) and end >= size:
                self._coming_ends.add(request.cached.hashes.digests[end // size - 1])

    def is_coming(self, request: Request, found: int) -> bool:
        """Return whether a waiting request should wait for one more step, because it can then find more pages in the
        cache. The step being built must write pages with at least half of the tokens that the request would otherwise
        compute.

        `found` is the number of the request's pages that are cached now.
        """
        if request.cached.hashes is None or not (self._coming or self._coming_ends):
            return False
        size = self._page_size
        missing = request.cached.hashes.digests[found : self._most_cached(request) // size]
        coming = 0
        if self._coming_ends:
            coming = max((place for place, one in enumerate(missing, 1) if one in self._coming_ends), default=0)
        if self._pages.slots is None:
            coming = max(coming, sum(1 for _ in itertools.takewhile(self._coming.__contains__, missing)))
        return 2 * coming * size >= request.num_tokens - found * size

    def admit(self, request: Request, found: int) -> None:
        """Update the statistics for a request that is admitted with `found` cached tokens."""
        if request.cached.num_found is None:
            request.cached.num_found = found
            if request.cached.hashes is not None and self._most_cached(request):
                self.stats.queries += request.num_tokens
                self.stats.hits += found
        else:
            self.stats.recomputed += max(0, request.cached.num_lost - found)

    def keep(self, request: Request, *, last: bool = False) -> list[list[tuple[int, int]]] | None:
        """Register the full pages of a request, so that other requests find them. With per-sequence states (such as
        Mamba's), also keep the state if it is at the end of a page.

        last   the request is about to free its pages and states

        An earlier page may have equal content, and the request should then hold that page instead. Returns such pages:
        for each cache group, pairs (index among the request's pages, earlier page); None: there are none. A cache group
        is KV caches that share one page table.
        """
        size, cached = self._page_size, request.cached
        if cached.hashes is None:
            return None
        # A state that could not be kept for want of a free slot can be kept in the request's own slot at the end.
        if request.num_computed < (cached.num_kept + 1) * size and not (last and self._pages.slots is not None):
            return None
        full = self._blocks.final(min(request.num_known, request.num_computed)) // size
        others: list[list[tuple[int, int]]] | None = None
        if full > cached.num_kept:
            for number, pool in self._pages.numbered:
                held, reserved = request.pages[number], self._pages.reserved[number]
                for place in range(cached.num_kept, full):
                    if held[place] < reserved:
                        continue  # it was a scratch page
                    page = pool.keep(held[place], cached.hashes.digests[place])
                    if page != held[place]:
                        others = others or [[] for _ in request.pages]
                        others[number].append((place, page))
            cached.num_kept = full
        if self._pages.slots is not None and full and request.num_computed == full * size:
            self._pages.slots.keep(request, cached.hashes.digests[full - 1], last=last)
        return others

    def _most_cached(self, request: Request) -> int:
        """Return how many of a request's first tokens may come from the cache. The request must compute the others,
        because it needs their logits."""
        if request.given.scores_prompt and request.num_scored < len(request.prompt_ids) - 1:
            return request.num_scored  # prompt_logprobs needs the logits of the others
        return self._blocks.findable(request.num_tokens)


def _readable(
    count: int, windows: Sequence[tuple[CacheGroup, Sequence[int | None]]], page_size: int, blocks: Blocks
) -> int:
    """Return the largest number of first pages, at most `count`, after which a sequence can resume. The next token
    reads pages in sliding windows, and all of these must be cached.

    windows     (group, cached pages) for each cache group with a sliding window. `cached pages` has one for each block
                of tokens, or None. A cache group is KV caches that share one page table
    page_size   tokens of a page
    blocks      the block sizes after which a sequence can resume
    """
    gone = [[0] for _ in windows]  # by group: how many of the first i blocks are gone
    for before, (_, kept) in zip(gone, windows, strict=True):
        for page in kept:
            before.append(before[-1] + (page is None))
    while count:
        firsts = [group.first_page(count * page_size, page_size) for group, _ in windows]
        if all(before[count] == before[min(first, count)] for before, first in zip(gone, firsts, strict=True)):
            break
        count = blocks.shared(count - 1, page_size)
    return count
