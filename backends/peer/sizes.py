"""The sizes of sums for which the kernels are chosen before NCCL."""

from ingot.backends.peer.layout import MOST_RANKS

# The most bytes of a sum by the kernel in `kernel.py`, by the number of ranks. NCCL, or the kernel of two ranks in
# `push.py`, adds larger sums.
#
# Two ranks: the kernel took 2.3, 2.6, 3.2, 4.3 and 6.3 us for 8 kB, 64 kB, 256 kB, 512 kB and 1 MB on two H200s, the
# kernel in `push.py` 4.3, 5.3, 6.5, 7.2 and 8.7, and NCCL 6.9, 7.3, 8.6, 10.2 and 14.1
# (benchmarks/results/collectives.json). It has memory for 1 MiB.
#
# More ranks: not measured. Each reads the values of all others, so the bytes grow with the ranks, and at some size a
# sum in two steps is faster. vLLM changes to one at these sizes (csrc/custom_all_reduce.cuh), and here NCCL follows.
MOST_BYTES = {2: 1 << 20, 4: 512 << 10, MOST_RANKS: 256 << 10}

# The most bytes of a sum by the kernel in `push.py`: it counts elements in 32 bits with a sign, and one element has two
# bytes or more. It took 18.0, 56.7 and 200 us for 4, 16 and 64 MB, and NCCL 32.5, 75.6 and 245.
MOST_PUSHED_BYTES = 2 << 30
