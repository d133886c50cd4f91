"""Trees of drafts: where a node stands, and what it sees of its step."""

import torch

from ingot.ir.features.asking import Array
from ingot.ir.features.feature import Feature, OpCall, RowState
from ingot.ir.features.fed import Fed
from ingot.ir.features.step_input import StepInput
from ingot.ir.types import TensorType


def _ancestors(array: Array, fed: Fed) -> None:
    array[:] = 0  # the host feeds no trees: their nodes are drafts, which the device knows


# What a token sees of those that its sequence feeds, in bits (`ingot.ir.ops.tree`), by the parents of the drafts.
TREE = Feature(
    "tree",
    inputs=(StepInput("ancestors", TensorType(torch.int64, ("T",)), 0, _ancestors, known=False),),
    rows=(RowState("parents", torch.int32, ("drafted",)),),
    before=(OpCall("tree_ancestors", ("ancestors",)),),
)

# Positions of nodes, after `sequences` has given those of tokens one after the other.
TREE_POSITIONS = Feature("tree_positions", before=(OpCall("tree_positions", ("positions",)),))

# What an entry that proposes trees leaves beside drafts: the parent of each.
TREE_PROPOSALS = Feature("tree_proposals", rows=(RowState("parents", like="proposed_parents"),))
