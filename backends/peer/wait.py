"""The wait of a program for its like on another GPU, which the kernels of this backend share."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from ingot.backends.peer.layout import ABORT, ABORTED, ERROR

_ABORT: tl.constexpr = tl.constexpr(ABORT)
_ABORTED: tl.constexpr = tl.constexpr(ABORTED)
_ERROR: tl.constexpr = tl.constexpr(ERROR)
# Reads of a flag between two looks at the clock and at host memory. A read takes some 0.5 µs of an L2 cache's latency,
# so looks are some 16 ms apart. A look crosses PCIe, and hundreds of programs look at once, which takes a millisecond.
# With looks after 256 reads, each GPU made the other one wait until it looked too: a sum of 16 MB took 0.7 ms.
READS = 1 << 15
_READS: tl.constexpr = tl.constexpr(READS)


@triton.jit
def wait(flag, count, late, words, other, timeout):
    """Wait until a flag has the value `count`, or a later one. Return 0 then, and otherwise what the error word says.

    flag      i32, in this rank's shared memory: what the same program of another rank has counted
    late      i32: whether a wait of this program has lasted too long
    words     i32[WORDS] of the host: whether to end, and why a wait has ended
    other     the index of the other rank
    timeout   the microseconds after which the wait ends

    Counts are compared by their difference, which is right also after they overflow. All threads of a program must
    make the same decision: one of them reads the flag by an atomic operation, and the others get its value.
    """
    missing = 0
    begin = globaltimer()
    reads = 0
    behind = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - count
    while (behind < 0) & (missing == 0):
        reads += 1
        if reads == _READS:
            reads = 0
            missing = look(begin, late, words, other, timeout)
        behind = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - count
    return missing


@triton.jit
def look(begin, late, words, other, timeout):
    """Return why a wait must end, as the error word says it; 0: it may go on.

    begin     when the wait began, by the clock `globaltimer`
    late, words, other, timeout   as of `wait`

    All threads of a program make the same decision: one of them reads each word by an atomic operation, and the others
    get its value. So the clock, which each thread reads, goes through the word `late` of this program.
    """
    # A wait is of no use after an earlier one has ended without values: the error word then keeps its value.
    missing = tl.atomic_add(words + _ERROR, 0, sem="relaxed", scope="sys")
    if tl.atomic_add(words + _ABORT, 0, sem="relaxed", scope="sys") != 0:
        missing = _ABORTED
    waited = (globaltimer() - begin) // 1000
    was_late = tl.atomic_max(late, (waited > timeout).to(tl.int32), sem="relaxed", scope="gpu")
    if (was_late != 0) & (missing == 0):
        missing = other + 1
    return missing
