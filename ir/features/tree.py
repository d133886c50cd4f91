"""The features of speculative decoding with trees of drafts: positions and ancestors of the tree's nodes."""

import torch

from ingot.ir.features.feature import Feature, OpCall, RowState
from ingot.ir.features.fed import Fed
from ingot.ir.features.request_view import Array
from ingot.ir.features.step_input import StepInput
from ingot.ir.types import TensorType


def _ancestors(array: Array, fed: Fed) -> None:
    array[:] = 0  # 0, because the nodes of a tree are drafts, which only the device knows


# The bit mask of the step's tokens that each token sees (`ingot.ir.ops.tree`), from the parents of the drafts.
TREE = Feature(
    "tree",
    inputs=(StepInput("ancestors", TensorType(torch.int64, ("T",)), 0, _ancestors, known=False),),
    rows=(RowState("parents", torch.int32, ("drafted",)),),
    before=(OpCall("tree_ancestors", ("ancestors",)),),
)

# Positions of nodes, computed from the consecutive positions of the feature `sequences`.
TREE_POSITIONS = Feature("tree_positions", before=(OpCall("tree_positions", ("positions",)),))

# The parent of each draft, written by an entry that proposes trees.
TREE_PROPOSALS = Feature("tree_proposals", rows=(RowState("parents", like="proposed_parents"),))
