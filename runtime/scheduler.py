"""Continuous batching: which sequences feed which tokens in the next step, and which pages they hold.

Requests are ranked by priority and then by arrival. A step first feeds one token of every decoding sequence, then
pieces of prompts as far as the token budget goes, then it admits waiting requests while there are rows and pages.
When a decoding sequence needs a page and none is left, the last by rank of those that run gives up its pages, goes
back among the waiting ones and is computed again later, outputs included, as far as the prefix cache has lost them.
So does the last one of a step that the device has no memory for, and until one of the others has ended none is
admitted. The first of those that run is not preempted for pages, so it comes to an end; and where all have one
priority, no request starves.

Steps overlap: step n+1 is scheduled while step n runs, before its tokens are known. What is known ahead is the number
of tokens, so lengths need no surplus step; a stop costs one surplus token, which is dropped. Where drafts are fed, or
blocks that are denoised (`ingot.runtime.blocks`), only the most tokens that may come are known ahead.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from ingot.ir.cache.groups import FULL
from ingot.ir.errors import InternalError, RequestError
from ingot.ir.logprob_limits import MAX_SCORED
from ingot.runtime import steady_decode
from ingot.runtime.batch import Chunk, StepBatch, build_step
from ingot.runtime.drafted_chunk import drafted_chunk
from ingot.runtime.occupancy import Occupancy
from ingot.runtime.pages import PagePool
from ingot.runtime.prefix_cache import PrefixCache, PrefixCacheStats
from ingot.runtime.request import INVALID_TOKEN, End, Request, Status
from ingot.runtime.row_tables import RowTables
from ingot.runtime.scheduler_config import SchedulerConfig, check_servable, max_total
from ingot.runtime.sequence_pages import Pools, SequencePages
from ingot.runtime.state_slots import StateSlots
from ingot.runtime.step import StepBuffer, StepLayout, StepSizes
from ingot.runtime.step_room import StepRoom, prompt_tokens

_rank = attrgetter("rank")
# A token that counts: whose it is, which, and the row of logits that it was chosen from. A step makes one for each
# sequence, hence no class.
Accepted = tuple[Request, int, int]


class Scheduler:
    """`add` requests, then in turn `schedule` a step and `retire` the one before it; at most one is in flight
    meanwhile. `pools` are those of the groups of caches, `slots` that of states that stand once per sequence. `layout`
    is that of the steps' inputs; without one it holds every input that the host knows."""

    def __init__(
        self, config: SchedulerConfig, pools: Pools, layout: StepLayout | None = None, slots: PagePool | None = None
    ) -> None:
        if odd := [pool.page_size for pool in pools.values() if pool.page_size != config.page_size]:
            raise InternalError(f"pages of {odd[0]} tokens in the pool, {config.page_size} in the scheduler")
        self.config = config
        self.blocks = config.blocks
        self.requests: dict[str, Request] = {}  # not finished, by id
        self.waiting: list[Request] = []  # by rank, as those that run
        self.running: list[Request] = []
        max_pages = -(-config.max_seq_len // config.page_size)
        layout = layout or StepLayout.usual()
        # A token fed gives at most one row of logits.
        max_rows = min(config.max_tokens, config.max_batch * config.rows + MAX_SCORED)
        largest = StepSizes(config.max_tokens, config.max_batch, max_rows, max_pages, G=config.max_batch)
        # Two, because step n's inputs may still be copied to the device while step n+1 is built.
        self._buffers = [StepBuffer(layout, largest, config.pin_memory) for _ in range(2)]
        self._tables = RowTables(layout.tables, config.max_batch, max_pages, len(pools), slots=slots is not None)
        cuts, size = config.chunked_prefill, config.page_size
        states = None if slots is None else StateSlots(slots, self._tables, config.blocks, size, cuts=cuts)
        self.pages = SequencePages(pools, self._tables, size, states, config.blocks)
        self._free_rows = list(reversed(range(config.max_batch)))
        self._in_flight: deque[StepBatch] = deque()
        self._next_step = 0
        self._most_running: int | None = None  # sequences, since a step of more had no memory
        self._cache = PrefixCache(self.pages, self.blocks, enabled=config.prefix_caching)
        # Windows give back what they would share, and drafts feed several tokens of a sequence.
        shares = FULL in self.pages.groups and "sharing" in layout.names and not config.max_drafts
        self._least_shared = config.least_shared if shares else None
        self._num_arrived = 0
        self.num_preemptions = 0  # so far; a pool that is large enough keeps it at 0

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def occupancy(self) -> Occupancy:
        queues = len(self.waiting), len(self.running), len(self._in_flight)
        return Occupancy(*queues, self.num_free_rows, *self.pages.occupied, self.num_preemptions)

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        return replace(self._cache.stats)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and nothing changes, while sequences hold pages: what comes after a page that
        was forgotten would be found again."""
        if self.pages.num_held or self.pages.num_releasing:
            return False
        self.pages.forget_all()
        return True

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def check(self, request: Request) -> None:
        """Raise RequestError for a request that could never be served."""
        if request.request_id in self.requests:
            where = f"request {request.request_id}"
            raise RequestError("a request with this id is being served", where=where, expected="an id of its own")
        check_servable(request, self.config, self.pages)

    def add(self, request: Request, like: Request | None = None) -> None:
        """Queue a new request, which may have the prompt and salt of one that was added just now: `like`.

        Raises RequestError for one that could never be served.
        """
        self.check(request)
        request.max_total = max_total(request, self.config)
        request.ends = request.end_tokens() | {INVALID_TOKEN}
        request.rank = request.given.priority, self._num_arrived
        self._num_arrived += 1
        request.pages = [[] for _ in self.pages.groups]
        self._cache.begin(request, like)
        self._look_again(request)
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=_rank)

    def schedule(self) -> StepBatch | None:
        """The next step, or None when nothing can be fed before the step in flight has retired."""
        if len(self._in_flight) > 1:
            raise InternalError(
                "two steps are in flight", where="Scheduler.schedule", expected="retire the older one first"
            )
        self._cache.begin_step()
        if self.pages.slots is not None:
            self.pages.slots.settle(self._busy_until)
        decodes, chunks, prefilling, short_of_pages = self._schedule_decodes()
        room = StepRoom(self.blocks, prompt_tokens(self.config, decodes, chunks) if prefilling or self.waiting else 0)
        for request in prefilling:
            if request.status is Status.RUNNING:  # and was not preempted just now
                self._feed(request, chunks, room)
        # Else new requests would take the pages that running ones wait for; and one that was preempted just now, with a
        # token in flight, has to wait for that token.
        if not short_of_pages:
            self._admit(chunks, room)
        if not decodes and not chunks:
            return None
        batch = build_step(
            self._next_step,
            decodes,
            chunks,
            self._tables,
            self._buffers[self._next_step % 2],
            self.pages.page_size,
            self.pages.groups,
            self._least_shared,
        )
        self.pages.end_step()
        self._next_step += 1
        self._in_flight.append(batch)
        for request in decodes:
            request.num_computed += 1
            request.in_flight += 1
        for chunk in chunks:
            chunk.request.num_computed += chunk.length
            chunk.request.in_flight += chunk.rows
            chunk.request.num_scored += len(chunk.scored)
            chunk.request.miscounted = False
        return batch

    def retire(self, batch: StepBatch, tokens: Sequence[int], rejected: Sequence[int] | None = None) -> list[Accepted]:
        """Take the tokens of the oldest step in flight, one per logit row. Of a sequence that was fed drafts, the last
        `rejected` tokens fed were not kept, by its place in the step; None: all were.

        Returns those that count, in order: a request that has ended meanwhile drops its tokens, and one that ends here
        those after its end. The requests that end here are finished when this returns.
        """
        if len(tokens) != batch.inputs.sizes.L:
            raise InternalError(f"{len(tokens)} tokens for {batch.inputs.sizes.L} logit rows", where="Scheduler.retire")
        self._retire_step(batch)
        accepted: list[Accepted] = []
        if batch.rows is not None:
            self._retire_drafted(batch, tokens, rejected or [0] * batch.inputs.sizes.B, accepted)
            return accepted
        # After the sampled rows come scored ones, or a dummy.
        for row, (request, token) in enumerate(zip(batch.sampled, tokens, strict=False)):
            request.in_flight -= 1
            if request.end is None:
                accepted.append((request, token, row))
                output_ids = request.output_ids
                output_ids.append(token)
                # Most tokens end nothing, and a step of 256 sequences saves 256 calls.
                if len(output_ids) >= request.looks_at or token in request.ends:
                    self._look_at(request, token)
        return accepted

    def retire_pooled(self, batch: StepBatch, finite: Sequence[bool]) -> list[tuple[Request, int]]:
        """Take the vectors of the oldest step in flight, one per sequence; `finite` says which hold finite numbers.
        Gives the requests whose last tokens it fed, each with its place in the step; they are finished."""
        self._retire_step(batch)
        done: list[tuple[Request, int]] = []
        for place, chunk in enumerate(batch.chunks):
            chunk.request.in_flight -= chunk.rows
            if chunk.rows and chunk.request.end is None:
                done.append((chunk.request, place))
                self.finish(chunk.request, End("stop" if finite[place] else "error"))
        return done

    def _retire_step(self, batch: StepBatch) -> None:
        if not self._in_flight or self._in_flight[0] is not batch:
            raise InternalError(
                f"step {batch.step} retired", where="Scheduler.retire", expected="the oldest step in flight"
            )
        self._in_flight.popleft()
        batch.inputs.let_go()
        self.pages.retire(batch.step)

    def _retire_drafted(
        self, batch: StepBatch, tokens: Sequence[int], rejected: Sequence[int], accepted: list[Accepted]
    ) -> None:
        """The tokens of a step that fed drafts: of each sequence those after the tokens that were kept. Or of one that
        fed blocks: those of each that it has committed, but what the host knew."""
        assert batch.rows is not None
        places = [
            *range(len(batch.decodes)),
            *(len(batch.decodes) + i for i, one in enumerate(batch.chunks) if one.rows),
        ]
        first = 0
        for request, rows, place in zip(batch.sampled, batch.rows, places, strict=True):
            request.in_flight -= rows
            if request.status is Status.RUNNING:
                request.num_computed -= rejected[place]  # one that was preempted has none
            known = request.num_known % self.blocks.denoised if self.blocks.denoised else 0
            for row in range(first + known, first + rows - rejected[place]):
                if request.end is not None:
                    break
                accepted.append((request, tokens[row], row))
                request.output_ids.append(tokens[row])
                self._look_at(request, tokens[row])
            first += rows

    def _look_at(self, request: Request, token: int) -> None:
        """Finish a request that ends with `token`, its last output, and hash the block that this may have filled."""
        request.look(token)
        if self._cache.extend(request):
            self._look_again(request)
        if request.end is not None:
            self.finish(request, request.end)

    def withdraw(self, batch: StepBatch) -> Request | None:
        """Take back the newest step in flight, which the device had no memory for; its sequences stand where they did.

        The last of them by rank is preempted, or the first where states lie in slots, with all after it, and none is
        admitted until one that runs has ended. A step of one sequence preempts none: gives that sequence, which cannot
        go on.
        """
        if not self._in_flight or self._in_flight[-1] is not batch:
            raise InternalError(
                f"step {batch.step} withdrawn", where="Scheduler.withdraw", expected="the newest step in flight"
            )
        self._in_flight.pop()
        batch.inputs.let_go()
        for request in batch.decodes:
            request.in_flight -= 1
            request.num_computed -= 1
        for chunk in batch.chunks:
            chunk.request.in_flight -= chunk.rows
            chunk.request.num_scored -= len(chunk.scored)
            chunk.request.num_computed = chunk.start
            self.pages.withdraw(chunk.request, self._busy_until)
        fed = batch.requests
        if self.pages.slots is not None:
            self.pages.slots.withdraw(fed)
        for request in fed:
            # Part of the step may have run. What it wrote is written again, but tokens would be counted twice.
            request.miscounted = request.params.penalizes
            request.denoises = False
            steady_decode.leave(request)
        if len(fed) == 1:
            return fed[0]
        ids = {request.request_id for request in fed}
        places = [place for place, request in enumerate(self.running) if request.request_id in ids]
        # States in slots may be those after the step, so that none of its sequences can go on.
        for request in reversed(self.running[places[-1 if self.pages.slots is None else 0] :]):
            self._preempt(request)
        self._most_running = places[-1]
        return None

    def finish(self, request: Request, end: End) -> None:
        """End a request that is being served, and free what it holds."""
        if request.end is None:
            request.stop(end)
        if request.finished:
            return
        if request.status is Status.RUNNING:
            self._release(request)
            self._most_running = None
        else:
            del self.waiting[bisect_left(self.waiting, request.rank, key=_rank)]
        request.status = Status.FINISHED
        del self.requests[request.request_id]

    def abort(self, request_id: str) -> bool:
        """End a request as "abort"; False when no such request is being served."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self.finish(request, End("abort"))
        return True

    def reset(self) -> None:
        """End all requests as "abort" and forget the steps in flight, whose tokens will never come."""
        for request in list(self.requests.values()):
            self.finish(request, End("abort"))
        for batch in self._in_flight:
            batch.inputs.let_go()
        self._in_flight.clear()
        self.pages.retire(self._next_step)
        self.pages.forget_all()  # whatever those steps were to write may not be there

    def _schedule_decodes(self) -> tuple[list[Request], list[Chunk], list[Request], bool]:
        """One token of every sequence that has only one left to feed, by rank, and the drafts after it.

        Gives those whose token their device rows hold; as chunks those whose token the host knows, and those with
        drafts; those that have more left; and whether pages were short.
        """
        chunks: list[Chunk] = []
        prefilling: list[Request] = []
        short, slots = False, self.pages.slots
        others = steady_decode.others(self.running, in_flight=bool(self._in_flight))
        if not others:
            return list(self.running), chunks, prefilling, short  # as most steps of many sequences
        for request in others:
            if request.status is not Status.RUNNING:
                continue  # preempted just now
            steady_decode.leave(request)
            # What the step in flight writes, others can find: steps run in the order of their launches.
            if held_longer := self._cache.keep(request):
                self.pages.exchange(request, held_longer, self._busy_until)
            if self.pages.windows:
                # Of drafts in flight it is not known how many are kept.
                position = self.blocks.final(min(request.num_computed, request.num_known))
                self.pages.give_back(request, position, self._busy_until)
            if self.blocks.denoised:
                short |= not self._denoise(request, chunks, prefilling)
                continue
            num_tokens = request.num_tokens
            if request.num_computed < num_tokens - 1:
                if self._grow(request, self.blocks.least(request.num_computed, num_tokens)):
                    prefilling.append(request)
                else:
                    short = True
            elif num_tokens >= request.max_total:
                pass  # its last token is in flight
            elif request.num_computed == self.pages.tokens_held(request) and not self._grow(request):
                short = True
            elif not request.in_flight or request.miscounted:
                chunks.append(self._chunk(request, 1, num_tokens))
            elif self.config.max_drafts and not request.params.penalizes:
                chunks.append(drafted_chunk(request, self.config, self.pages, len(self.running), chunks))
            else:
                held = self.pages.tokens_held(request)
                steady_decode.enter(request, held if slots is None else min(held, slots.next_end(request)))
        return steady_decode.steady(self.running), chunks, prefilling, short

    def _denoise(self, request: Request, chunks: list[Chunk], prefilling: list[Request]) -> bool:
        """Feed the block of a sequence that its row holds, or what is left in front of it. False: pages were short."""
        size = self.blocks.denoised
        if request.denoises and request.num_computed >= request.max_total:
            return True  # its last block may end in flight
        if not self._grow(request, size):
            return False
        if not request.denoises:
            prefilling.append(request)
        else:
            start = request.num_computed
            chunks.append(Chunk(request, request.row, start, size, on_device=True, rows=size, block=size))
        return True

    def _admit(self, chunks: list[Chunk], room: StepRoom) -> None:
        """Give waiting requests rows and pages, by rank."""
        while self.waiting and self._free_rows and room.tokens and len(self.running) != self._most_running:
            request = self.waiting[0]
            found = self._cache.find(request)
            start = found.count * self.pages.page_size
            length, fits = self.blocks.fed(request.num_tokens) - start, room.fit(request, start)
            if self._cache.is_coming(request, found.count):
                break
            if fits == 0 or (not self.config.chunked_prefill and fits < length <= self.config.max_tokens):
                break
            # One more than its pages now, or it would be preempted at its first decode.
            more = request.num_tokens + max(1, self.blocks.denoised)
            most = min(self.blocks.fed(more), self.blocks.most_fed(request.max_total))
            at_once = self.blocks.least(start, start + length) if self.config.chunked_prefill else fits
            if not self.pages.admits(request, found, most, at_once):
                break
            del self.waiting[0]
            insort(self.running, request, key=_rank)
            request.status, request.row = Status.RUNNING, self._free_rows.pop()
            self._tables.set_request(request.row, request)
            request.num_computed, request.cached.num_kept = start, found.count
            request.cached.branch = found.branch * self.pages.page_size
            self.pages.begin(request, found)
            request.miscounted = request.params.penalizes
            self._cache.admit(request, start)
            self.pages.take(request, start + length, keeping=True)
            self._feed(request, chunks, room)

    def _feed(self, request: Request, chunks: list[Chunk], room: StepRoom) -> None:
        """As much of a prompt as there is room for."""
        start, goal = request.num_computed, self.blocks.fed(request.num_tokens)
        fits = room.fit(request, start)
        end = self.pages.tokens_within(request, start + fits)
        if self.pages.slots is not None:
            end = self.pages.slots.cut(request, start, end, goal)
        if (length := self.blocks.piece(start, end, goal)) > 0:
            self.pages.take(request, start + length, feeding=True)
            chunks.append(self._chunk(request, length, goal))
            room.take(chunks[-1])
            self._cache.feed(request, length)
        elif self.blocks.granule > 1 or fits > 0:
            room.tokens = 0  # or the room that it waits for would be given away again and again

    def _chunk(self, request: Request, length: int, goal: int) -> Chunk:
        """What a sequence feeds that gets new tokens at the position `goal`."""
        start = request.num_computed
        last, block = start + length == goal, self.blocks.denoised
        request.denoises = last and block > 0
        return Chunk(
            request,
            request.row,
            start,
            length,
            on_device=start >= request.num_known and not block,
            rows=(block or 1) if last else 0,
            scored=request.scored_in(start, start + length) if request.given.scores_prompt else range(0),
            recounts=request.miscounted and start > 0,
            block=block,
        )

    def _grow(self, request: Request, count: int = 1) -> bool:
        """Give a request room for so many more tokens. False: not now, or the request itself was preempted."""
        num_tokens = request.num_computed + count
        for pool, pages in self.pages.short(request, num_tokens):
            if pool.num_free < pages and not self._make_free(pool, pages, request):
                return False
        self.pages.take(request, num_tokens)
        return True

    def _make_free(self, pool: PagePool, pages: int, request: Request) -> bool:
        """Preempt the last of those that run until so many pages are free for a request. False: pages come when the
        step in flight retires, or the request itself was preempted."""
        while pool.num_free + pool.num_releasing < pages:
            victim = self.running[-1]
            if victim is request and request.in_flight > 1:
                return False  # it gives pages of its windows back when it is known which drafts are kept
            self._preempt(victim)
            if victim is request:
                return False
        return pool.num_free >= pages

    def _look_again(self, request: Request) -> None:
        """Find out with how many outputs a request needs a look."""
        if request.text is not None:
            request.looks_at = 0
            return
        total = request.max_total
        if (hashes := request.cached.hashes) is not None:
            total = min(total, (len(hashes.digests) + 1) * self.pages.page_size)
        request.looks_at = total - len(request.prompt_ids)

    def _preempt(self, request: Request) -> None:
        request.cached.num_lost = request.num_computed
        self._release(request)
        request.status = Status.WAITING
        request.num_computed = 0
        request.preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=_rank)

    @property
    def _busy_until(self) -> int | None:
        return self._in_flight[-1].step if self._in_flight else None

    def _release(self, request: Request) -> None:
        """Take row and pages from a request that runs."""
        del self.running[bisect_left(self.running, request.rank, key=_rank)]
        failed = request.end is not None and request.end.reason == "error"
        if not failed and (others := self._cache.keep(request, last=True)):
            self.pages.exchange(request, others, self._busy_until)
        # The row needs no such delay as the pages: its next sequence starts with explicit tokens and positions, in a
        # step after those in flight.
        self.pages.release(request, self._busy_until, worthless=failed)  # they may hold what is not finite
        self._tables.clear(request.row)
        self._free_rows.append(request.row)
        request.row, request.denoises, request.cached.num_kept = -1, False, 0
        steady_decode.leave(request)
