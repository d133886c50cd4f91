"""The pool of KV-cache pages: which pages sequences hold, which the prefix cache finds, and which wait for a step in
flight."""

import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from ingot.ir.errors import InternalError


class PagePool:
    """Hands out pages of the KV cache to sequences, and counts how many sequences hold each page. It knows pages by
    number only: 0..num_pages-1, of `page_size` tokens each. It never hands out the first `reserved` pages.

    `allocate` assigns a page to its first holder (a sequence), `share` adds a holder, and `free` removes one. A step in
    flight may still read or write a page that its last holder frees. So `free(pages, busy_until=step)` sets such pages
    aside, and `retire(step)` makes them allocatable.

    `keep` registers a page under a digest of its content, and `find` returns it for that digest. A registered page that
    no sequence holds can be found until it is allocated again. The pool allocates pages that are not registered first,
    then the registered page that was freed longest ago. Of pages freed together it allocates the last first, because
    that page is found only after the others.

    scratch        numbers of pages after those of the pool, for data that only one step reads: `take_scratch` hands
                   them to the step being built, and `end_scratch` takes all back
    permute_seed   for tests: hand out pages in a random order with this seed, so that page tables are not monotonic
    on_release     for tests, which overwrite such pages: called with pages that become allocatable and are not
                   registered, and with a registered page just before it is allocated
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 16,
        *,
        reserved: int = 0,
        scratch: range = range(0),
        permute_seed: int | None = None,
        on_release: Callable[[list[int]], None] | None = None,
    ) -> None:
        if num_pages <= reserved or page_size < 1:
            raise InternalError(f"a pool of {num_pages} pages of {page_size} tokens", expected="at least 1 of each")
        if scratch and scratch.start < num_pages:
            raise InternalError(f"scratch pages from {scratch.start} on", expected=f"from {num_pages} on")
        self.num_pages = num_pages
        self.capacity = num_pages - reserved  # pages that can be handed out
        self.page_size = page_size
        self.num_scratch = len(scratch)
        self._scratch = scratch
        self._in_scratch = 0  # number of scratch pages that the step being built has taken
        self._holders = [0] * num_pages
        # A page that no sequence holds is in one of these:
        self._free = list(range(reserved, num_pages))
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept pages, in the order of eviction
        self._busy: dict[int, int] = {}  # page: the step that it waits for
        self._releasing: deque[tuple[int, list[int]]] = deque()  # (step, pages), steps ascending
        self._digests: dict[int, bytes] = {}  # by page
        self._kept: dict[bytes, int] = {}  # the page, by digest
        self._random = None if permute_seed is None else random.Random(permute_seed)
        self._on_release = on_release

    @property
    def num_free(self) -> int:
        """The number of pages that can be allocated now, including pages that the prefix cache can find but no sequence
        holds."""
        return len(self._free) + len(self._idle)

    @property
    def num_releasing(self) -> int:
        """The number of pages that become allocatable when the steps in flight are complete."""
        return len(self._busy)

    @property
    def num_held(self) -> int:
        """The number of pages that sequences hold."""
        return self.capacity - self.num_free - self.num_releasing

    @property
    def num_kept(self) -> int:
        """The number of pages that `find` can return, whether a sequence holds them or not."""
        return len(self._kept)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages are needed for `num_tokens` tokens; the last page may be partly filled."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages for one sequence, and return their numbers, ascending, because kernels read adjacent
        pages together.

        Raises InternalError if fewer are free; callers check `num_free` first.
        """
        if self._random is not None:
            self._random.shuffle(self._free)
        if (short := count - len(self._free)) > 0:
            if short > len(self._idle):
                raise InternalError(f"{count} pages requested, {self.num_free} free", where="PagePool.allocate")
            self.forget(list(itertools.islice(self._idle, short)))
        pages = [self._free.pop() for _ in range(count)]
        if self._random is None and count > 1:
            pages.sort()
        for page in pages:
            self._holders[page] = 1
        return pages

    def take_scratch(self, count: int) -> list[int]:
        """Return the numbers of `count` scratch pages, which only the step being built may use.

        Raises InternalError if too few are left. The pool has as many as the largest step needs.
        """
        pages = self._scratch[self._in_scratch : self._in_scratch + count]
        if len(pages) < count:
            raise InternalError(f"{count} scratch pages requested, {len(pages)} left", where="PagePool.take_scratch")
        self._in_scratch += count
        return list(pages)

    def end_scratch(self) -> None:
        """Take back all scratch pages (pages that only one step uses), so that the next step can use them. Call it once
        the inputs of the step are built."""
        self._in_scratch = 0

    def free(self, pages: Sequence[int], busy_until: int | None = None) -> None:
        """Remove one holder (a sequence) from each of these pages, which are in the order of their tokens. Pages
        without any holder left become allocatable: at once, or if `busy_until` is set, when the step with that number
        is complete.

        Raises InternalError if a page has no holder, and then frees none.
        """
        if len(set(pages)) != len(pages) or not all(
            0 <= page < self.num_pages and self._holders[page] for page in pages
        ):
            raise InternalError(
                f"pages {list(pages)} freed", where="PagePool.free", expected="pages that are held, each once"
            )
        for page in pages:
            self._holders[page] -= 1
        released = [page for page in pages if not self._holders[page]]
        if busy_until is None:
            self._release(released)
        elif released:
            self._busy.update(dict.fromkeys(released, busy_until))
            self._releasing.append((busy_until, released))

    def retire(self, step: int) -> None:
        """Make pages allocatable that were freed while a step in flight could still use them, if that step is number
        `step` or earlier."""
        while self._releasing and self._releasing[0][0] <= step:
            until, pages = self._releasing.popleft()
            # Skip pages that were shared since, even if they were freed again, for a later step.
            pages = [page for page in pages if self._busy.get(page) == until]
            for page in pages:
                del self._busy[page]
            self._release(pages)

    def keep(self, page: int, digest: bytes) -> int:
        """Register a page for the prefix cache under `digest`, the hash of its content, so that `find` returns it. A
        sequence must hold the page, and it must not be written again.

        Returns the page that `find` returns for the digest: `page`, or an earlier one with the same content. Raises
        InternalError if no sequence holds the page, or if it has another digest.
        """
        if not self._holders[page] or self._digests.get(page, digest) != digest:
            raise InternalError(f"page {page} kept", where="PagePool.keep", expected="a held page, with one digest")
        kept = self._kept.setdefault(digest, page)
        if kept == page:
            self._digests[page] = digest
        return kept

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Return the pages that are registered under these digests (hashes of their content), in order. Stop before the
        first digest that has no page."""
        pages: list[int] = []
        for digest in digests:
            if (page := self._kept.get(digest)) is None:
                break
            pages.append(page)
        return pages

    def find_one(self, digest: bytes) -> int | None:
        """Return the page that is registered under this digest (the hash of its content), or None."""
        return self._kept.get(digest)

    def is_held(self, page: int) -> bool:
        """Return whether any sequence holds the page."""
        return self._holders[page] > 0

    def num_free_without(self, pages: Iterable[int]) -> int:
        """Return how many pages could still be allocated after `share(pages)`. `pages` are pages that `find` returned.
        Those that no sequence holds count as free until then."""
        return self.num_free - sum(page in self._idle for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Let one more sequence hold each of these pages, which `find` returned. A page may have had no holder before.

        Raises InternalError if no sequence holds a page and `find` cannot return it; then shares none.
        """
        if odd := [page for page in pages if not self._holders[page] and page not in self._digests]:
            raise InternalError(f"page {odd[0]} shared", where="PagePool.share", expected="a page that is held or kept")
        for page in pages:
            if not self._holders[page] and self._busy.pop(page, None) is None:
                del self._idle[page]
            self._holders[page] += 1

    def forget(self, pages: Iterable[int]) -> None:
        """Make `find` no longer return these pages. Sequences that hold them keep them."""
        worthless: list[int] = []
        for page in pages:
            if (digest := self._digests.pop(page, None)) is None:
                continue
            del self._kept[digest]
            if page in self._idle:
                del self._idle[page]
                worthless.append(page)
        self._release(worthless)

    def forget_all(self) -> None:
        """Empty the prefix cache: `find` returns no page until new ones are registered."""
        self.forget(list(self._digests))

    def _release(self, pages: Sequence[int]) -> None:
        """Make these pages allocatable. No sequence holds them, and no step in flight uses them."""
        self._idle.update((page, None) for page in reversed(pages) if page in self._digests)
        if worthless := [page for page in pages if page not in self._digests]:
            self._free += worthless
            if self._on_release is not None:
                self._on_release(worthless)
