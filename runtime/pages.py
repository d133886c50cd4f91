"""The pool of KV-cache pages: which are free, which are held, which wait for a step to retire."""

import random
from collections import deque
from collections.abc import Callable, Sequence

from ingot.ir.errors import InternalError


class PagePool:
    """Pages 0..num_pages-1 of `page_size` tokens each. Hands out page ids and knows nothing of requests.

    A page freed while a step is in flight may still be read or written by it, so it can be allocated again only once
    that step has retired: `free(pages, busy_until=step)` puts it aside, `retire(step)` releases it.

    permute_seed   hand out pages in a random order, so that tests meet page tables that are not monotonic
    on_release     called with the pages that have just become allocatable (tests poison them there)
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 16,
        *,
        permute_seed: int | None = None,
        on_release: Callable[[list[int]], None] | None = None,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise InternalError(f"a pool of {num_pages} pages of {page_size} tokens", expected="at least 1 of each")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages))
        self._held = [False] * num_pages
        self._releasing: deque[tuple[int, list[int]]] = deque()  # (step, pages), steps ascending
        self._num_releasing = 0
        self._random = None if permute_seed is None else random.Random(permute_seed)
        self._on_release = on_release

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def num_releasing(self) -> int:
        """Pages that become free when the steps in flight retire."""
        return self._num_releasing

    @property
    def num_held(self) -> int:
        """Pages allocated and not freed."""
        return self.num_pages - self.num_free - self.num_releasing

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """`count` free pages. Raises InternalError when there are fewer: callers look at `num_free` first."""
        if count > len(self._free):
            raise InternalError(f"{count} pages asked for, {len(self._free)} free", where="PagePool.allocate")
        if self._random is not None:
            self._random.shuffle(self._free)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._held[page] = True
        return pages

    def free(self, pages: Sequence[int], busy_until: int | None = None) -> None:
        """Give pages back; with `busy_until`, they become allocatable when that step retires.

        Raises InternalError for a page that is not held, and then frees none.
        """
        if len(set(pages)) != len(pages) or not all(0 <= page < self.num_pages and self._held[page] for page in pages):
            raise InternalError(
                f"pages {list(pages)} freed", where="PagePool.free", expected="pages that are held, each once"
            )
        for page in pages:
            self._held[page] = False
        if busy_until is None:
            self._release(list(pages))
        elif pages:
            self._releasing.append((busy_until, list(pages)))
            self._num_releasing += len(pages)

    def retire(self, step: int) -> None:
        """Release what waited for `step` or for one before it."""
        while self._releasing and self._releasing[0][0] <= step:
            _, pages = self._releasing.popleft()
            self._num_releasing -= len(pages)
            self._release(pages)

    def _release(self, pages: list[int]) -> None:
        self._free.extend(pages)
        if self._on_release is not None and pages:
            self._on_release(pages)
