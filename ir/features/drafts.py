"""Tokens that an entry of the model proposes for each sequence, and what it reads of the model's own work."""

import torch

from ingot.ir.features.feature import Feature, OpCall, RowState

# `drafts` is what a later step may feed in place of tokens that the host knows.
DRAFTS = Feature(
    "drafts",
    rows=(RowState("drafts", torch.int32, ("drafted",)),),
    before=(OpCall("take_drafts", ("tokens",)),),
)

# The hidden state from which the last token of a sequence was sampled: the output `hidden` [L, …] of an entry, kept in
# the row `kept_hidden`.
HIDDEN = Feature(
    "hidden",
    rows=(RowState("kept_hidden", like="hidden"),),
    after=(OpCall("write_rows", ("kept_hidden",), {"state": "kept_hidden", "values": "hidden", "index": "taken"}),),
)

# What an entry that proposes reads: inputs `last_tokens` i32[B] and `hidden` [B, …], each sequence's own.
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
