"""Prefixes that sequences of a step have in common, so that attention can read them once for all of them.

The table `sharing` is i32[G, 6]. Its first two columns are by sequence, the other four by group of sequences:

OWN      positions at the beginning of the sequence that its group reads; 0: it is in no group
MEMBER   the members of all groups, one group after the other: the number of a sequence in the step
FIRST    where the members of the group begin in the column MEMBER
COUNT    how many there are; 0 in the rows after the last group
LENGTH   positions that they share: what OWN is for each of them
LEADER   the first member: the group's pages are the first pages of this sequence

There are at most MOST_GROUPS groups. A table of one row, all zeros, says that nothing is shared. Sequences of a table
feed one token each. The table is redundant: the page tables of the members begin with the same pages, so attention may
ignore it.
"""

import torch

from ingot.ir.features.asking import Array
from ingot.ir.features.feature import Feature
from ingot.ir.features.fed import Fed
from ingot.ir.features.step_input import StepInput
from ingot.ir.types import TensorType

OWN, MEMBER, FIRST, COUNT, LENGTH, LEADER = range(6)
COLUMNS = 6
# Groups of a table at most: kernels look at all of them at once, a thread of a warp at each.
MOST_GROUPS = 32


def _sharing(array: Array, fed: Fed) -> None:
    array[:] = 0 if fed.sharing is None else fed.sharing


SHARING = Feature("sharing", inputs=(StepInput("sharing", TensorType(torch.int32, ("G", COLUMNS)), 0, _sharing),))
