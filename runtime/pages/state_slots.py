"""Slots of per-sequence states (convolutions and scans). They are not device rows, so the prefix cache can keep some.

A step reads a sequence's state from one slot and writes it to one, usually the same. So keeping a state needs no copy:
the prefix cache keeps the slot that was written last; the next step reads that slot and writes another one.

The cache keeps the state at the end of a prompt chunk, and at the end of the last full page of generated tokens. A new
page of generated tokens replaces the state of the page before. A state is as large as many pages and is found at one
position only, while pages are found one by one. The second turn of a conversation starts at the end of the first turn;
a repeated prompt starts at its last full page. If the pages of a prefix are cached but no state, as after a system
prompt, a prompt chunk ends there: the third request then finds the prefix that the first two share.
"""

from collections.abc import Sequence

from ingot.runtime.pages.pool import PagePool
from ingot.runtime.scheduling.blocks import Blocks
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.row_tables import RowTables


class StateSlots:
    """Assigns state slots to running sequences. A state slot has the convolution and scan states of one sequence, as in
    Mamba. A sequence holds the slot that its next step writes, and the slot that it reads if that is another one.

    pool        the pool of slots; each of its pages is one slot
    tables      where the slots of running sequences are stored for the step's inputs
    blocks      the block sizes after which a sequence can resume
    page_size   tokens of a page
    cuts        whether prompts may be split into chunks
    """

    def __init__(self, pool: PagePool, tables: RowTables, blocks: Blocks, page_size: int, *, cuts: bool) -> None:
        self.pool = pool
        self._tables = tables
        self._blocks = blocks
        self._page_size = page_size
        self._cuts = cuts
        self._moving: list[Request] = []  # requests that may read one slot and write another in their next step

    @property
    def admits(self) -> bool:
        """Whether a slot is free for one more sequence."""
        return self.pool.num_free > 0

    def begin(self, request: Request, found: int | None) -> None:
        """Assign state slots to a request that has just been admitted. A state slot has the convolution and scan states
        of one sequence, as in Mamba.

        The request reads `found`, the slot with the state after its cached prefix; None: there is no cached prefix. It
        writes a free slot. If no slot is free, it writes `found` too, and the prefix cache forgets that slot.
        """
        if found is not None:
            self.pool.share([found])
            if not self.pool.num_free:
                self.pool.forget([found])
                self._set(request, found, found)
                return
        (slot,) = self.pool.allocate(1)
        self._set(request, -1 if found is None else found, slot)
        self._moving.append(request)

    def keep(self, request: Request, digest: bytes, *, last: bool) -> None:
        """Keep the convolution and scan states of a request (as in Mamba) in the prefix cache. They are after the last
        token of a page.

        digest   the hash of the tokens, under which the states are found
        last     the request is about to free its slots. Otherwise it continues in another slot; if none is free,
                 nothing is kept
        """
        if request.num_computed == request.state_at:
            return  # it has written nothing
        if self.pool.find_one(digest) is not None or not (last or self.pool.num_free):
            return
        self._replace(request)
        self.pool.keep(request.state_write, digest)
        if request.num_computed > len(request.prompt_ids):
            request.cached.generated = digest
        if not last:
            self._set(request, request.state_write, *self.pool.allocate(1))
            self._moving.append(request)

    def _replace(self, request: Request) -> None:
        """Remove the state that the prefix cache keeps after an earlier page of the request's output. A newer state
        replaces it. A state that a sequence holds stays."""
        digest = request.cached.generated
        slot = None if digest is None else self.pool.find_one(digest)
        if slot is not None and not self.pool.is_held(slot):
            self.pool.forget([slot])
        request.cached.generated = None

    def settle(self, busy_until: int | None) -> None:
        """Free slots that sequences have read for the last time. Call it after the launch of a step.

        A sequence may read its state (as in Mamba) from one slot and write it to another one. After that step it reads
        and writes only the second slot. The first slot can be allocated again after step number `busy_until`; None: at
        once.
        """
        waiting: list[Request] = []
        for request in self._moving:
            if request.state_write < 0 or request.state_read == request.state_write:
                continue  # ended or preempted
            if request.num_computed == request.state_at:
                waiting.append(request)  # no step had room for it
                continue
            if request.state_read >= 0:
                self.pool.free([request.state_read], busy_until)
            self._set(request, request.state_write, request.state_write)
            request.state_at = -1
        self._moving = waiting

    def withdraw(self, requests: Sequence[Request]) -> None:
        """Undo a step of these requests that did not run, or ran only in part. The states that it wrote are not
        used."""
        for request in requests:
            request.state_at = request.num_computed

    def release(self, request: Request, busy_until: int | None, *, forget: bool = False) -> None:
        """Free the state slots of a sequence that stops running. A state slot has its convolution and scan states, as
        in Mamba.

        busy_until   the slots can be allocated again after the step of this number; None: at once
        forget       remove the states from the prefix cache
        """
        held = [slot for slot in dict.fromkeys((request.state_write, request.state_read)) if slot >= 0]
        if forget and request.cached.hashes is not None:
            kept = map(self.pool.find_one, request.cached.hashes.digests)
            self.pool.forget([slot for slot in kept if slot is not None])
        self.pool.free(held, busy_until)
        request.state_read = request.state_write = -1

    def next_end(self, request: Request) -> int:
        """Return how many tokens the sequence has when its current page is full."""
        return (request.num_computed // self._page_size + 1) * self._page_size

    def cut(self, request: Request, start: int, end: int, goal: int) -> int:
        """Return the position at which to end a prompt chunk. If possible, later requests are likely to resume there,
        so that the prefix cache keeps the state there. The state is of convolutions and scans, as in Mamba.

        start   the chunk's first position
        end     the largest position that the step has room for
        goal    the end of the prompt
        """
        if not self._cuts or request.cached.hashes is None:
            return end
        for place in (request.cached.branch, self._whole(goal - 1)):
            if start < place <= end:
                return place
            if end < place:
                break
        else:
            return end  # the rest of the prompt
        whole = self._whole(end)
        return whole if 2 * (whole - start) >= end - start else end  # a short chunk would cost more than it saves

    def find(self, digests: Sequence[bytes], count: int) -> tuple[int, int | None]:
        """Find the longest prefix with a state in the prefix cache. Return (its number of pages, slot of the state), or
        (0, None) if there is none.

        digests   the hash of each block of tokens
        count     the most pages of the prefix
        """
        for place in range(count, 0, -1):
            slot = self.pool.find_one(digests[place - 1])
            if slot is not None and place == self._blocks.shared(place, self._page_size):
                return place, slot
        return 0, None

    def _whole(self, num_tokens: int) -> int:
        """Return the largest number of tokens, up to `num_tokens`, after which a sequence can resume. It fills whole
        pages."""
        return self._blocks.shared(num_tokens // self._page_size, self._page_size) * self._page_size

    def _set(self, request: Request, read: int, write: int) -> None:
        request.state_read, request.state_write, request.state_at = read, write, request.num_computed
        self._tables.set_slots(request.row, read, write)
