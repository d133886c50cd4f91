"""The masks of a step: for each sequence with a grammar, the tokens that may come next."""

import os
import time
from collections.abc import Collection, Sequence
from typing import Any

import llguidance
import numpy as np
import torch

from ingot.ir.features.request_view import Array
from ingot.ir.ops.logit_edits import WORD_BITS
from ingot.runtime.grammar.compiling import readable
from ingot.runtime.grammar.limits import FAST_SECONDS
from ingot.runtime.grammar.matcher import Matcher
from ingot.runtime.grammar.params import FAILED
from ingot.runtime.scheduling.edited_rows import MaskedRow, MaskRows
from ingot.runtime.scheduling.request import End, Request

# Threads that may compute the masks of a step, besides one alone. Most masks take 5 to 20 us, and a few take
# milliseconds. To hand masks over and to wait took 0.5 to 3 ms on two busy cores, most of it to wake threads; it
# depends on the machine and on what else runs there. So the time of each number is measured, and the fastest computes.
_THREADS = (4, 15)
# From so many masks on, a step may use threads.
_LEAST_MASKS = 8
# One of so many steps tries another number of threads than the fastest. If that takes twice as long, 3 % are lost.
_TRY_EVERY = 32
# The share of the newest step in a mean time.
_NEWEST = 0.1
# After so long, the masks that this thread has not computed go to threads in any case.
_ALONE_SECONDS = 2e-3


class _Way:
    """A way to compute the masks of a step: by this thread, or by `threads` others.

    seconds   (attribute) the mean time of a mask; None: not tried yet
    """

    def __init__(self, threads: int = 0) -> None:
        self.executor = llguidance.LLExecutor(threads) if threads else None
        self.seconds: float | None = None

    def took(self, seconds: float) -> None:
        before = seconds if self.seconds is None else self.seconds
        self.seconds = before + _NEWEST * (seconds - before)


