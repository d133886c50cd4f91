"""The sizes of sums for which the kernels are chosen before NCCL."""

from ingot.backends.peer.layout import MOST_RANKS

# The most bytes of a sum by the kernel in `kernel.py`, by the number of ranks. NCCL, or the kernel of two ranks in
# `push.py`, adds larger sums.
#
# Two ranks: the kernel took 4.5, 4.9, 6.5, 7.9 and 10.6 us for 16 kB, 64 kB, 256 kB, 512 kB and 1 MB on two H200s, and
# NCCL 7.0, 7.5, 8.7, 10.4 and 14.9 (benchmarks/results/collectives.json). With a residual added in the same launch, one
# run of 1 MB took 97 us, for a reason that is not known yet. So 512 kB are the limit.
#
# More ranks: not measured. Each reads the values of all others, so the bytes grow with the ranks, and at some size a
# sum in two steps is faster. vLLM changes to one at these sizes (csrc/custom_all_reduce.cuh), and here NCCL follows.
MOST_BYTES = {2: 512 << 10, 4: 512 << 10, MOST_RANKS: 256 << 10}

# The most bytes of a sum by the kernel in `push.py`. Not measured yet. This is the most that it can add: it counts
# elements in 32 bits with a sign, and one element has two bytes or more.
MOST_PUSHED_BYTES = 2 << 30
