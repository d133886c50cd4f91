"""A layer of several streams: it computes one and updates all, with LAuReL and per-layer embeddings."""

from dataclasses import dataclass

import torch

from ingot.ir import ops
from ingot.models.blocks.altup import AltUpSpec, Correction, Prediction, Router
from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.block import Block
from ingot.models.blocks.feed_forward import GatedSpec
from ingot.models.blocks.laurel import LaurelSpec
from ingot.models.blocks.linear import merges
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.blocks.per_layer_embedding import PerLayerInputSpec
from ingot.models.blocks.positions import Positions
from ingot.models.blocks.shared_attention import SharedAttentionSpec
from ingot.models.params import Place


@dataclass(frozen=True)
class StreamLayerSpec:
    """A layer: attention with `laurel` in parallel, a feed-forward part, and `input`, which adds the token's embedding
    for this layer to all streams except the first. `norm` is the form of the norms around attention and feed-forward
    part."""

    attention: AttentionSpec | SharedAttentionSpec
    mlp: GatedSpec
    altup: AltUpSpec
    laurel: LaurelSpec
    input: PerLayerInputSpec
    norm: NormSpec

    def build(self, place: Place, hidden: int, index: int) -> "StreamLayer":
        return StreamLayer(self, place, hidden, index)


class StreamLayer(Block):
    """Streams [T, streams, hidden] -> the same."""

    def __init__(self, spec: StreamLayerSpec, place: Place, hidden: int, index: int) -> None:
        super().__init__()
        self.spec, self.hidden = spec, hidden
        self.router = Router(spec.altup, place / "altup", hidden)
        self.predict = Prediction(spec.altup, place / "altup")
        self.correct = Correction(spec.altup, place / "altup", hidden)
        self.attention = spec.attention.build(place, hidden, index)
        self.laurel = spec.laurel.build(place, hidden)
        self.mlp = spec.mlp.build(place, hidden, index)
        self.input = spec.input.build(place, hidden, index)
        self.attention_norm = Norm(spec.norm.named("input_layernorm"), place, hidden)
        self.attention_post_norm = Norm(spec.norm.named("post_attention_layernorm"), place, hidden)
        self.mlp_norm = Norm(spec.norm.named("pre_feedforward_layernorm"), place, hidden)
        self.mlp_post_norm = Norm(spec.norm.named("post_feedforward_layernorm"), place, hidden)

    def forward(self, streams: torch.Tensor, embeddings: torch.Tensor, at: Positions) -> torch.Tensor:
        """Run the layer. `embeddings` [T, layers, width] are the tokens' embeddings for all layers."""
        altup = self.spec.altup
        predicted = self.predict(streams, self.router(altup.active_of(streams, self.hidden)))
        active = altup.active_of(predicted, self.hidden)
        x = self.attention_norm(active)
        # The sum has two residuals, attention's and LAuReL's; the factor keeps its magnitude.
        h = (active + self.attention_post_norm(self.attention(x, at)) + self.laurel(x)) * 2**-0.5
        h = h + self.mlp_post_norm(self.mlp(self.mlp_norm(h), at))
        corrected = self.correct(predicted, active, h, self.router(h))
        added = self.input(altup.active_of(corrected, self.hidden), embeddings).view(-1, 1, self.hidden)
        return ops.concat(corrected[:, :1], corrected[:, 1:] + added, dim=1)

    def matches(self) -> dict[str, int]:
        """Count the merge of attention's linears with LAuReL's first, which read one norm, and the router's norm, which
        follows a sum."""
        first = (self.attention.first, self.laurel.first)
        return {"merge-linears": merges(sum(first, ())) - sum(map(merges, first)), "fuse-add-rms-norm": 1}
