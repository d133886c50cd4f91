"""The prefix cache: sequences that begin alike share the KV pages of what they have in common.

Only full pages are shared, and a sequence writes each of its pages once, so none writes what another one reads. A
page can be found, by its block's hash, once the step that writes its last token has been launched: steps run in the
order of their launches. What a sequence finds it does not feed; but it always feeds its last token, for the logits, and
so where everything is there, it computes its last page again, in a page of its own.

A request waits for one step where that step writes at least half of what it would feed itself. Where two sequences have
computed the same page side by side all the same, the later one goes on with the earlier one's. So what holds a page
holds those in front of it as they are found, and none is given up before what comes after it.
"""

import itertools
from dataclasses import dataclass

from ingot.runtime.block_hashes import BlockHashes
from ingot.runtime.pages import PagePool
from ingot.runtime.request import Request


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

    def __init__(self, pool: PagePool, *, enabled: bool) -> None:
        self.enabled = enabled
        self.stats = PrefixCacheStats()
        self._pool = pool
        self._coming: set[bytes] = set()  # what others can find when the step that is being made has been launched

    def begin(self, request: Request, like: Request | None = None) -> None:
        """Hash the prompt of a new request, unless it is that of `like`, which was begun just now."""
        if like is not None and like.cached.hashes is not None:
            request.cached.hashes = like.cached.hashes.copy()
        elif self.enabled:
            request.cached.hashes = BlockHashes(self._pool.page_size, salt=request.given.cache_salt)
            request.cached.hashes.extend(request.prompt_ids)

    def extend(self, request: Request) -> bool:
        """Hash the block that a token has filled. False where it has filled none."""
        hashes = request.cached.hashes
        if hashes is None or (known := request.num_known) < (len(hashes.digests) + 1) * self._pool.page_size:
            return False
        hashes.extend(request.known_tokens(hashes.num_tokens, known))
        return True

    def find(self, request: Request) -> list[int]:
        """The pages that a waiting request need not compute."""
        if request.cached.hashes is None:
            return []
        count = _most_cached(request) // self._pool.page_size
        return self._pool.find(request.cached.hashes.digests[:count])

    def begin_step(self) -> None:
        """Nothing is written yet by the step that is being made."""
        self._coming.clear()

    def feed(self, request: Request, length: int) -> None:
        """The step feeds so many tokens of a prompt."""
        if request.cached.hashes is not None:
            size, start = self._pool.page_size, request.num_computed
            self._coming.update(request.cached.hashes.digests[start // size : (start + length) // size])

    def is_coming(self, request: Request, found: int) -> bool:
        """Whether a waiting request that has found so many pages finds in the next step what it had better not feed in
        this one."""
        if request.cached.hashes is None or not self._coming:
            return False
        size = self._pool.page_size
        behind = request.cached.hashes.digests[found : _most_cached(request) // size]
        coming = sum(1 for _ in itertools.takewhile(self._coming.__contains__, behind))
        return 2 * coming * size >= request.num_tokens - found * size

    def admit(self, request: Request, found: int) -> None:
        """Count what a request that is admitted with `found` tokens has found."""
        if request.cached.num_found is None:
            request.cached.num_found = found
            if request.cached.hashes is not None and _most_cached(request):
                self.stats.queries += request.num_tokens
                self.stats.hits += found
        else:
            self.stats.recomputed += max(0, request.cached.num_lost - found)

    def keep(self, request: Request) -> list[tuple[int, int]]:
        """Let others find the full pages of a request that holds pages.

        Gives (place, page) where the request is to hold another page instead, which has held the same for longer.
        """
        size, cached = self._pool.page_size, request.cached
        if cached.hashes is None or request.num_computed < (cached.num_kept + 1) * size:
            return []
        full = min(request.num_known, request.num_computed) // size
        others: list[tuple[int, int]] = []
        for place in range(cached.num_kept, full):
            page = self._pool.keep(request.pages[place], cached.hashes.digests[place])
            if page != request.pages[place]:
                others.append((place, page))
        cached.num_kept = max(full, cached.num_kept)
        return others


def _most_cached(request: Request) -> int:
    """How many tokens a request may find instead of feeding them."""
    if request.given.scores_prompt and request.num_scored < len(request.prompt_ids) - 1:
        return request.num_scored  # the others' logits are asked for
    return request.num_tokens - 1
