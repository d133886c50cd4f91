"""Blocks of positions that a model fills by denoising them, each sequence its own."""

import torch

from ingot.ir.features.feature import Feature, OpCall, RowState

# The block that a sequence is denoising: the tokens found so far, and -1 for masked positions. A step feeds all of it.
BLOCKS = Feature(
    "blocks",
    rows=(RowState("blocks", torch.int32, ("block",)),),
    before=(OpCall("take_block", ("tokens", "found")),),
)
