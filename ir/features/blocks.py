"""The feature of block diffusion: the model denoises a block of positions of each sequence at once."""

import torch

from ingot.ir.features.feature import Feature, OpCall, RowState

# The current block of a sequence: the tokens found so far, and -1 for masked positions. A step runs all of it.
BLOCKS = Feature(
    "blocks",
    rows=(RowState("blocks", torch.int32, ("block",)),),
    before=(OpCall("take_block", ("tokens", "found")),),
)
