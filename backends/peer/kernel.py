"""The kernel of an all-reduce over memory that the GPUs of a mesh axis share, and of a residual add after it.

`layout.py` describes this memory.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.peer.layout import BLOCKS, COUNTS, ERROR, LATE, MOST_RANKS, SLOT_BYTES, VALUES
from ingot.backends.peer.wait import wait

_BLOCKS: tl.constexpr = tl.constexpr(BLOCKS)
_COUNTS: tl.constexpr = tl.constexpr(COUNTS)
_ERROR: tl.constexpr = tl.constexpr(ERROR)
_LATE: tl.constexpr = tl.constexpr(LATE)
_MOST_RANKS: tl.constexpr = tl.constexpr(MOST_RANKS)
_SLOT_BYTES: tl.constexpr = tl.constexpr(SLOT_BYTES)
_VALUES: tl.constexpr = tl.constexpr(VALUES)


@triton.jit
def all_reduce(
    x,
    residual,
    result,
    shared,
    words,
    vectors,
    place,
    timeout,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Add x of all ranks element by element in the order of ranks, in float32, and write the rounded sum to `result`.

    If `residual` is not None, add it to the rounded sum, and round again: the bits of an add after the all-reduce.
    With one rank, x is the sum already. `shared`, `words`, `place` and `timeout` are None then.

    shared    i64[RANKS]: the address of each rank's shared memory, as this GPU reaches it
    words     i32[WORDS] of the host: whether to end, and why a wait has ended
    vectors   the number of elements, divided by VECTOR; x, residual and result have as many
    place     this rank's index
    timeout   the microseconds after which a wait for another rank ends

    Each program publishes its part of x in this rank's shared memory, and waits until the same program of every other
    rank has published its part. A program has slots of its own, and the programs of other indices do not matter to it.
    It uses two slots in turns. A rank overwrites a slot in its call c + 2, after every other rank has published call
    c + 1. Calls of a rank run in order, so each has read the slot in its call c by then.

    If a wait ends without the values, the result is undefined, and the error word says why.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    program, programs = tl.program_id(0), tl.num_programs(0)
    elements = vectors * VECTOR
    lanes = tl.arange(0, BLOCK)
    missing = 0
    if RANKS > 1:
        own = tl.load(shared + place)
        counts = (own + _COUNTS).to(tl.pointer_type(tl.int32))
        late = (own + _LATE).to(tl.pointer_type(tl.int32)) + program
        count = tl.load(counts + program) + 1
        slot = _VALUES + ((count & 1) * _BLOCKS + program).to(tl.int64) * _SLOT_BYTES

        values = tl.multiple_of((own + slot).to(tl.pointer_type(x.dtype.element_ty)), 16)
        for tile in range(program, tl.cdiv(elements, BLOCK), programs):
            at = tile * BLOCK + lanes
            value = tl.load(x + at, mask=at < elements)
            tl.store(values + (tile // programs) * BLOCK + lanes, value, mask=at < elements)
        tl.debug_barrier()  # all threads have published before one of them says so

        for step in tl.static_range(1, RANKS):
            other = (place + step) % RANKS
            flags = tl.load(shared + other).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + program * _MOST_RANKS + place, count, sem="release", scope="sys")
        for step in tl.static_range(1, RANKS):
            other = (place + step) % RANKS
            flag = own.to(tl.pointer_type(tl.int32)) + program * _MOST_RANKS + other
            if missing == 0:
                missing = wait(flag, count, late, words, other, timeout)
        tl.debug_barrier()  # no thread reads values before the wait is over
        tl.store(counts + program, count)
        if missing != 0:
            tl.store(words + _ERROR, missing)

    if missing == 0:
        for tile in range(program, tl.cdiv(elements, BLOCK), programs):
            at = tile * BLOCK + lanes
            mask = at < elements
            if RANKS > 1:
                place_in_slot = (tile // programs) * BLOCK + lanes
                total = tl.zeros((BLOCK,), dtype=tl.float32)
                for rank in tl.static_range(RANKS):
                    begin = (tl.load(shared + rank) + slot).to(tl.pointer_type(x.dtype.element_ty))
                    part = tl.load(tl.multiple_of(begin, 16) + place_in_slot, mask=mask, other=0.0).to(tl.float32)
                    if rank == 0:
                        total = part  # not 0 + part, which loses the sign of -0
                    else:
                        total += part
                total = total.to(x.dtype.element_ty)
            else:
                total = tl.load(x + at, mask=mask, other=0.0)
            if residual is not None:
                added = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
                total = (added + total.to(tl.float32)).to(x.dtype.element_ty)
            tl.store(result + at, total, mask=mask)
