"""The pool of KV-cache pages: which pages sequences hold, which the prefix cache finds, and which wait for a step in
flight."""

import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from ingot.ir.errors import InternalError


class PagePool:
    """Allocates pages of the KV cache to sequences, and counts how many sequences hold each page. It knows pages by
    number only.

    num_pages      pages are numbered 0..num_pages-1
    page_size      tokens of a page
    reserved       this many first pages are never allocated
    scratch        ids of pages outside the pool. They are for data that only one step reads. `take_scratch`
                   allocates them for the step being built, and `end_scratch` frees them all
    permute_seed   for tests: allocate pages in a random order with this seed, so that page tables are not ascending
    on_release     for tests that overwrite unused pages: called with the pages whose content is no longer needed

    `allocate` assigns a page to a first holder (a sequence). `share` adds a holder, and `free` removes one. A step in
    flight may still use a page without holders: then `free(pages, busy_until=step)` sets it aside until `retire(step)`.

    `keep` registers a page for the prefix cache under a digest of its content, and `find` returns it for that digest. A
    registered page without holders can be found until it is allocated again. The pool first allocates pages that are
    not registered. Then it allocates the registered page that was freed longest ago. Of pages freed together,
    it allocates the last one first: the cache can find a page only after the pages before it in the sequence.
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
        """The number of pages that can be allocated now. Pages in the prefix cache that no sequence holds count too."""
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
        """Return how many pages `num_tokens` tokens need. The last page may be partly filled."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages for one sequence, and return their numbers. They are ascending, because kernels read
        adjacent pages together.

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
        """Return the numbers of `count` scratch pages. Only the step being built may use them.

        Raises InternalError if too few are left. The pool has enough for the largest step.
        """
        pages = self._scratch[self._in_scratch : self._in_scratch + count]
        if len(pages) < count:
            raise InternalError(f"{count} scratch pages requested, {len(pages)} left", where="PagePool.take_scratch")
        self._in_scratch += count
        return list(pages)

    def end_scratch(self) -> None:
        """Take back all scratch pages, so that the next step can use them. Only one step uses a scratch page. Call it
        once the inputs of the step are built."""
        self._in_scratch = 0

    def free(self, pages: Sequence[int], busy_until: int | None = None) -> None:
        """Remove one holder (a sequence) from each of these pages. A page without holders becomes allocatable.

        pages        the pages, in the order of their tokens
        busy_until   they can be allocated again after the step of this number; None: at once

        Raises InternalError if a page has no holder; then none is freed.
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
        """Make the pages allocatable that waited for step number `step` or an earlier one. These steps are complete."""
        while self._releasing and self._releasing[0][0] <= step:
            until, pages = self._releasing.popleft()
            # Skip pages that were shared since, even if they were freed again, for a later step.
            pages = [page for page in pages if self._busy.get(page) == until]
            for page in pages:
                del self._busy[page]
            self._release(pages)

    def keep(self, page: int, digest: bytes) -> int:
        """Register a page for the prefix cache, so that `find` returns it. A sequence must hold the page, and nothing
        may write it again.

        `digest` is the hash of its content. Returns the page that `find` returns for it: `page`, or an earlier one with
        equal content. Raises InternalError if no sequence holds the page, or if it has another digest.
        """
        if not self._holders[page] or self._digests.get(page, digest) != digest:
            raise InternalError(f"page {page} kept", where="PagePool.keep", expected="a held page, with one digest")
        kept = self._kept.setdefault(digest, page)
        if kept == page:
            self._digests[page] = digest
        return kept

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Return the pages that are registered under these digests, in order. A digest is the hash of a page's content.
        Stop before the first digest without a page."""
        pages: list[int] = []
        for digest in digests:
            if (page := self._kept.get(digest)) is None:
                break
            pages.append(page)
        return pages

    def find_one(self, digest: bytes) -> int | None:
        """Return the page that is registered under this digest, or None. A digest is the hash of a page's content."""
        return self._kept.get(digest)

    def is_held(self, page: int) -> bool:
        """Return whether any sequence holds the page."""
        return self._holders[page] > 0

    def num_free_without(self, pages: Iterable[int]) -> int:
        """Return how many pages could still be allocated after `share(pages)`. `pages` come from `find`. Pages without
        a holder count as free now, and no longer after that call."""
        return self.num_free - sum(page in self._idle for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Add one holder (a sequence) to each of these pages, which `find` returned. A page may have no holder before.

        Raises InternalError if a page has no holder and `find` cannot return it; then no page is shared.
        """
        if odd := [page for page in pages if not self._holders[page] and page not in self._digests]:
            raise InternalError(f"page {odd[0]} shared", where="PagePool.share", expected="a page that is held or kept")
        for page in pages:
            if not self._holders[page] and self._busy.pop(page, None) is None:
                del self._idle[page]
            self._holders[page] += 1

    def forget(self, pages: Iterable[int]) -> None:
        """Remove these pages from the prefix cache, so that `find` does not return them. Sequences that hold them keep
        them."""
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
        """Empty the prefix cache: `find` returns no page until pages are registered again."""
        self.forget(list(self._digests))

    def _release(self, pages: Sequence[int]) -> None:
        """Make these pages allocatable. No sequence holds them, and no step in flight uses them."""
        self._idle.update((page, None) for page in reversed(pages) if page in self._digests)
        if worthless := [page for page in pages if page not in self._digests]:
            self._free += worthless
            if self._on_release is not None:
                self._on_release(worthless)
