"""A decoder that also gives its hidden states, as models of toys do."""

import torch
from torch import nn

from ingot.ir import ops
from ingot.models.blocks.decoder import Decoder
from ingot.models.blocks.positions import Positions


def decode_embeddings(
    decoder: Decoder, h: torch.Tensor, at: Positions, logit_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits f32[L, vocab], what the last norm reads [L, hidden]) of a decoder, from embeddings h [T, hidden]."""
    for layer in decoder.layers:
        h = layer(h, at)
    hidden = ops.select_rows(h, logit_rows)
    return decoder.head(decoder.norm(hidden)), hidden


class DecoderWithHidden(nn.Module):
    """The decoder, with what its last norm reads as a second output."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, token_seqs: torch.Tensor, logit_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        at = self.decoder.at(positions, token_seqs)
        return decode_embeddings(self.decoder, self.decoder.embed(tokens, at), at, logit_rows)
