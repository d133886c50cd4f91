"""A decoder that also gives its hidden states, as models of toys do."""

import torch
from torch import nn

from ingot.ir import ops
from ingot.models.dense import DenseDecoder


def decode_embeddings(
    decoder: DenseDecoder,
    h: torch.Tensor,
    positions: torch.Tensor,
    token_seqs: torch.Tensor,
    logit_rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits f32[L, vocab], what the last norm reads [L, hidden]) of a plain decoder with a head, from embeddings h
    [T, hidden]."""
    for layer in decoder.layers:
        h = layer(h, positions, token_seqs, list(decoder.ropes))
    hidden = ops.select_rows(h, logit_rows)
    return ops.cast(decoder.head(decoder.norm(hidden)), dtype=torch.float32), hidden


class DecoderWithHidden(nn.Module):
    """The decoder, with what its last norm reads as a second output."""

    def __init__(self, decoder: DenseDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, token_seqs: torch.Tensor, logit_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h = ops.embedding(tokens, self.decoder.embed.weight)
        return decode_embeddings(self.decoder, h, positions, token_seqs, logit_rows)
