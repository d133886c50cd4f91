"""The features of speculative decoding: drafts that an entry proposes, and the states through which it gets inputs."""

import torch

from ingot.ir.features.feature import Feature, OpCall, RowState

# The drafts of each sequence, in a state. A step may run them in place of tokens from the host.
DRAFTS = Feature(
    "drafts",
    rows=(RowState("drafts", torch.int32, ("drafted",)),),
    before=(OpCall("take_drafts", ("tokens",)),),
)

# The hidden state from which the last token of a sequence was sampled: a row of the entry's output `hidden` [L, …],
# kept in the state `kept_hidden`.
HIDDEN = Feature(
    "hidden",
    rows=(RowState("kept_hidden", like="hidden"),),
    after=(OpCall("write_rows", ("kept_hidden",), {"state": "kept_hidden", "values": "hidden", "index": "taken"}),),
)

# The inputs of a proposing entry, a row per sequence: `last_tokens` i32[B] and `hidden` [B, …].
PROPOSALS = Feature(
    "proposals",
    rows=(
        RowState("last_token", torch.int32),
        RowState("kept_hidden", like="hidden"),
        RowState("drafts", like="proposed"),
    ),
    before=(
        OpCall("read_rows", ("last_tokens",), {"state": "last_token"}),
        OpCall("read_rows", ("hidden",), {"state": "kept_hidden"}),
    ),
)
