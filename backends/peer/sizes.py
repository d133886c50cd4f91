"""The sizes of sums for which the kernel is chosen before NCCL."""

from ingot.backends.peer.layout import MOST_BYTES as _MOST_SHARED
from ingot.backends.peer.layout import MOST_RANKS

# The most bytes of a sum by the kernel, by the number of ranks. NCCL adds larger sums.
#
# Two ranks: the kernel took 4.5, 4.7 and 10.2 us for 8 kB, 64 kB and 1 MB on two H200s, and NCCL 6.9, 7.2 and 14.2
# (benchmarks/kernels/collectives.py). So the memory that ranks share is the limit.
#
# More ranks: not measured. Each reads the values of all others, so the bytes grow with the ranks, and at some size a
# sum in two steps is faster. vLLM changes to one at these sizes (csrc/custom_all_reduce.cuh), and here NCCL follows.
MOST_BYTES = {2: _MOST_SHARED, 4: 512 << 10, MOST_RANKS: 256 << 10}
