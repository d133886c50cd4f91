"""Continuous batching: choose the tokens of each step, and assign rows and pages to sequences.

The scheduler ranks requests by priority, then by arrival. A step first feeds one token of every decoding sequence. Then
it feeds chunks of prompts up to the token budget. Then it admits waiting requests while rows and pages are free.

When a decoding sequence needs a page and none is free, the scheduler preempts the running request of lowest rank. That
request gives up its pages and waits again. Later it recomputes all its tokens, outputs included, that the prefix cache
has lost. The scheduler also preempts when the device has no memory for a step; it then admits no request until a
running one ends. The first running request is never preempted for pages, so it finishes. With one priority for all, no
request starves.

Steps overlap: the scheduler builds step n+1 while step n runs, before the tokens of step n are known. Their number is
known ahead, so a length limit costs no surplus step. A stop costs one surplus token, which is dropped. With drafts or
denoised blocks (`ingot.runtime.scheduling.blocks`), only the largest possible number of tokens is known ahead. Tokens
that a grammar forces are known ahead, so a step may feed several of a sequence (`ingot.runtime.scheduling.forced`).

Pipeline stages compute steps of different sequences at the same time (`ingot.runtime.scheduling.stage_groups`).
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from ingot.ir.cache.groups import FULL
from ingot.ir.errors import InternalError, RequestError
from ingot.ir.logprob_limits import MAX_SCORED
from ingot.runtime.pages.pool import PagePool
from ingot.runtime.pages.prefix_cache import PrefixCache, PrefixCacheStats
from ingot.runtime.pages.sequence_pages import Pools, SequencePages
from ingot.runtime.pages.state_slots import StateSlots
from ingot.runtime.scheduling import progress, steady_decode
from ingot.runtime.scheduling.accepted import NO_ROW, Accepted, drafted_tokens, forced_tokens
from ingot.runtime.scheduling.batch import Chunk, StepBatch, build_step
from ingot.runtime.scheduling.chunks import drafted_chunk, next_chunk
from ingot.runtime.scheduling.device_rows import DeviceRows
from ingot.runtime.scheduling.forced import forced_chunks, forced_run
from ingot.runtime.scheduling.occupancy import Occupancy
from ingot.runtime.scheduling.request import INVALID_TOKEN, NOT_FINITE, End, Request, Status
from ingot.runtime.scheduling.row_tables import RowTables
from ingot.runtime.scheduling.scheduler_config import SchedulerConfig, check_servable, max_total
from ingot.runtime.scheduling.stage_groups import most_sequences, oldest_without_ending, waits
from ingot.runtime.scheduling.step_room import StepRoom, prompt_tokens
from ingot.runtime.steps.step import StepBuffer, StepLayout, StepSizes

_rank = attrgetter("rank")


class Scheduler:
    """Selects the tokens of each step, and takes the tokens that steps have sampled. `add` queues a request. Then call
    in turn `schedule`, which builds the next step, and `retire`, which takes the tokens of the step before.

    config   limits and options
    pools    the page pool of each cache group; a cache group is KV caches that share one page table
    layout   the layout of step inputs; None: all inputs that are known before a launch
    slots    the pool of slots for per-sequence states, such as Mamba's; None: the model has none
    """

    def __init__(
        self, config: SchedulerConfig, pools: Pools, layout: StepLayout | None = None, slots: PagePool | None = None
    ) -> None:
        if odd := [pool.page_size for pool in pools.values() if pool.page_size != config.page_size]:
            raise InternalError(f"pages of {odd[0]} tokens in the pool, {config.page_size} in the scheduler")
        self.config = config
        self.blocks = config.blocks
        self.requests: dict[str, Request] = {}  # not finished, by id
        self.waiting: list[Request] = []  # by rank, as `running`
        self.running: list[Request] = []
        max_pages = -(-config.max_seq_len // config.page_size)
        layout = layout or StepLayout.usual()
        # Each fed token has at most one row of logits.
        max_rows = min(config.max_tokens, config.max_batch * config.rows + MAX_SCORED)
        largest = StepSizes(config.max_tokens, config.max_batch, max_rows, max_pages, G=config.max_batch)
        # A buffer for each step in flight: step n's inputs may still be copied to the device while step n+1 is built.
        buffers = range(config.most_in_flight)
        self._buffers = [StepBuffer(layout, largest, config.pin_memory) for _ in buffers]
        self._tables = RowTables(layout.tables, config.max_batch, max_pages, len(pools), slots=slots is not None)
        cuts, size = config.chunked_prefill, config.page_size
        states = None if slots is None else StateSlots(slots, self._tables, config.blocks, size, cuts=cuts)
        self.pages = SequencePages(pools, self._tables, size, states, config.blocks)
        self.rows = DeviceRows(config.max_batch, staged=config.stages > 1)
        self._in_flight: deque[StepBatch] = deque()
        self._next_step = 0
        self._most_running: int | None = None  # no admissions at this number: a larger step ran out of memory
        self._cache = PrefixCache(self.pages, self.blocks, enabled=config.prefix_caching)
        # Shared reads need a cache that keeps every token, and one fed token per sequence, so no drafts.
        shares = FULL in self.pages.groups and "sharing" in layout.names and not config.max_drafts
        self._least_shared = config.least_shared if shares else None
        self._num_arrived = 0
        self.num_preemptions = 0  # so far; 0 with a large enough pool
        self.num_forced = 0  # tokens so far that a grammar forced and that needed no step of their own

    @property
    def occupancy(self) -> Occupancy:
        queues = len(self.waiting), len(self.running), len(self._in_flight)
        return Occupancy(*queues, self.rows.num_free, *self.pages.occupied, self.num_preemptions, self.num_forced)

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        return replace(self._cache.stats)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache and return True. While sequences hold pages, change nothing and return False. They
        would later register pages, while the cache no longer has the pages before these."""
        if self.pages.num_held or self.pages.num_releasing:
            return False
        self.pages.forget_all()
        return True

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def check(self, request: Request) -> None:
        """Raise RequestError if the scheduler can never serve the request, for example because it is too long."""
        if request.request_id in self.requests:
            where = f"request {request.request_id}"
            raise RequestError("a request with this id is being served", where=where, expected="an id of its own")
        check_servable(request, self.config, self.pages)

    def add(self, request: Request, like: Request | None = None) -> None:
        """Queue a new request. `like` is a request with the same prompt and salt, added before: its hashes of the
        prompt are copied. Raises RequestError if the scheduler can never serve the request."""
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
        """Build the next step and return it. Return None if nothing can run before the step in flight is complete."""
        if (steps := len(self._in_flight)) >= self.config.most_in_flight:
            raise InternalError(
                f"{steps} steps are in flight", where="Scheduler.schedule", expected="retire the oldest one first"
            )
        self._cache.begin_step()
        if self.pages.slots is not None:
            self.pages.slots.settle(self._busy_until)
        stages, running = self.config.stages, len(self.running)
        most = most_sequences(stages, running + min(len(self.waiting), self.rows.num_free))
        decodes, chunks, prefilling, short_of_pages = self._schedule_decodes(most_sequences(stages, running))
        room = StepRoom(self.blocks, prompt_tokens(self.config, decodes, chunks) if prefilling or self.waiting else 0)
        room.places = None if most is None else most - len(decodes) - len(chunks)
        for request in prefilling:
            if request.status is Status.RUNNING and not room.is_full:  # not preempted by `_schedule_decodes`
                self._feed(request, chunks, room)
        # While pages are short, new requests would take those that running ones wait for. A request that was preempted
        # in this step with a token in flight must wait for that token.
        if not short_of_pages:
            self._admit(chunks, room)
        if not decodes and not chunks:
            return None
        batch = build_step(
            self._next_step,
            decodes,
            chunks,
            self._tables,
            self._buffers[self._next_step % len(self._buffers)],
            self.pages.page_size,
            self.pages.groups,
            self._least_shared,
        )
        self.pages.end_step()
        self._next_step += 1
        self._in_flight.append(batch)
        progress.count(batch)
        return batch

    def retire(self, batch: StepBatch, tokens: Sequence[int], rejected: Sequence[int] | None = None) -> list[Accepted]:
        """Take the sampled tokens of the oldest step in flight, which is complete. `tokens` has one for each row of
        logits.

        `rejected[i]` is how many of the last tokens of the step's sequence i were rejected (drafts, or a block of block
        diffusion). None: no tokens were rejected.

        Returns (request, token, row of logits) of each accepted token, in order. Requests that end with one of the
        tokens are finished. Tokens after the end of a request are left out.
        """
        if len(tokens) != batch.inputs.sizes.L:
            raise InternalError(f"{len(tokens)} tokens for {batch.inputs.sizes.L} logit rows", where="Scheduler.retire")
        self._retire_step(batch)
        accepted: list[Accepted] = []
        if batch.rows is not None:
            for request, token, row in drafted_tokens(batch, tokens, rejected, self.blocks.denoised):
                self._accept(request, token, row, accepted)
        else:  # scored rows, or a dummy row, come after the sampled rows
            for row, (request, token) in enumerate(zip(batch.sampled, tokens, strict=False)):
                request.in_flight -= 1
                if request.end is None:
                    accepted.append((request, token, row))
                    output_ids = request.output_ids
                    output_ids.append(token)
                    # Most tokens end nothing, so this saves 256 calls in a step of 256 sequences.
                    if len(output_ids) >= request.looks_at or token in request.ends:
                        self._look_at(request, token)
        for request, token in forced_tokens(self._in_flight[0]) if self._in_flight else ():
            self.num_forced += 1
            self._accept(request, token, NO_ROW, accepted)
        return accepted

    def retire_pooled(self, batch: StepBatch, finite: Sequence[bool]) -> list[tuple[Request, int]]:
        """Take the results of the oldest step in flight, of a pooling model. `finite[i]` is whether the vector of the
        step's sequence i is finite. Returns (request, i) of each request whose last prompt token was in the step: its
        vector is complete. These requests are finished."""
        self._retire_step(batch)
        done: list[tuple[Request, int]] = []
        for place, chunk in enumerate(batch.chunks):
            chunk.request.in_flight -= chunk.rows
            if chunk.rows and chunk.request.end is None:
                done.append((chunk.request, place))
                self.finish(chunk.request, End("stop") if finite[place] else End("error", NOT_FINITE))
        return done

    def _retire_step(self, batch: StepBatch) -> None:
        if not self._in_flight or self._in_flight[0] is not batch:
            raise InternalError(
                f"step {batch.step} retired", where="Scheduler.retire", expected="the oldest step in flight"
            )
        self._in_flight.popleft()
        batch.inputs.drop_requests()
        self.pages.retire(batch.step)
        self.rows.retire(self._oldest_in_flight)

    def _accept(self, request: Request, token: int, row: int, accepted: list[Accepted]) -> None:
        """Append a token to a request's outputs and, with its row of logits, to `accepted`."""
        accepted.append((request, token, row))
        request.output_ids.append(token)
        self._look_at(request, token)

    def _look_at(self, request: Request, token: int) -> None:
        """Finish a request if `token`, its newest output, ends it. If the token fills a block, hash the block for the
        prefix cache."""
        request.look(token)
        if self._cache.extend(request):
            self._look_again(request)
        if request.end is not None:
            self.finish(request, request.end)

    def withdraw(self, batch: StepBatch) -> Request | None:
        """Undo the newest step in flight, because the device had no memory for it, so that a smaller step can be tried.

        If the step has one sequence, return it: it cannot continue. Else preempt some running requests and return None.
        These are the step's last sequence by rank, and all after it. In a model with per-sequence states, they are the
        step's first sequence and all after it. No request is admitted until a running one ends.
        """
        if not self._in_flight or self._in_flight[-1] is not batch:
            raise InternalError(
                f"step {batch.step} withdrawn", where="Scheduler.withdraw", expected="the newest step in flight"
            )
        self._in_flight.pop()
        self.rows.retire(self._oldest_in_flight)
        batch.inputs.drop_requests()
        progress.take_back(batch)
        for chunk in batch.chunks:
            self.pages.withdraw(chunk.request, self._busy_until)
        fed = batch.requests
        if self.pages.slots is not None:
            self.pages.slots.withdraw(fed)
        for request in fed:
            self._tables.rewrite_edits(request.row)
        if len(fed) == 1:
            return fed[0]
        ids = {request.request_id for request in fed}
        places = [place for place, request in enumerate(self.running) if request.request_id in ids]
        # Slots may already hold the states after the step, so none of its sequences can continue.
        for request in reversed(self.running[places[-1 if self.pages.slots is None else 0] :]):
            self._preempt(request)
        self._most_running = places[-1]
        return None

    def finish(self, request: Request, end: End) -> None:
        """End a request for the reason `end`, and free all that it holds on the device."""
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
        """End a request with reason "abort". Return False if no such request is being served."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self.finish(request, End("abort"))
        return True

    def reset(self) -> None:
        """End all requests with reason "abort", and forget the steps in flight: their tokens will never come."""
        for request in list(self.requests.values()):
            self.finish(request, End("abort"))
        for batch in self._in_flight:
            batch.inputs.drop_requests()
        self._in_flight.clear()
        self.rows.retire(self._oldest_in_flight)
        self.pages.retire(self._next_step)
        self.pages.forget_all()  # those steps may not have written their pages

    def _schedule_decodes(self, most: int | None) -> tuple[list[Request], list[Chunk], list[Request], bool]:
        """Schedule the next token, and drafts, of every running sequence that decodes, by rank. Returns four values:
        requests whose next token the device knows; chunks of other decoding requests; requests with prompt tokens left
        to compute; whether free pages were short.

        `most` is the most sequences of a step that several pipeline stages compute; None: any number.
        """
        chunks: list[Chunk] = []
        prefilling: list[Request] = []
        forced: list[Request] = []
        on_device: list[Request] = []  # with pipeline stages: the next step need not have them again
        short = False
        others = steady_decode.others(self.running, in_flight=bool(self._in_flight))
        if not others:
            return list(self.running), chunks, prefilling, short  # the usual case with many sequences
        for request in others:
            if request.status is not Status.RUNNING:
                continue  # preempted in this loop
            steady_decode.leave(request)
            # Others may find pages that the step in flight writes: steps run in launch order.
            if held_longer := self._cache.keep(request):
                self.pages.exchange(request, held_longer, self._busy_until)
            if self.pages.windows:
                # The host does not know yet how many drafts in flight are accepted.
                position = self.blocks.final(min(request.num_computed, request.num_known))
                self.pages.give_back(request, position, self._busy_until)
            if most is not None and (len(on_device) + len(chunks) >= most or self._waits(request)):
                continue
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
                chunks.append(next_chunk(request, 1, num_tokens, self.blocks.denoised))
            elif self.config.max_drafts and request.takes_drafts:
                chunks.append(drafted_chunk(request, self.config, self.pages, len(self.running), chunks))
            elif len(forced_run(request, self.config)) > 1:
                forced.append(request)
            elif most is not None:
                on_device.append(request)
            else:
                steady_decode.enter(request, self.pages.steady_end(request))
        if forced:
            step = self.config, self.pages, len(self.running), chunks
            chunks += forced_chunks(forced, *step, mixed=bool(prefilling))
        return on_device or steady_decode.steady(self.running), chunks, prefilling, short

    def _waits(self, request: Request) -> bool:
        """Return whether a sequence waits for a token that comes back from the last of several pipeline stages."""
        if not self._in_flight:
            return False
        host_knows = bool(self.config.max_drafts or self.blocks.denoised)
        return waits(request, oldest_without_ending(self._in_flight, self.config.stages), host_knows=host_knows)

    def look_again_at(self, requests: Sequence[Request]) -> None:
        """Check these requests one by one in the next step. Their grammars force tokens."""
        for request in requests:
            if request.takes_forced:
                steady_decode.leave(request)

    def _denoise(self, request: Request, chunks: list[Chunk], prefilling: list[Request]) -> bool:
        """Append the block that a sequence generates (block diffusion) to `chunks`. If tokens before the block are
        still to be computed, append the sequence to `prefilling` instead. Return False if free pages were short."""
        size = self.blocks.denoised
        if request.denoises and request.num_computed >= request.max_total:
            return True  # the step in flight may commit its last block
        if not self._grow(request, size):
            return False
        if not request.denoises:
            prefilling.append(request)
        else:
            start = request.num_computed
            chunks.append(Chunk(request, request.row, start, size, on_device=True, rows=size, block=size))
        return True

    def _admit(self, chunks: list[Chunk], room: StepRoom) -> None:
        """Admit waiting requests by rank, while device rows, pages and the step have room. Append the first prompt
        chunk of each to `chunks`. `room` is what is left of the step."""
        while self.waiting and self.rows.num_free and not room.is_full and len(self.running) != self._most_running:
            request = self.waiting[0]
            if self.config.stages > 1 and request.in_flight:
                break  # it was preempted, and a token of it is in flight
            found = self._cache.find(request)
            start = found.count * self.pages.page_size
            length, fits = self.blocks.fed(request.num_tokens) - start, room.fit(request, start)
            if self._cache.is_coming(request, found.count):
                break
            if fits == 0 or (not self.config.chunked_prefill and fits < length <= self.config.max_tokens):
                break
            # Room for one more token (or block), or its first decode would preempt the request.
            more = request.num_tokens + max(1, self.blocks.denoised)
            most = min(self.blocks.fed(more), self.blocks.most_fed(request.max_total))
            at_once = self.blocks.least(start, start + length) if self.config.chunked_prefill else fits
            if not self.pages.admits(request, found, most, at_once):
                break
            del self.waiting[0]
            insort(self.running, request, key=_rank)
            request.status, request.row = Status.RUNNING, self.rows.take()
            self._tables.set_request(request.row, request)
            request.num_computed, request.cached.num_kept = start, found.count
            request.cached.branch = found.branch * self.pages.page_size
            self.pages.begin(request, found)
            request.miscounted = request.params.penalizes
            self._cache.admit(request, start)
            self.pages.take(request, start + length, keeping=True)
            self._feed(request, chunks, room)

    def _feed(self, request: Request, chunks: list[Chunk], room: StepRoom) -> None:
        """Append the next chunk of a request's prompt to `chunks`, as large as free pages and the step allow. `room` is
        what is left of the step."""
        start, goal = request.num_computed, self.blocks.fed(request.num_tokens)
        fits = room.fit(request, start)
        end = self.pages.tokens_within(request, start + fits)
        if self.pages.slots is not None:
            end = self.pages.slots.cut(request, start, end, goal)
        if (length := self.blocks.piece(start, end, goal)) > 0:
            self.pages.take(request, start + length, feeding=True)
            chunks.append(next_chunk(request, length, goal, self.blocks.denoised))
            room.take(chunks[-1])
            self._cache.feed(request, length)
        elif self.blocks.granule > 1 or fits > 0:
            room.tokens = 0  # or later requests would take the room that this one waits for, step after step

    def _grow(self, request: Request, count: int = 1) -> bool:
        """Allocate pages for `count` more tokens of a request. Preempt requests that come later in rank if needed.
        Return False if no pages are free yet, or if the request itself was preempted."""
        num_tokens = request.num_computed + count
        for pool, pages in self.pages.short(request, num_tokens):
            if pool.num_free < pages and not self._make_free(pool, pages, request):
                return False
        self.pages.take(request, num_tokens)
        return True

    def _make_free(self, pool: PagePool, pages: int, request: Request) -> bool:
        """Preempt running requests, last in rank first, until `request` can get `pages` pages of `pool`. Return False
        if `request` itself was preempted, or if the pages become free only after the step in flight."""
        while pool.num_free + pool.num_releasing < pages:
            victim = self.running[-1]
            if victim is request and request.in_flight > 1:
                return False  # its windows free pages once the accepted drafts are known
            self._preempt(victim)
            if victim is request:
                return False
        return pool.num_free >= pages

    def _look_again(self, request: Request) -> None:
        """Set `request.looks_at`, the number of outputs at which `_look_at` must next be called for the request."""
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

    @property
    def _oldest_in_flight(self) -> int:
        return self._in_flight[0].step if self._in_flight else self._next_step

    def _release(self, request: Request) -> None:
        """Free all that a running request holds on the device: its row in per-sequence tensors, its KV pages and its
        state slots."""
        del self.running[bisect_left(self.running, request.rank, key=_rank)]
        failed = request.end is not None and request.end.reason == "error"
        if not failed and (others := self._cache.keep(request, last=True)):
            self.pages.exchange(request, others, self._busy_until)
        self.pages.release(request, self._busy_until, forget=failed)  # they may hold non-finite values
        self._tables.clear(request.row)
        self.rows.release(request.row, self._busy_until)
        request.row, request.denoises, request.cached.num_kept = -1, False, 0
        steady_decode.leave(request)
