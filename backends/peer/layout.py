"""The layout of the memory that each GPU shares with the others of its mesh axis: counts, and values.

    counts   i32[BLOCKS]                          the calls that block b of this rank has computed
    late     i32[BLOCKS]                          whether a wait of block b of this rank has lasted too long
    values   u8[2, ranks, BLOCKS, SLOT_BYTES]     what block b of each rank has sent, by even and odd counts; 0: nothing

Only this rank writes its counts and late words. Every other rank writes its own values, and this rank sets them to 0
when it has read them.

Two ranks have a second area after it, from PUSH on, for the kernel in `push.py`. The other rank writes its flags and
slots, and this rank its counts and late words.

    flags    i32[PUSH_PROGRAMS, 8]                     flags[p, 0]: the chunks that program p of the other rank has sent
    counts   i32[PUSH_PROGRAMS]                        the chunks that program p of this rank has sent
    late     i32[PUSH_PROGRAMS]                        as above, of program p
    slots    u8[programs, PUSH_SLOTS, chunk bytes]     the chunks that program p of the other rank has sent last
"""

# Thread blocks of a call at most. All must run at once, because each waits for its like on the other GPUs: an H200 has
# 132 multiprocessors.
BLOCKS = 128
WORD_BYTES = 4  # of a word, which has arrived as soon as it is not 0
MOST_RANKS = 8  # GPUs of a host that NVLink switches connect, in HGX boards
WARPS = 4
# Bytes that a thread reads at once (ld.global.v4.b32).
VECTOR_BYTES = 16
TILE_BYTES = WARPS * 32 * VECTOR_BYTES  # of one round of a thread block
ROUNDS = 4
SLOT_BYTES = ROUNDS * TILE_BYTES
# The most bytes of a call of `kernel.py`. Each rank gets all values of every other rank, and a ring moves fewer bytes
# for each rank, which matters more with more bytes.
MOST_BYTES = BLOCKS * SLOT_BYTES

COUNTS = 0  # where the counts begin
LATE = COUNTS + BLOCKS * 4  # where the late words begin
VALUES = LATE + BLOCKS * 4  # where the values begin: a multiple of 16

PUSH_RANKS = 2  # a chunk goes to one other GPU
# Programs on a multiprocessor. While one waits until its writes have reached the other GPU, others must send. All of a
# launch must run at once, as blocks must. 62 registers a thread leave room for four. Measured on two H200s with the
# warps and bytes below (`collectives.py --sweep`): 16 MB took 57.7 us, with one program 67, and with four 60.
PUSH_PER_CORE = 2
PUSH_WARPS = 8
# The most bytes of a chunk. Larger chunks need fewer flags, and smaller ones a shorter first and last chunk, in which
# the link is idle. 8 KiB took 65 us, and 32 KiB 58.
PUSH_CHUNK_BYTES = 16 << 10
# A chunk's slot is written again four chunks later: `push.py` says why that is enough.
PUSH_SLOTS = 4
PUSH_PROGRAMS = 1024  # for which there are flags: more than the multiprocessors of any GPU with NVLink, times four
PUSH_FLAG_BYTES = 32  # a sector of the L2 cache for each flag, which one GPU writes while another one reads it

PUSH = VALUES + 2 * PUSH_RANKS * MOST_BYTES
PUSH_COUNTS = PUSH + PUSH_PROGRAMS * PUSH_FLAG_BYTES
PUSH_LATE = PUSH_COUNTS + PUSH_PROGRAMS * 4
PUSH_VALUES = PUSH_LATE + PUSH_PROGRAMS * 4  # where the slots begin: a multiple of 128, which is a line of the L2 cache

# The driver shares memory in units of 2 MiB. With whole units, no other allocation is shared too.
_UNIT = 2 << 20


def shared_bytes(ranks: int, programs: int, chunk_bytes: int = PUSH_CHUNK_BYTES) -> int:
    """Return the bytes that each of so many ranks shares.

    programs      the most programs that push
    chunk_bytes   the most bytes of a chunk
    """
    if ranks == PUSH_RANKS:
        size = PUSH_VALUES + programs * PUSH_SLOTS * chunk_bytes
    else:
        size = VALUES + 2 * ranks * MOST_BYTES
    return -(-size // _UNIT) * _UNIT


# Words of host memory that the kernel reads and writes: i32[2].
ABORT, ERROR = 0, 1
WORDS = 2
# The error word of a call that the abort word ended. After a timeout, it is 1 + the rank that did not come.
ABORTED = -1

# How long a kernel waits for another rank, as ranks wait for each other to connect: one may have loaded its weights
# minutes before another one. The thread that watches the ranks finds a fault far earlier, and ends the wait.
TIMEOUT_MICROSECONDS = 600_000_000
