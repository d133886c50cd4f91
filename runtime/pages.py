"""The pool of KV-cache pages: which are held, what they are kept for, which wait for a step to retire."""

import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from ingot.ir.errors import InternalError


class PagePool:
    """Pages 0..num_pages-1 of `page_size` tokens each, the first `reserved` of which are never handed out. Hands out
    page ids and knows nothing of requests.

    `allocate` gives a page to its first holder, `share` to further ones; `free` takes it from one. A page that its last
    holder frees while a step is in flight may still be read or written by that step, so it can be allocated again only
    once the step has retired: `free(pages, busy_until=step)` puts it aside, `retire(step)` releases it.

    What a page holds can be given a digest by `keep`, under which `find` finds it. Such a page is worth something when
    no sequence holds it any more: it stays until it is allocated for something else. Pages that are worth nothing go
    first, then those kept that were freed longest ago, and of pages that were freed together the last one, whose
    content cannot be found without those in front of it.

    scratch        numbers of pages after those of the pool, which hold what one step alone reads: `take_scratch` gives
                   them to the step that is being made, and `end_scratch` takes them all back
    permute_seed   hand out pages in a random order, so that tests meet page tables that are not monotonic
    on_release     called with the pages that can be allocated and hold nothing of worth any more (tests poison them
                   there); with one that was kept, just before it is allocated
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
        self._in_scratch = 0  # of these the first so many belong to the step that is being made
        self._holders = [0] * num_pages
        # Where a page is that no sequence holds:
        self._free = list(range(reserved, num_pages))
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept, the next to be given up first
        self._busy: dict[int, int] = {}  # the step that it waits for
        self._releasing: deque[tuple[int, list[int]]] = deque()  # (step, pages), steps ascending
        self._digests: dict[int, bytes] = {}  # by page
        self._kept: dict[bytes, int] = {}  # the page, by digest
        self._random = None if permute_seed is None else random.Random(permute_seed)
        self._on_release = on_release

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now, kept ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_releasing(self) -> int:
        """Pages that become free when the steps in flight retire."""
        return len(self._busy)

    @property
    def num_held(self) -> int:
        """Pages that sequences hold."""
        return self.capacity - self.num_free - self.num_releasing

    @property
    def num_kept(self) -> int:
        """Pages that can be found by a digest, held or not."""
        return len(self._kept)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """`count` pages for a first holder, ascending: kernels read pages that lie one after the other at once.

        Raises InternalError when fewer are free: callers look at `num_free`.
        """
        if self._random is not None:
            self._random.shuffle(self._free)
        if (short := count - len(self._free)) > 0:
            if short > len(self._idle):
                raise InternalError(f"{count} pages asked for, {self.num_free} free", where="PagePool.allocate")
            self.forget(list(itertools.islice(self._idle, short)))
        pages = [self._free.pop() for _ in range(count)]
        if self._random is None and count > 1:
            pages.sort()
        for page in pages:
            self._holders[page] = 1
        return pages

    def take_scratch(self, count: int) -> list[int]:
        """`count` scratch pages for the step that is being made.

        Raises InternalError when fewer are left: they are as many as the largest step can need.
        """
        pages = self._scratch[self._in_scratch : self._in_scratch + count]
        if len(pages) < count:
            raise InternalError(f"{count} scratch pages asked for, {len(pages)} left", where="PagePool.take_scratch")
        self._in_scratch += count
        return list(pages)

    def end_scratch(self) -> None:
        """The inputs of the step are made: the next step may write all scratch pages."""
        self._in_scratch = 0

    def free(self, pages: Sequence[int], busy_until: int | None = None) -> None:
        """Take pages, in the order of their tokens, from one holder. With `busy_until`, those that none holds then
        become allocatable when that step retires.

        Raises InternalError for a page that is not held, and then frees none.
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
        """Release what waited for `step` or for one before it."""
        while self._releasing and self._releasing[0][0] <= step:
            until, pages = self._releasing.popleft()
            # Not those that were shared meanwhile, even when they were freed again, for a later step.
            pages = [page for page in pages if self._busy.get(page) == until]
            for page in pages:
                del self._busy[page]
            self._release(pages)

    def keep(self, page: int, digest: bytes) -> int:
        """Let `find` find what a held page holds, which is not written again.

        Gives the page that is found: another one, when it has held the same for longer.
        """
        if not self._holders[page] or self._digests.get(page, digest) != digest:
            raise InternalError(f"page {page} kept", where="PagePool.keep", expected="a held page, with one digest")
        kept = self._kept.setdefault(digest, page)
        if kept == page:
            self._digests[page] = digest
        return kept

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The pages that hold the first of these contents, as far as each one is kept."""
        pages: list[int] = []
        for digest in digests:
            if (page := self._kept.get(digest)) is None:
                break
            pages.append(page)
        return pages

    def find_one(self, digest: bytes) -> int | None:
        """The page that holds this content, if one is kept."""
        return self._kept.get(digest)

    def is_held(self, page: int) -> bool:
        """Whether any sequence holds a page."""
        return self._holders[page] > 0

    def num_free_beside(self, pages: Iterable[int]) -> int:
        """Pages that can be allocated once these, which were found, are shared."""
        return self.num_free - sum(page in self._idle for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Give pages that were found to a further holder, or to a first one again.

        Raises InternalError for a page that is neither held nor kept, and then shares none.
        """
        if odd := [page for page in pages if not self._holders[page] and page not in self._digests]:
            raise InternalError(f"page {odd[0]} shared", where="PagePool.share", expected="a page that is held or kept")
        for page in pages:
            if not self._holders[page] and self._busy.pop(page, None) is None:
                del self._idle[page]
            self._holders[page] += 1

    def forget(self, pages: Iterable[int]) -> None:
        """Stop `find` from finding these pages. Sequences that hold them keep them."""
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
        """Stop `find` from finding any page."""
        self.forget(list(self._digests))

    def _release(self, pages: Sequence[int]) -> None:
        """Make pages allocatable that no sequence holds and no step uses."""
        self._idle.update((page, None) for page in reversed(pages) if page in self._digests)
        if worthless := [page for page in pages if page not in self._digests]:
            self._free += worthless
            if self._on_release is not None:
                self._on_release(worthless)
