"""A layer with several residual streams, as in Gemma 3n: it computes one and updates all (AltUp)."""

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
    """A layer with several residual streams: attention in parallel to LAuReL, then a feed-forward part.

    altup    number of streams, and how the layer updates them
    laurel   the low-rank connection in parallel to attention
    input    adds the token's per-layer embedding to all streams except the first
    norm     the norms before and after attention, and before and after the feed-forward part
    """

    attention: AttentionSpec | SharedAttentionSpec
    mlp: GatedSpec
    altup: AltUpSpec
    laurel: LaurelSpec
    input: PerLayerInputSpec
    norm: NormSpec

    def build(self, place: Place, hidden: int, index: int) -> "StreamLayer":
        return StreamLayer(self, place, hidden, index)


class StreamLayer(Block):
    """A layer with several residual streams: the streams [T, streams, hidden] before it -> the streams after it."""

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
        """Return the streams [T, streams, hidden] after the layer.

        streams      the streams before the layer [T, streams, hidden]
        embeddings   the tokens' per-layer embeddings, for all layers [T, layers, width]
        at           positions of the tokens, with the rotary tables
        """
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
        """Return how many rewrites passes must apply across the layer's parts: pass name -> count.

        merge-linears merges attention's first linears with LAuReL's first one: they read the same norm.
        fuse-add-rms-norm fuses the add after the feed-forward part with the router's norm.
        """
        first = (self.attention.first, self.laurel.first)
        return {"merge-linears": merges(sum(first, ())) - sum(map(merges, first)), "fuse-add-rms-norm": 1}
