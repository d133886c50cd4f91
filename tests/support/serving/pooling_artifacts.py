"""Artifacts of tiny models that pool, for tests of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from changed_definition import change_definition
from command_world import write_checkpoint
from torch import nn

from ingot.ir.features import EndingUse
from ingot.ir.types import TensorType
from ingot.models.architectures import Entry
from ingot.models.blocks.decoder import Decoder

INPUTS = {name: TensorType(torch.int32, ("T",)) for name in ("tokens", "positions", "token_seqs")}
POSITIONS = 64
CLASSES = 3
# By name of the artifact: the attributes of its ending, and the width of its vectors (0: the hidden size).
KINDS: dict[str, tuple[dict[str, int | str], int]] = {
    "embed": ({"pooling": "mean", "unit": 1}, 0),
    "classify": ({"classes": 1}, CLASSES),
}


class Headless(nn.Module):
    """A decoder without its head. It returns the first `width` elements of each hidden state; with 0, all."""

    def __init__(self, decoder: Decoder, width: int) -> None:
        super().__init__()
        self.decoder, self.width = decoder, width

    def forward(self, tokens: Any, positions: Any, token_seqs: Any) -> torch.Tensor:
        at = self.decoder.at(positions, token_seqs)
        h = self.decoder.embed(tokens, at)
        for layer in self.decoder.layers:
            h = layer(h, at)
        h = self.decoder.norm(h)
        return h[:, : self.width] if self.width else h


def write_pooling_artifacts(folder: Path) -> dict[str, Path]:
    """Compile the tiny model of the commands' tests with each ending of `KINDS`. Returns the artifacts by name."""
    from ingot import compile_model

    checkpoint = write_checkpoint(folder / "tiny", max_position_embeddings=POSITIONS)
    limits = {"max_batch": 4, "max_tokens": 64, "max_seq_len": POSITIONS}
    made: dict[str, Path] = {}
    for name, (attributes, width) in KINDS.items():
        ending = EndingUse("pool", tuple(attributes.items()))

        def entries(spec: Any, decoder: Decoder, ending: EndingUse = ending, width: int = width) -> dict[str, Entry]:
            return {"main": Entry(Headless(decoder, width), INPUTS, ("hidden",), ending)}

        with pytest.MonkeyPatch.context() as patch:
            change_definition(patch, "Qwen3ForCausalLM", more_entries=entries)
            made[name] = folder / f"{name}.ingot"
            compile_model(checkpoint, made[name], target="cpu", backend="reference", jobs=1, **limits)
    return made
