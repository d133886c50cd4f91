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

from ingot.runtime.blocks import Blocks
from ingot.runtime.pages import PagePool
from ingot.runtime.request import Request
from ingot.runtime.row_tables import RowTables


class StateSlots:
    """Assigns state slots to running sequences. A slot holds the convolution and scan states of one sequence, as in
    Mamba. A sequence holds the slot that its next step writes, and the slot that it reads if that is another one.

    pool     the pool of slots; each of its pages is one slot
    tables   the slots of running sequences for the step's inputs, which are updated too
    blocks   the block sizes after which a sequence can resume
    cuts     whether prompts may be split into chunks
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
        """Assign state slots to a request that has just been admitted. A slot holds the convolution and scan states of
        one sequence, as in Mamba. The request writes a free slot, and reads `found`, the slot with the state after its
        cached prefix (None: it has no cached prefix).

        If no slot is free, the request both reads and writes `found`, and the prefix cache forgets that slot.
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
        """Keep the convolution and scan state (as in Mamba) of a request, which is at the end of a page, in the prefix
        cache under `digest`. The request continues in another slot, unless it is about to free its slots (`last`). If
        no slot is free for that, keep nothing."""
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
        """Remove the state after an earlier page of the request's output from the prefix cache, so that a newer one
        replaces it. A state that a sequence still holds stays."""
        digest = request.cached.generated
        slot = None if digest is None else self.pool.find_one(digest)
        if slot is not None and not self.pool.is_held(slot):
            self.pool.forget([slot])
        request.cached.generated = None

    def settle(self, busy_until: int | None) -> None:
        """After the launch of a step, free the old slots of sequences that read their state (as in Mamba) from one slot
        and write it to another. From now on they read the slot that the step writes.

        A freed slot can be allocated again once step number `busy_until` is complete; None: at once.
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
        """Undo a step of these requests that did not run, or ran only in part: the states that it wrote are not
        used."""
        for request in requests:
            request.state_at = request.num_computed

    def release(self, request: Request, busy_until: int | None, *, forget: bool = False) -> None:
        """Free the slots with the states (as in Mamba) of a sequence that stops running. They can be allocated again
        once step number `busy_until` is complete; None: at once. `forget`: the prefix cache must no longer find the
        states."""
        held = [slot for slot in dict.fromkeys((request.state_write, request.state_read)) if slot >= 0]
        if forget and request.cached.hashes is not None:
            kept = map(self.pool.find_one, request.cached.hashes.digests)
            self.pool.forget([slot for slot in kept if slot is not None])
        self.pool.free(held, busy_until)
        request.state_read = request.state_write = -1

    def next_end(self, request: Request) -> int:
        """Return the position at which the page that the sequence is filling ends, as a number of tokens."""
        return (request.num_computed // self._page_size + 1) * self._page_size

    def cut(self, request: Request, start: int, end: int, goal: int) -> int:
        """Return the position at which to end a prompt chunk that begins at `start`: where later requests are likely to
        resume, so that the state there is worth keeping.

        `end` is the largest position that the step has room for; `goal` is the end of the prompt.
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
        """Find the longest prefix, of at most `count` pages, after which the prefix cache keeps a state. Return (its
        number of pages, slot of the state); (0, None) if there is none. `digests` has the hash of each block of
        tokens."""
        for place in range(count, 0, -1):
            slot = self.pool.find_one(digests[place - 1])
            if slot is not None and place == self._blocks.shared(place, self._page_size):
                return place, slot
        return 0, None

    def _whole(self, num_tokens: int) -> int:
        """Return the largest number of tokens, at most `num_tokens`, that ends at a page boundary from which a sequence
        can resume."""
        return self._blocks.shared(num_tokens // self._page_size, self._page_size) * self._page_size

    def _set(self, request: Request, read: int, write: int) -> None:
        request.state_read, request.state_write, request.state_at = read, write, request.num_computed
        self._tables.set_slots(request.row, read, write)