class Masks:
    """Computes the masks of steps, by as many threads as are fastest on this machine.

    The results are valid until the next call of `fill`. In a serving loop, the ending of a step has then run.

    vocab_size   the size of the model's vocabulary
    words        the i32 words of a mask of llguidance, whose vocabulary may be larger
    max_batch    the most sequences in a step
    surplus      end tokens of llguidance's tokenizer that the model does not have, so no mask allows them
    pin_memory   allocate page-locked memory, for non-blocking copies to a GPU
    """

    def __init__(
        self, vocab_size: int, words: int, max_batch: int, surplus: Collection[int] = (), *, pin_memory: bool
    ) -> None:
        self._words = -(-vocab_size // WORD_BITS)
        self._computed = torch.zeros((max_batch, words), dtype=torch.int32, pin_memory=pin_memory)
        self._address, self._row_bytes = self._computed.data_ptr(), words * self._computed.itemsize
        self._rows = torch.zeros(max_batch, dtype=torch.int64, pin_memory=pin_memory)
        # Without the words of tokens that the model does not have.
        self._cut = torch.zeros((max_batch, self._words), dtype=torch.int32, pin_memory=pin_memory)
        cores = len(os.sched_getaffinity(0))
        numbers = sorted({min(threads, max(1, cores - 1)) for threads in _THREADS})
        self._ways = [_Way(), *map(_Way, numbers)]
        self._steps = 0  # whose masks threads could have computed
        self._vocab_size, self._surplus = vocab_size, tuple(surplus)
        self._slow = False  # the last masks took long, so the next are computed one by one, to find the slow ones

    def fill(self, masked: Sequence[MaskedRow]) -> tuple[MaskRows, list[tuple[Request, End]]]:
        """Return the masks of the sequences of a step, and the sequences that end now, for want of a next token.

        Sequences that have ended since the step was built are left out.
        """
        live = [one for one in masked if one.request.end is None]
        matchers: list[Matcher] = []
        for request, _ in live:
            assert request.matcher is not None
            request.matcher.advance(request.output_ids)
            matchers.append(request.matcher)
        forced = [one.matcher.forced(len(one.output_ids))[:1] for one, _ in live if one.matcher is not None]
        self._compute(matchers, forced)
        self._rows.numpy()[: len(live)] = [one.row for one in live]
        masks: Array = self._computed.numpy()[:, : self._words]
        for (request, _), matcher, mask in zip(live, matchers, masks, strict=False):
            if matcher.free:
                mask[:] = -1
            self._limit(mask, request)
        ended: list[tuple[Request, End]] = []
        some: list[bool] = np.any(masks[: len(live)], axis=1).tolist()
        for (request, _), matcher, known, any_left in zip(live, matchers, forced, some, strict=True):
            if not known and matcher.error:
                ended.append((request, End("error", FAILED + readable(matcher.error))))
            elif not any_left:
                reason = FAILED + "no token may come next, with the request's other limits"
                ended.append((request, End("stop") if matcher.complete and not known else End("error", reason)))
        words = self._computed[: len(live)]
        if words.shape[1] != self._words:
            words = self._cut[: len(live)].copy_(words[:, : self._words])
        return MaskRows(self._rows[: len(live)], words), ended

    def look_ahead(self, masked: Sequence[MaskedRow], most: int) -> list[Request]:
        """Find up to `most` tokens that the grammar of each sequence forces next. Call it after `fill`, with the same
        sequences, while the device runs the ending of the step.

        Returns the sequences with several forced tokens. Takes some 20 us for each token. Without the time for more,
        the last sequences are left out until the next step.
        """
        found: list[Request] = []
        begin = time.perf_counter()
        for request, _ in masked:
            if request.end is not None or request.matcher is None:
                continue
            if request.matcher.look_ahead(len(request.output_ids), most, self._exists):
                found.append(request)
                if time.perf_counter() - begin > FAST_SECONDS:
                    break
        return found

    def _compute(self, matchers: Sequence[Matcher], forced: Sequence[Sequence[int]]) -> None:
        """Write the mask of each matcher into its row of `_computed`. `forced` has the next token of each matcher if it
        is known to be the only one, else nothing."""
        for place, known in enumerate(forced):
            if known:
                row: Array = self._computed.numpy()[place]
                row[:] = 0
                row[known[0] // WORD_BITS] = ~_without(known[0])
        working = [(place, one) for place, one in enumerate(matchers) if not (one.free or forced[place])]
        if self._slow:
            self._slow = False
            for place, one in working:
                begin = time.thread_time()  # not the time in which a busy machine runs other work
                self._compute_one(place, one)
                if (taken := time.thread_time() - begin) > FAST_SECONDS:
                    one.seconds += taken
                    self._slow = True
            return
        way = self._way(len(working))
        begin = time.perf_counter()
        if way.executor is None:
            self._alone(working, begin)
        else:
            self._together(way.executor, working)
        taken = time.perf_counter() - begin
        if len(working) >= _LEAST_MASKS:
            way.took(taken / len(working))
        self._slow = taken > FAST_SECONDS

    def _way(self, count: int) -> _Way:
        """Return the way to compute `count` masks: the fastest so far, and now and then another one."""
        if count < _LEAST_MASKS:
            return self._ways[0]
        self._steps += 1
        turn, rest = divmod(self._steps, _TRY_EVERY)
        if rest == 0:
            return self._ways[turn % len(self._ways)]
        return min(self._ways, key=lambda way: 0.0 if way.seconds is None else way.seconds)

    def _alone(self, working: Sequence[tuple[int, Matcher]], begin: float) -> None:
        """Compute masks in this thread. If that takes long, threads compute the rest."""
        for done, (place, one) in enumerate(working):
            if done < len(working) - 1 and time.perf_counter() - begin > _ALONE_SECONDS:
                executor = self._ways[-1].executor
                assert executor is not None
                return self._together(executor, working[done:])
            self._compute_one(place, one)

    def _compute_one(self, place: int, matcher: Matcher) -> None:
        matcher.backend.unsafe_compute_mask_ptr(self._address + place * self._row_bytes, self._row_bytes)

    def _together(self, executor: "llguidance.LLExecutor", working: Sequence[tuple[int, Matcher]]) -> None:
        tasks = [(one.backend, place) for place, one in working]
        executor.unsafe_compute_mask_ptr(tasks, self._address, self._row_bytes, self._computed.shape[0])

    def _exists(self, token: int) -> bool:
        return token < self._vocab_size and token not in self._surplus

    def _limit(self, mask: Array, request: Request) -> None:
        """Take tokens out of a mask that the request's own limits forbid: `allowed_token_ids`, single tokens of
        `bad_words`, and end tokens before `min_tokens`."""
        for token in self._surplus:
            mask[token // WORD_BITS] &= _without(token)
        edits = request.edits
        if edits is not None and edits.limits:
            np.bitwise_and(mask, edits.base[: self._words], out=mask)
        if len(request.output_ids) < request.params.min_tokens:
            # The grammar comes first: where only an end token may follow, the sequence ends.
            bits = mask.copy()
            for token in request.end_tokens():
                bits[token // WORD_BITS] &= _without(token)
            if bits.any():
                mask[:] = bits


def _without(token: int) -> Any:
    """Return a word of a mask, i32, that has all bits but that of a token."""
    return ~np.uint32(1 << token % WORD_BITS).astype(np.int32)
