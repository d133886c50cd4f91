"""The kernel of an all-reduce of two GPUs for many bytes, and of a residual add after it.

Each GPU writes its values into the other's memory. Writes do not wait for the link as reads do, so they can fill it.
`layout.py` describes this memory.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.peer.layout import (
    ERROR,
    PUSH,
    PUSH_COUNTS,
    PUSH_FLAG_BYTES,
    PUSH_LATE,
    PUSH_SLOTS,
    PUSH_VALUES,
)
from ingot.backends.peer.wait import wait

_COUNTS: tl.constexpr = tl.constexpr(PUSH_COUNTS)
_ERROR: tl.constexpr = tl.constexpr(ERROR)
_FLAG_BYTES: tl.constexpr = tl.constexpr(PUSH_FLAG_BYTES)
_FLAGS: tl.constexpr = tl.constexpr(PUSH)
_LATE: tl.constexpr = tl.constexpr(PUSH_LATE)
_SLOTS: tl.constexpr = tl.constexpr(PUSH_SLOTS)
_VALUES: tl.constexpr = tl.constexpr(PUSH_VALUES)


@triton.jit
def push(
    x,
    residual,
    result,
    shared,
    words,
    vectors,
    chunk,
    place,
    timeout,
    CHUNK: tl.constexpr,
    VECTOR: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Add x of two ranks element by element in float32, and write the rounded sum to `result`.

    If `residual` is not None, add it to the rounded sum, and round again: the bits of an add after the all-reduce. A
    sum of two has the same bits in both orders.

    shared    i64[2]: the address of each rank's shared memory, as this GPU reaches it
    words     i32[WORDS] of the host: whether to end, and why a wait has ended
    vectors   the number of elements, divided by VECTOR; x, residual and result have as many
    chunk     the vectors of a chunk, CHUNK // VECTOR at most; the last chunk of x may have fewer
    place     this rank's index
    timeout   the microseconds after which a wait for the other rank ends

    Program p has the chunks p, p + programs, p + 2 * programs and so on of x, and at least one. To send a chunk, it
    writes the values into a slot of the other GPU, and then the number of chunks that it has sent into a flag there. To
    receive one, it waits for its own flag, and adds what is in its own slot. It sends a chunk before it receives the
    one before, so the link has work during a wait. All programs of a launch must run at once, because each waits for
    the same program of the other rank. Those of other indices do not matter to it.

    Chunk k of a program, counted over all calls, is in slot k % 4. It overwrites chunk k - 4 there, which the other
    rank has received by then:

    - A rank sends k after it has received k - 2: in the step before, or in an earlier call. At the end of a call, it
      has received all that it has sent.
    - So the other rank had sent k - 2 by then, and before that it had received k - 4, for the same reason.
    - Its threads read the slot of k - 4 before the barrier that precedes the flag of k - 2.

    A program sends as many chunks in a call as the same program of the other rank, because sizes are equal. Calls may
    differ in dtype, in their chunks and programs, and in the vectors of a chunk: a slot has as many bytes in all.

    If a wait ends without the values, the result is undefined, and the error word says why.
    """
    if DEPENDENT:
        gdc_launch_dependents()  # the next kernel starts when all of these programs run, so it takes no room from them
        gdc_wait()
    program, programs = tl.program_id(0), tl.num_programs(0)
    elements = vectors * VECTOR
    lanes = tl.arange(0, CHUNK)
    inside = lanes < chunk * VECTOR

    own = tl.load(shared + place)
    other = tl.load(shared + 1 - place)
    flag_place = _FLAGS + program * _FLAG_BYTES
    flag = (own + flag_place).to(tl.pointer_type(tl.int32))
    flag_of_other = (other + flag_place).to(tl.pointer_type(tl.int32))
    late = (own + _LATE).to(tl.pointer_type(tl.int32)) + program
    counts = (own + _COUNTS).to(tl.pointer_type(tl.int32)) + program
    slots_here = (own + _VALUES).to(tl.pointer_type(x.dtype.element_ty)) + program * _SLOTS * CHUNK
    slots_there = (other + _VALUES).to(tl.pointer_type(x.dtype.element_ty)) + program * _SLOTS * CHUNK

    before = tl.load(counts)
    mine = tl.cdiv(tl.cdiv(vectors, chunk) - program, programs)
    missing = 0
    step = 0
    while (step <= mine) & (missing == 0):
        if step < mine:
            count = before + step + 1
            at = (program + step * programs) * chunk * VECTOR + lanes
            mask = inside & (at < elements)
            slot = tl.multiple_of(slots_there + (count & (_SLOTS - 1)) * CHUNK, 16)
            tl.store(slot + lanes, tl.load(x + at, mask=mask), mask=mask)
            tl.debug_barrier()  # all threads have written the chunk, and read the one before, when one says so
            tl.atomic_xchg(flag_of_other, count, sem="release", scope="sys")
        if step > 0:
            count = before + step
            at = (program + (step - 1) * programs) * chunk * VECTOR + lanes
            mask = inside & (at < elements)
            # The wait hides the time of these reads. x is in the L2 cache, because it was sent a step ago.
            value = tl.load(x + at, mask=mask, other=0.0)
            if residual is not None:
                added = tl.load(residual + at, mask=mask, other=0.0)
            missing = wait(flag, count, late, words, 1 - place, timeout)
            tl.debug_barrier()  # no thread reads values before the wait is over
            if missing == 0:
                slot = tl.multiple_of(slots_here + (count & (_SLOTS - 1)) * CHUNK, 16)
                # From the L2 cache, where the other GPU has written it. (The wait has also emptied the L1 cache.)
                received = tl.load(slot + lanes, mask=mask, other=0.0, cache_modifier=".cg")
                total = (value.to(tl.float32) + received.to(tl.float32)).to(x.dtype.element_ty)
                if residual is not None:
                    total = (added.to(tl.float32) + total.to(tl.float32)).to(x.dtype.element_ty)
                tl.store(result + at, total, mask=mask)
        step += 1
    tl.store(counts, before + mine)
    if missing != 0:
        tl.store(words + _ERROR, missing)
