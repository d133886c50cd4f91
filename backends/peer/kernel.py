"""The kernel of an all-reduce over memory that the GPUs of a mesh axis share, and of a residual add after it.

Each GPU writes its values into the memory of the others, and each word that arrives shows by itself that it has. So no
flag follows the values, for which a GPU would first wait until the others have them.

`layout.py` describes this memory.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from ingot.backends.peer.layout import BLOCKS, COUNTS, ERROR, LATE, SLOT_BYTES, VALUES, WORD_BYTES
from ingot.backends.peer.wait import READS, look

_BLOCKS: tl.constexpr = tl.constexpr(BLOCKS)
_COUNTS: tl.constexpr = tl.constexpr(COUNTS)
_ERROR: tl.constexpr = tl.constexpr(ERROR)
_LATE: tl.constexpr = tl.constexpr(LATE)
_READS: tl.constexpr = tl.constexpr(READS)
_SLOT_WORDS: tl.constexpr = tl.constexpr(SLOT_BYTES // WORD_BYTES)
_VALUES: tl.constexpr = tl.constexpr(VALUES)
_WORD_BYTES: tl.constexpr = tl.constexpr(WORD_BYTES)
# What is sent for a word of all ones, whose complement would be 0: another NaN, in each of its halves too.
_NAN: tl.constexpr = tl.constexpr(~0x7FFFFFFF)


@triton.jit
def all_reduce(
    x,
    residual,
    result,
    own,
    shared,
    words,
    vectors,
    place,
    timeout,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Add x of all ranks element by element in the order of ranks, in float32, and write the rounded sum to `result`.

    If `residual` is not None, add it to the rounded sum, and round again: the bits of an add after the all-reduce.
    With one rank, x is the sum already. `own`, `shared`, `words`, `place` and `timeout` are None then.

    own       i32, this rank's shared memory
    shared    i64[RANKS]: the address of each rank's shared memory, as this GPU reaches it
    words     i32[WORDS] of the host: whether to end, and why a wait has ended
    vectors   the bytes of x, residual and result, divided by VECTOR_BYTES
    place     this rank's index
    timeout   the microseconds after which a wait for another rank ends

    BLOCK is in words of four bytes: an element of float32, or two of a smaller type. A program has slots of its own in
    each rank's memory, one for each other rank, and the programs of other indices do not matter to it. It writes its
    part of x into the slots of all others, complemented, so that no word is 0. It reads its own slots until no word is
    0, and then sets them to 0 again. The only word whose complement is 0 is a NaN, and another NaN is sent for it.

    A program uses two sets of slots in turns. It writes into another rank's slot of its call c in its call c + 2. That
    rank has set the slot to 0 by then: it did so in its call c, before it sent the values of its call c + 1, for which
    this program has waited in its call c + 1. Calls of a rank run in order.

    If a wait ends without the values, the result is undefined, and the error word says why.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    size = vectors * 4
    dtype: tl.constexpr = x.dtype.element_ty
    given = tl.multiple_of(x.to(tl.pointer_type(tl.int32)), 16)
    written = tl.multiple_of(result.to(tl.pointer_type(tl.int32)), 16)
    missing = 0
    if RANKS > 1:
        late = own + _LATE // _WORD_BYTES + program
        counts = own + _COUNTS // _WORD_BYTES + program
        # The loads of the first values, of an address and of the count take place at once: their order matters, because
        # the program waits for the count.
        value = tl.load(given + program * BLOCK + lanes, mask=program * BLOCK + lanes < size, other=0)
        next_rank = tl.load(shared + _after(place, 1, RANKS))
        count = tl.load(counts) + 1
        first = ((count & 1) * RANKS * _BLOCKS + program) * _SLOT_WORDS  # of the slots for rank 0
        sending = first + place * _BLOCKS * _SLOT_WORDS
        for tile in range(program, tl.cdiv(size, BLOCK), programs):
            at = tile * BLOCK + lanes
            if tile != program:
                value = tl.load(given + at, mask=at < size, other=0)
            sent = tl.where(value == -1, _NAN, ~value)
            for step in tl.static_range(1, RANKS):
                there = next_rank
                if step > 1:
                    there = tl.load(shared + _after(place, step, RANKS))
                slots = (there + _VALUES).to(tl.pointer_type(tl.int32)) + sending
                tl.store(tl.multiple_of(slots, 16) + lanes, sent, mask=at < size)
            sending += BLOCK

    for tile in range(program, tl.cdiv(size, BLOCK), programs):
        at = tile * BLOCK + lanes
        mask = at < size
        value = tl.load(given + at, mask=mask, other=0)
        if residual is not None:
            more = tl.load(tl.multiple_of(residual.to(tl.pointer_type(tl.int32)), 16) + at, mask=mask, other=0)
        if RANKS > 1:
            for rank in tl.static_range(RANKS):
                part = value
                if rank != place:
                    slot = own + _VALUES // _WORD_BYTES + first + rank * _BLOCKS * _SLOT_WORDS + lanes
                    if missing == 0:
                        part, missing = _arrived(slot, mask, late, words, rank, timeout)
                if rank == 0:
                    low, high = _halves(part, dtype)  # not 0 + part, which loses the sign of -0
                else:
                    next_low, next_high = _halves(part, dtype)
                    low += next_low
                    high += next_high
            first += BLOCK
        else:
            low, high = _halves(value, dtype)
        if residual is not None:
            low, high = _rounded(low, dtype), _rounded(high, dtype)
            more_low, more_high = _halves(more, dtype)
            low += more_low
            high += more_high
        if missing == 0:
            tl.store(written + at, _word(low, high, dtype), mask=mask)
    if RANKS > 1:
        tl.debug_barrier()  # all threads have read the count
        tl.store(counts, count)
        if missing != 0:
            tl.store(words + _ERROR, missing)


@triton.jit
def _after(place, step: tl.constexpr, RANKS: tl.constexpr):
    """Return the index of the rank `step` places after `place`, in a circle."""
    return tl.where(place + step < RANKS, place + step, place + step - RANKS)


@triton.jit
def _arrived(slot, mask, late, words, rank, timeout):
    """Return the words of another rank once all have arrived, and 0; set the slot to 0 for its next values.

    If the wait ends before, the words are undefined, and the second value is what the error word says.

    All threads of a program make the same decision, because it is of the words of all.
    """
    missing = 0
    begin = globaltimer()
    reads = 0
    found = tl.load(slot, mask=mask, other=1, volatile=True)
    empty = tl.max((found == 0).to(tl.int32), axis=0)
    while (empty != 0) & (missing == 0):
        reads += 1
        if reads == _READS:
            reads = 0
            missing = look(begin, late, words, rank, timeout)
        found = tl.load(slot, mask=mask, other=1, volatile=True)
        empty = tl.max((found == 0).to(tl.int32), axis=0)
    tl.store(slot, tl.zeros_like(found), mask=mask)
    return ~found, missing


@triton.jit
def _halves(word, dtype: tl.constexpr):
    """Return the elements of words in float32: of a small type the lower and the upper one, of float32 one twice."""
    if dtype == tl.float32:
        low = word.to(tl.float32, bitcast=True)
        high = low
    else:
        low = (word & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _rounded(value, dtype: tl.constexpr):
    return value.to(dtype).to(tl.float32)


@triton.jit
def _word(low, high, dtype: tl.constexpr):
    """Return the words of what `_halves` returns, rounded."""
    if dtype == tl.float32:
        word = low.to(tl.int32, bitcast=True)
    else:
        lower = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        upper = high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
        word = lower | upper
    return word
