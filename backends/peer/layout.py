"""The layout of the memory that each GPU shares with the others of its mesh axis: flags, counts, and values.

    flags    i32[BLOCKS, MOST_RANKS]         flags[b, r]: the calls for which block b of rank r has published its values
    counts   i32[BLOCKS]                     the calls that block b of this rank has computed
    late     i32[BLOCKS]                     whether a wait of block b of this rank has lasted too long
    values   u8[2, BLOCKS, SLOT_BYTES]       what block b of this rank publishes, for even and odd counts

Only this rank writes its counts, values and late words. Every other rank writes its own column of the flags.
"""

# Thread blocks of a call at most. All must run at once, because each waits for its like on the other GPUs: an H200 has
# 132 multiprocessors.
BLOCKS = 128
MOST_RANKS = 8  # GPUs of a host that NVLink switches connect, in HGX boards
WARPS = 4
# Bytes that a thread reads at once (ld.global.v4.b32).
VECTOR_BYTES = 16
TILE_BYTES = WARPS * 32 * VECTOR_BYTES  # of one round of a thread block
ROUNDS = 4
SLOT_BYTES = ROUNDS * TILE_BYTES
# The most bytes of a call; NCCL adds larger values. Each rank reads all values of every other rank, and a ring moves
# fewer bytes for each rank, which matters more with more bytes.
MOST_BYTES = BLOCKS * SLOT_BYTES

FLAG_BYTES = BLOCKS * MOST_RANKS * 4
COUNTS = FLAG_BYTES  # where the counts begin
LATE = COUNTS + BLOCKS * 4  # where the late words begin
VALUES = LATE + BLOCKS * 4  # where the values begin: a multiple of 16
# The driver shares memory in units of 2 MiB. With whole units, no other allocation is shared too.
_UNIT = 2 << 20
SHARED_BYTES = -(-(VALUES + 2 * MOST_BYTES) // _UNIT) * _UNIT

# Words of host memory that the kernel reads and writes: i32[2].
ABORT, ERROR = 0, 1
WORDS = 2
# The error word of a call that the abort word ended. After a timeout, it is 1 + the rank that did not come.
ABORTED = -1

# How long a kernel waits for another rank, as ranks wait for each other to connect: one may have loaded its weights
# minutes before another one. The thread that watches the ranks finds a fault far earlier, and ends the wait.
TIMEOUT_MICROSECONDS = 600_000_000
