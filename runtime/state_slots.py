"""Slots of states that stand once per sequence: convolutions and scans. They are no device rows, so some are kept.

A step reads the state of a sequence from one slot and leaves it in one, mostly the same. So a state is kept without a
copy: the prefix cache keeps the slot that was written last, and the next step reads that and writes another one.

What is kept is the state at the end of a piece of a prompt, and of what a sequence has generated the end of its last
full page; so a page of what is generated replaces the one before it. A state is as large as many pages, and is found
at one place alone, while pages are found one by one. A second turn of a conversation begins with the end of the first
one, and the same prompt once more with its last full page. Where others have pages of the same beginning and no slot,
as after the prompt of a system, a piece of the prompt ends, so that the third request finds what the second one shares
with the first.
"""

from collections.abc import Sequence

from ingot.runtime.blocks import Blocks
from ingot.runtime.pages import PagePool
from ingot.runtime.request import Request
from ingot.runtime.row_tables import RowTables


class StateSlots:
    """The slots of `pool`, each of which is a page there. A sequence that runs has one that it writes, and holds the
    one that its next step reads, where that is another one. `tables` has both by device row."""

    def __init__(self, pool: PagePool, tables: RowTables, blocks: Blocks, page_size: int, *, cuts: bool) -> None:
        self.pool = pool
        self._tables = tables
        self._blocks = blocks
        self._page_size = page_size
        self._cuts = cuts  # whether prompts may be fed in pieces
        self._moving: list[Request] = []  # those that may read another slot than they write

    @property
    def admits(self) -> bool:
        """Whether there is a slot to write for one more sequence."""
        return self.pool.num_free > 0

    def begin(self, request: Request, found: int | None) -> None:
        """Give a request that gets its row a slot to write, and the one to read that was found. Where that is the only
        one that is free it is both, and others find it no more."""
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
        """Let others find the state of a request that stands at the end of a page. It goes on in another slot, unless
        this is the `last` of it; where none is free nothing is kept."""
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
        """Forget the end of an earlier page that the request has generated, unless another one goes on from there."""
        digest = request.cached.generated
        slot = None if digest is None else self.pool.find_one(digest)
        if slot is not None and not self.pool.is_held(slot):
            self.pool.forget([slot])
        request.cached.generated = None

    def settle(self, busy_until: int | None) -> None:
        """After a step was launched: those that it fed go on from what they wrote, and hold no more what they read."""
        waiting: list[Request] = []
        for request in self._moving:
            if request.state_write < 0 or request.state_read == request.state_write:
                continue  # it has ended, or was preempted
            if request.num_computed == request.state_at:
                waiting.append(request)  # no step had room for it
                continue
            if request.state_read >= 0:
                self.pool.free([request.state_read], busy_until)
            self._set(request, request.state_write, request.state_write)
            request.state_at = -1
        self._moving = waiting

    def withdraw(self, requests: Sequence[Request]) -> None:
        """A step of these did not run, or ran in part: what they wrote is worth nothing. They are to begin again, and
        stand where they did."""
        for request in requests:
            request.state_at = request.num_computed

    def release(self, request: Request, busy_until: int | None, *, worthless: bool = False) -> None:
        """Take the slots from a sequence that gives up its row. `worthless`: none of its states is to be found."""
        held = [slot for slot in dict.fromkeys((request.state_write, request.state_read)) if slot >= 0]
        if worthless and request.cached.hashes is not None:
            kept = map(self.pool.find_one, request.cached.hashes.digests)
            self.pool.forget([slot for slot in kept if slot is not None])
        self.pool.free(held, busy_until)
        request.state_read = request.state_write = -1

    def next_end(self, request: Request) -> int:
        """Tokens with which a sequence comes to the end of the page that it is in."""
        return (request.num_computed // self._page_size + 1) * self._page_size

    def cut(self, request: Request, start: int, end: int, goal: int) -> int:
        """Where a piece of a prompt ends that a step has room for from `start` to `end`, of `goal` tokens."""
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
        return whole if 2 * (whole - start) >= end - start else end  # a short piece would cost more than it saves

    def find(self, digests: Sequence[bytes], count: int) -> tuple[int, int | None]:
        """Of the first `count` pages of these contents the most after which a state is kept, and its slot."""
        for place in range(count, 0, -1):
            slot = self.pool.find_one(digests[place - 1])
            if slot is not None and place == self._blocks.shared(place, self._page_size):
                return place, slot
        return 0, None

    def _whole(self, num_tokens: int) -> int:
        """Of so many tokens those that fill pages after which a sequence can go on."""
        return self._blocks.shared(num_tokens // self._page_size, self._page_size) * self._page_size

    def _set(self, request: Request, read: int, write: int) -> None:
        request.state_read, request.state_write, request.state_at = read, write, request.num_computed
        self._tables.set_slots(request.row, read, write)
