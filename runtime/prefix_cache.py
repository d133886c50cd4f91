"""The prefix cache: sequences that begin alike share the KV pages of what they have in common.

Only full pages are shared, and a sequence writes each of its pages once, so none writes what another one reads. A
page can be found, by its block's hash, once the step that writes its last token has been launched: steps run in the
order of their launches. What a sequence finds it does not feed; but it always feeds its last token, for the logits, and
so where everything is there, it computes its last page again, in a page of its own.

Where a model has states that stand once per sequence, a sequence goes on only after a page at whose end a state is kept
too (`ingot.runtime.state_slots`).

A request waits for one step where that step writes at least half of what it would feed itself. Where two sequences have
computed the same page side by side all the same, the later one goes on with the earlier one's. So what holds a page
holds those in front of it as they are found, and none is given up before what comes after it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ingot.ir.cache.groups import CacheGroup
from ingot.runtime.block_hashes import BlockHashes
from ingot.runtime.blocks import Blocks
from ingot.runtime.request import Request
from ingot.runtime.sequence_pages import Found, SequencePages


@dataclass
class PrefixCacheStats:
    """What the cache was good for so far, in tokens.

    queries      of requests that looked into the cache when they were first admitted
    hits         of these, found there
    recomputed   of preempted requests, fed once more: what the cache had lost until they were admitted again
    """

    queries: int = 0
    hits: int = 0
    recomputed: int = 0


class PrefixCache:
    """Finds pages for requests in `pool`, and keeps theirs. Not `enabled`: finds none and keeps none."""

    def __init__(self, pages: SequencePages, blocks: Blocks, *, enabled: bool) -> None:
        self.enabled = enabled
        self.stats = PrefixCacheStats()
        self._pages = pages
        self._blocks = blocks
        self._page_size = pages.page_size
        # What others can find when the step that is being made has been launched, page after page; and ends of pieces
        # after which they can go on then, whether or not they can before them.
        self._coming: set[bytes] = set()
        self._coming_ends: set[bytes] = set()

    def begin(self, request: Request, like: Request | None = None) -> None:
        """Hash the prompt of a new request, unless it is that of `like`, which was begun just now."""
        if like is not None and like.cached.hashes is not None:
            request.cached.hashes = like.cached.hashes.copy()
        elif self.enabled:
            request.cached.hashes = BlockHashes(self._page_size, salt=request.given.cache_salt)
            request.cached.hashes.extend(request.prompt_ids)

    def extend(self, request: Request) -> bool:
        """Hash the block that a token has filled. False where it has filled none."""
        hashes = request.cached.hashes
        if hashes is None or (known := request.num_known) < (len(hashes.digests) + 1) * self._page_size:
            return False
        hashes.extend(request.known_tokens(hashes.num_tokens, known))
        return True

    def find(self, request: Request) -> Found:
        """What a waiting request need not compute: as many pages as are there of every group that keeps each token, and
        of each group with a window those that the next token reads. Where states stand once per sequence, no more than
        those after which one is kept."""
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
        """Nothing is written yet by the step that is being made."""
        self._coming.clear()
        self._coming_ends.clear()

    def feed(self, request: Request, length: int) -> None:
        """The step feeds so many tokens of a prompt."""
        if request.cached.hashes is not None:
            size, start = self._page_size, request.num_computed
            end = self._blocks.final(min(start + length, request.num_known))
            if not (in_scratch := self._pages.scratch_end(request)):
                self._coming.update(request.cached.hashes.digests[start // size : end // size])
            if (end % size == 0 if self._pages.slots is not None else in_scratch) and end >= size:
                self._coming_ends.add(request.cached.hashes.digests[end // size - 1])

    def is_coming(self, request: Request, found: int) -> bool:
        """Whether a waiting request that has found so many pages finds in the next step what it had better not feed in
        this one."""
        if request.cached.hashes is None or not (self._coming or self._coming_ends):
            return False
        size = self._page_size
        behind = request.cached.hashes.digests[found : self._most_cached(request) // size]
        coming = 0
        if self._coming_ends:
            coming = max((place for place, one in enumerate(behind, 1) if one in self._coming_ends), default=0)
        if self._pages.slots is None:
            coming = max(coming, sum(1 for _ in itertools.takewhile(self._coming.__contains__, behind)))
        return 2 * coming * size >= request.num_tokens - found * size

    def admit(self, request: Request, found: int) -> None:
        """Count what a request that is admitted with `found` tokens has found."""
        if request.cached.num_found is None:
            request.cached.num_found = found
            if request.cached.hashes is not None and self._most_cached(request):
                self.stats.queries += request.num_tokens
                self.stats.hits += found
        else:
            self.stats.recomputed += max(0, request.cached.num_lost - found)

    def keep(self, request: Request, *, last: bool = False) -> list[list[tuple[int, int]]] | None:
        """Let others find the full pages of a request that holds pages, and its state where it stands at the end of a
        page; `last`: it is about to give up all that it holds.

        Gives for each group (place, page) where the request is to hold another page instead, which has held the same
        for longer; None where there is no such page.
        """
        size, cached = self._page_size, request.cached
        if cached.hashes is None:
            return None
        # A state that found no free slot may be kept in its own at last.
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
        """How many tokens a request may find instead of feeding them."""
        if request.given.scores_prompt and request.num_scored < len(request.prompt_ids) - 1:
            return request.num_scored  # the others' logits are asked for
        return self._blocks.findable(request.num_tokens)


def _readable(
    count: int, windows: Sequence[tuple[CacheGroup, Sequence[int | None]]], page_size: int, blocks: Blocks
) -> int:
    """The most pages, up to `count`, after which every window finds the pages that the next token reads. `windows` has
    for each group with a window the page of each block, None where it is gone."""
    gone = [[0] for _ in windows]  # by group: of the first blocks how many are gone
    for before, (_, kept) in zip(gone, windows, strict=True):
        for page in kept:
            before.append(before[-1] + (page is None))
    while count:
        firsts = [group.first_page(count * page_size, page_size) for group, _ in windows]
        if all(before[count] == before[min(first, count)] for before, first in zip(gone, firsts, strict=True)):
            break
        count = blocks.shared(count - 1, page_size)
    return count
