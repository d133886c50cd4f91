"""Continuous batching: which sequences feed which tokens in the next step, and which pages they hold.

Requests are ranked by priority and then by arrival. A step first feeds one token of every decoding sequence, then
pieces of prompts as far as the token budget goes, then it admits waiting requests while there are rows and pages.
When a decoding sequence needs a page and none is left, the last by rank of those that run gives up its pages, goes
back among the waiting ones and is computed again later, outputs included, as far as the prefix cache has lost them.
So does the last one of a step that the device has no memory for, and until one of the others has ended none is
admitted. The first of those that run is never preempted, so it comes to an end; and where all have one priority,
nobody starves.

Steps overlap: step n+1 is scheduled while step n runs, before its tokens are known. What is known ahead is the number
of tokens, so lengths need no surplus step; a stop costs one surplus token, which is dropped.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter

from ingot.ir.errors import InternalError, RequestError
from ingot.ir.logprob_limits import MAX_SCORED
from ingot.runtime.batch import Chunk, RowTables, StepBatch, build_step
from ingot.runtime.occupancy import Occupancy
from ingot.runtime.outputs import FinishReason
from ingot.runtime.pages import PagePool
from ingot.runtime.prefix_cache import PrefixCache, PrefixCacheStats
from ingot.runtime.request import INVALID_TOKEN, Request, Status
from ingot.runtime.scheduler_config import SchedulerConfig, check_servable, max_total
from ingot.runtime.step import StepBuffer, StepSizes

_rank = attrgetter("rank")
# A token that counts: whose it is, which, and the row of logits that it was chosen from. A step makes one for each
# sequence, hence no class.
Accepted = tuple[Request, int, int]


@dataclass
class _Room:
    """What a step can still take: tokens, and rows of logits that rate prompts."""

    tokens: int
    scored: int = MAX_SCORED

    def fit(self, request: Request, start: int) -> int:
        """How many tokens of a prompt go into the step, from position `start` on."""
        length = min(request.num_tokens - start, self.tokens)
        scored = request.scored_in(start, start + length)
        return length if len(scored) <= self.scored else scored.start + self.scored - start

    def take(self, chunk: Chunk) -> None:
        self.tokens -= chunk.length
        self.scored -= len(chunk.scored)


class Scheduler:
    """`add` requests, then in turn `schedule` a step and `retire` the one before it; at most one is in flight
    meanwhile."""

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        if pool.page_size != config.page_size:
            raise InternalError(f"pages of {pool.page_size} tokens in the pool, {config.page_size} in the scheduler")
        self.config = config
        self.pool = pool
        self.requests: dict[str, Request] = {}  # not finished, by id
        self.waiting: list[Request] = []  # by rank, as those that run
        self.running: list[Request] = []
        max_pages = pool.pages_for(config.max_seq_len)
        # A token fed gives at most one row of logits.
        max_rows = min(config.max_tokens, config.max_batch + MAX_SCORED)
        largest = StepSizes(config.max_tokens, config.max_batch, max_rows, max_pages)
        # Two, because step n's inputs may still be copied to the device while step n+1 is built.
        self._buffers = [StepBuffer(largest, config.pin_memory) for _ in range(2)]
        self._tables = RowTables(config.max_batch, max_pages)
        self._free_rows = list(reversed(range(config.max_batch)))
        self._in_flight: deque[StepBatch] = deque()
        self._next_step = 0
        self._most_running: int | None = None  # sequences, since a step of more had no memory
        self._cache = PrefixCache(pool, enabled=config.prefix_caching)
        self._num_arrived = 0
        self.num_preemptions = 0  # so far; a pool that is large enough keeps it at 0

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def occupancy(self) -> Occupancy:
        return Occupancy(
            waiting=len(self.waiting),
            running=len(self.running),
            steps=len(self._in_flight),
            free_rows=self.num_free_rows,
            pages_held=self.pool.num_held,
            pages_releasing=self.pool.num_releasing,
            pages_kept=self.pool.num_kept,
            pages=self.pool.num_pages,
            preemptions=self.num_preemptions,
        )

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        return replace(self._cache.stats)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and nothing changes, while sequences hold pages: what comes behind a page that
        was forgotten would be found again."""
        if self.pool.num_held or self.pool.num_releasing:
            return False
        self.pool.forget_all()
        return True

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def check(self, request: Request) -> None:
        """Raise RequestError for a request that could never be served."""
        if request.request_id in self.requests:
            raise RequestError(
                "a request with this id is being served",
                where=f"request {request.request_id}",
                expected="an id of its own",
            )
        check_servable(request, self.config, self.pool)

    def add(self, request: Request, like: Request | None = None) -> None:
        """Queue a new request, which may have the prompt and salt of one that was added just now: `like`.

        Raises RequestError for one that could never be served.
        """
        self.check(request)
        request.max_total = max_total(request, self.config)
        request.ends = request.end_tokens()
        request.rank = request.priority, self._num_arrived
        self._num_arrived += 1
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
        decodes, chunks, prefilling, short_of_pages = self._schedule_decodes()
        room = _Room(self._prompt_tokens(decodes, chunks) if prefilling or self.waiting else 0)
        for request in prefilling:
            if request.status is Status.RUNNING:  # and was not preempted just now
                self._feed(request, chunks, room)
        # Else new requests would take the pages that running ones wait for; and one that was preempted just now, with a
        # token in flight, has to wait for that token.
        if not short_of_pages:
            self._admit(chunks, room)
        if not decodes and not chunks:
            return None
        batch = build_step(self._next_step, decodes, chunks, self._tables, self._buffers[self._next_step % 2])
        self._next_step += 1
        self._in_flight.append(batch)
        for request in decodes:
            request.num_computed += 1
            request.in_flight += 1
        for chunk in chunks:
            chunk.request.num_computed += chunk.length
            chunk.request.in_flight += chunk.samples
            chunk.request.num_scored += len(chunk.scored)
            chunk.request.miscounted = False
        return batch

    def retire(self, batch: StepBatch, tokens: Sequence[int]) -> list[Accepted]:
        """Take the tokens of the oldest step in flight, one per logit row.

        Returns those that count, in order: a request that has ended meanwhile drops its token. The requests that end
        here by token or by length are finished when this returns; `INVALID_TOKEN` ends one as "error".
        """
        if not self._in_flight or self._in_flight[0] is not batch:
            raise InternalError(
                f"step {batch.step} retired", where="Scheduler.retire", expected="the oldest step in flight"
            )
        if len(tokens) != batch.inputs.sizes.L:
            raise InternalError(f"{len(tokens)} tokens for {batch.inputs.sizes.L} logit rows", where="Scheduler.retire")
        self._in_flight.popleft()
        self.pool.retire(batch.step)
        accepted: list[Accepted] = []
        # Behind the sampled rows stand scored ones, or a dummy.
        for row, (request, token) in enumerate(zip(batch.sampled, tokens, strict=False)):
            request.in_flight -= 1
            if request.finish_reason is not None:
                continue
            accepted.append((request, token, row))
            if token == INVALID_TOKEN:
                self.finish(request, "error")
                continue
            output_ids = request.output_ids
            output_ids.append(token)
            if len(output_ids) >= request.looks_at or token in request.ends:
                self._cache.extend(request)
                self._look_again(request)
                if (end := request.end_after(token)) is not None:
                    self.finish(request, *end)
        return accepted

    def withdraw(self, batch: StepBatch) -> Request | None:
        """Take back the newest step in flight, which the device had no memory for; its sequences stand where they did.

        The last of them by rank is preempted, with all behind it, and none is admitted until one that runs has ended. A
        step of one sequence is given up for nobody: gives that sequence, which cannot go on.
        """
        if not self._in_flight or self._in_flight[-1] is not batch:
            raise InternalError(
                f"step {batch.step} withdrawn", where="Scheduler.withdraw", expected="the newest step in flight"
            )
        self._in_flight.pop()
        for request in batch.decodes:
            request.in_flight -= 1
            request.num_computed -= 1
        for chunk in batch.chunks:
            chunk.request.in_flight -= chunk.samples
            chunk.request.num_scored -= len(chunk.scored)
            chunk.request.num_computed = chunk.start
        fed = batch.requests
        for request in fed:
            # Part of the step may have run. What it wrote is written again, but tokens would be counted twice.
            request.miscounted = request.params.penalizes
            request.decodes_until = 0
        if len(fed) == 1:
            return fed[0]
        ids = {request.request_id for request in fed}
        last = max(place for place, request in enumerate(self.running) if request.request_id in ids)
        for request in reversed(self.running[last:]):
            self._preempt(request)
        self._most_running = last
        return None

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request and free what it holds. For one that has ended already only the reasons are changed."""
        request.finish_reason, request.stop_reason = reason, stop_reason
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
        self.finish(request, "abort")
        return True

    def reset(self) -> None:
        """End all requests as "abort" and forget the steps in flight, whose tokens will never come."""
        for request in list(self.requests.values()):
            self.finish(request, "abort")
        self._in_flight.clear()
        self.pool.retire(self._next_step)
        self.pool.forget_all()  # whatever those steps were to write may not be there

    def _schedule_decodes(self) -> tuple[list[Request], list[Chunk], list[Request], bool]:
        """One token of every sequence that has only one left to feed, by rank.

        Gives those whose token their device rows hold; those whose token the host knows, as chunks; those that have
        more left; and whether pages were short.
        """
        known: list[Chunk] = []
        prefilling: list[Request] = []
        short = False
        # With a step in flight, most of them get a token from it and go on as before.
        steady = bool(self._in_flight)
        for request in [one for one in self.running if not steady or one.num_computed >= one.decodes_until]:
            if request.status is not Status.RUNNING:
                continue  # preempted just now
            request.decodes_until = 0
            # What the step in flight writes, others can find: steps run in the order of their launches.
            self._exchange(request, self._cache.keep(request))
            num_tokens = request.num_tokens
            if request.num_computed < num_tokens - 1:
                prefilling.append(request)
            elif num_tokens >= request.max_total:
                pass  # its last token is in flight
            elif request.num_computed == len(request.pages) * self.pool.page_size and not self._grow(request):
                short = True
            elif request.in_flight and not request.miscounted:
                request.decodes_until = min(len(request.pages) * self.pool.page_size, request.max_total - 1)
            else:
                known.append(self._chunk(request, 1))
        return [one for one in self.running if one.num_computed < one.decodes_until], known, prefilling, short

    def _prompt_tokens(self, decodes: Sequence[Request], chunks: Sequence[Chunk]) -> int:
        """How many a step takes beside those of sequences that decode. Where somebody waits for their tokens, a long
        step is one long wait; a prompt that may not be cut is not held back even so, or it could be for ever."""
        left = self.config.max_tokens - len(decodes) - len(chunks)
        decoding = chain(decodes, (chunk.request for chunk in chunks))
        held_back = self.config.chunked_prefill and any(request.streamed for request in decoding)
        return min(left, self.config.max_mixed_tokens) if held_back else left

    def _admit(self, chunks: list[Chunk], room: _Room) -> None:
        """Give waiting requests rows and pages, by rank."""
        while self.waiting and self._free_rows and room.tokens and len(self.running) != self._most_running:
            request = self.waiting[0]
            found = self._cache.find(request)
            start = len(found) * self.pool.page_size
            length, fits = request.num_tokens - start, room.fit(request, start)
            if self._cache.is_coming(request, len(found)):
                break
            if fits == 0 or (not self.config.chunked_prefill and fits < length <= self.config.max_tokens):
                break
            # One more than its pages now, or it would be preempted at its first decode.
            need = self.pool.pages_for(min(request.num_tokens + 1, request.max_total - 1)) - len(found)
            if need > self.pool.num_free_beside(found):
                break
            del self.waiting[0]
            insort(self.running, request, key=_rank)
            request.status, request.row = Status.RUNNING, self._free_rows.pop()
            self._tables.set_request(request.row, request)
            self.pool.share(found)
            self._add_pages(request, found)
            request.num_computed, request.num_kept = start, len(found)
            request.miscounted = request.params.penalizes
            self._cache.admit(request, start)
            self._take_pages(request, self.pool.pages_for(request.num_tokens) - len(found))
            self._feed(request, chunks, room)

    def _feed(self, request: Request, chunks: list[Chunk], room: _Room) -> None:
        """As much of a prompt as there is room for."""
        if length := room.fit(request, request.num_computed):
            chunks.append(self._chunk(request, length))
            room.take(chunks[-1])
            self._cache.feed(request, length)

    def _chunk(self, request: Request, length: int) -> Chunk:
        start, num_known = request.num_computed, request.num_known
        return Chunk(
            request,
            request.row,
            start,
            length,
            on_device=start >= num_known,
            samples=start + length == num_known + request.in_flight,
            scored=request.scored_in(start, start + length) if request.scores_prompt else range(0),
            recounts=request.miscounted and start > 0,
        )

    def _grow(self, request: Request) -> bool:
        """Give a request one more page. False: not now, or the request itself was preempted."""
        while self.pool.num_free + self.pool.num_releasing == 0:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        if self.pool.num_free == 0:
            return False  # pages come when the step in flight retires
        self._take_pages(request, 1)
        return True

    def _take_pages(self, request: Request, count: int) -> None:
        self._add_pages(request, self.pool.allocate(count))

    def _add_pages(self, request: Request, pages: list[int]) -> None:
        request.pages += pages
        self._tables.add_pages(request.row, pages)

    def _exchange(self, request: Request, others: list[tuple[int, int]]) -> None:
        """Let a request hold other pages of equal content at some places."""
        if not others:
            return
        given = [request.pages[place] for place, _ in others]
        self.pool.share([page for _, page in others])
        self.pool.free(given, self._busy_until)
        for place, page in others:
            request.pages[place] = page
            self._tables.set_page(request.row, place, page)

    def _look_again(self, request: Request) -> None:
        """Find out with how many outputs a request needs a look."""
        prompt_len = len(request.prompt_ids)
        request.looks_at = request.max_total - prompt_len
        if request.hashes is not None:
            block = (len(request.hashes.digests) + 1) * self.pool.page_size
            request.looks_at = min(request.looks_at, block - prompt_len)

    def _preempt(self, request: Request) -> None:
        request.num_lost = request.num_computed
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
        if request.finish_reason == "error":
            self.pool.forget(request.pages)  # they may hold what is not finite
        else:
            self._exchange(request, self._cache.keep(request))
        # The row needs no such delay as the pages: whoever gets it next starts with explicit tokens and positions, in a
        # step after those in flight.
        self.pool.free(request.pages, self._busy_until)
        self._tables.clear(request.row)
        self._free_rows.append(request.row)
        request.pages, request.row, request.num_kept, request.decodes_until = [], -1, 0, 0
