"""The step input `sharing`: prefixes that sequences of a step share, so that attention can read each prefix once.

The table `sharing` is i32[G, 6]. Its first two columns are indexed by sequence, the other four by group of sequences:

OWN      the number of positions at the start of the sequence that are read once for its group; 0: it is in no group
MEMBER   the members of all groups, one group after the other, as indices of sequences in the step
FIRST    the index in the column MEMBER of the group's first member
COUNT    the number of members; 0 in the rows after the last group
LENGTH   the number of shared positions: OWN of each member
LEADER   the first member: the group's pages are the first pages of this sequence

There are at most MOST_GROUPS groups. A table of one row of zeros means that nothing is shared. Each sequence of a table
has one token in the step. The table is redundant, because the page tables of the members begin with the same pages. So
attention may ignore it.
"""

import torch

from ingot.ir.features.feature import Feature
from ingot.ir.features.fed import Fed
from ingot.ir.features.request_view import Array
from ingot.ir.features.step_input import StepInput
from ingot.ir.types import TensorType

OWN, MEMBER, FIRST, COUNT, LENGTH, LEADER = range(6)
COLUMNS = 6
# The most groups of a table: kernels read all of them at once, one per thread of a warp.
MOST_GROUPS = 32


def _sharing(array: Array, fed: Fed) -> None:
    array[:] = 0 if fed.sharing is None else fed.sharing


SHARING = Feature("sharing", inputs=(StepInput("sharing", TensorType(torch.int32, ("G", COLUMNS)), 0, _sharing),))
