"""A decoder that pools: it returns the hidden state of the last token as the vector of a sequence."""

from typing import Any

import pytest
import torch
from changed_definition import change_definition
from torch import nn

from ingot.ir.features import EndingUse
from ingot.ir.types import TensorType
from ingot.models.architectures import Entry
from ingot.models.blocks.decoder import Decoder

INPUTS = {name: TensorType(torch.int32, ("T",)) for name in ("tokens", "positions", "token_seqs")}


class Hidden(nn.Module):
    """A decoder without its head."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Any, positions: Any, token_seqs: Any) -> torch.Tensor:
        at = self.decoder.at(positions, token_seqs)
        h = self.decoder.embed(tokens, at)
        for layer in self.decoder.layers:
            h = layer(h, at)
        return self.decoder.norm(h)


def pool_by(patch: pytest.MonkeyPatch, **attributes: int | str) -> None:
    """Give Qwen3 the ending `pool`, with these attributes, until the patch ends."""
    ending = EndingUse("pool", tuple(attributes.items()))

    def entries(spec: Any, decoder: Decoder) -> dict[str, Entry]:
        return {"main": Entry(Hidden(decoder), INPUTS, ("hidden",), ending)}

    change_definition(patch, "Qwen3ForCausalLM", more_entries=entries)
