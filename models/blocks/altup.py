"""AltUp: a token has several residual streams. A layer computes one and updates the others (arXiv 2301.13310)."""

from dataclasses import dataclass

import torch

from ingot.ir import ops, recipe
from ingot.models.blocks.block import Block
from ingot.models.blocks.linear import Linear
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.params import Place, parameter

# Lower bound of a mean square when a stream is scaled to the RMS of the first (transformers, modeling_gemma3n.py).
_LEAST = 1e-5


@dataclass(frozen=True)
class AltUpSpec:
    """AltUp (Alternating Updates): each token has several residual streams, and each layer computes one of them.

    streams   number of residual streams
    active    index of the stream that the layers compute
    norm      norm of the input of the router, which computes mixing weights
    """

    streams: int
    active: int
    norm: NormSpec

    def active_of(self, streams: torch.Tensor, hidden: int) -> torch.Tensor:
        """Return the active stream [T, hidden], the one that layers compute, of all streams [T, streams, hidden]."""
        return streams[:, self.active : self.active + 1].view(-1, hidden)


class Router(Block):
    """The router of AltUp: hidden states x [T, hidden] -> [T, streams], with values from -1 to 1.

    Prediction and Correction compute their weights from this result.
    """

    def __init__(self, spec: AltUpSpec, place: Place, hidden: int) -> None:
        super().__init__()
        self.norm = Norm(spec.norm, place, hidden)
        self.linear = Linear(place / "modality_router", hidden, spec.streams)
        self.scale = 1.0 / hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A soft cap of 1 is tanh.
        return ops.soft_cap(self.linear(self.norm(x) * self.scale), cap=1.0)


class Prediction(Block):
    """Predicts the residual streams [T, streams, hidden] after a layer from the streams before it (AltUp)."""

    def __init__(self, spec: AltUpSpec, place: Place) -> None:
        super().__init__()
        self.streams = spec.streams
        self.linear = Linear(place / "prediction_coefs", spec.streams, spec.streams**2)

    def forward(self, streams: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        """Return the predicted streams [T, streams, hidden]: each old stream plus a weighted sum of all old streams.

        `routed` [T, streams] is the router's result for the active stream. A linear turns it into the weights.
        """
        return ops.mix(streams, self.linear(routed).view(-1, self.streams, self.streams)) + streams


class Correction(Block):
    """Corrects the predicted residual streams after a layer has computed the active one (AltUp).

    The prediction error is the computed stream minus the predicted one. It is added to each stream, times a weight per
    stream.
    """

    def __init__(self, spec: AltUpSpec, place: Place, hidden: int) -> None:
        super().__init__()
        self.streams, self.hidden = spec.streams, hidden
        self.linear = Linear(place / "correction_coefs", spec.streams, spec.streams)

    def forward(
        self, predicted: torch.Tensor, active: torch.Tensor, computed: torch.Tensor, routed: torch.Tensor
    ) -> torch.Tensor:
        """Return the corrected streams [T, streams, hidden].

        predicted   all predicted streams [T, streams, hidden]
        active      the prediction of the active stream [T, hidden]
        computed    the layer's result for the active stream [T, hidden]
        routed      the router's result for `computed` [T, streams]. A linear turns it into the weights.
        """
        weights, missed = self.linear(routed) + 1.0, computed + active * -1.0
        return ops.mix(missed.view(-1, 1, self.hidden), weights.view(-1, self.streams, 1)) + predicted


class Streams(Block):
    """Makes the residual streams of the first layer from the token embedding (AltUp)."""

    def __init__(self, spec: AltUpSpec, place: Place, hidden: int) -> None:
        super().__init__()
        self.spec, self.hidden, others = spec, hidden, spec.streams - 1
        parts = [(place / "altup_projections" / index).source("weight") for index in range(others)]
        self.weight = parameter((others * hidden, hidden), recipe.concat(parts), place.dtype)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Return the streams [T, streams, hidden] for the embedding h [T, hidden].

        The first stream is h. The others are projections of h, scaled to the RMS of h.
        """
        first, shape = h.view(-1, 1, self.hidden), (-1, self.spec.streams - 1, self.hidden)
        return ops.concat(first, ops.match_rms(ops.linear(h, self.weight).view(*shape), first, least=_LEAST), dim=1)


class JoinedStreams(Block):
    """Joins the residual streams after the last layer into one hidden state (AltUp)."""

    def __init__(self, spec: AltUpSpec, place: Place, hidden: int) -> None:
        super().__init__()
        self.spec, self.hidden = spec, hidden
        for index in range(spec.streams - 1):
            self.add_module(f"{index}", Linear(place / "altup_unembed_projections" / index, hidden, hidden))

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the hidden state [T, hidden] for the streams [T, streams, hidden]: their mean.

        Before that, all streams but the first are projected and scaled to the RMS of the first.
        """
        first = total = streams[:, :1].view(-1, self.hidden)
        for index in range(self.spec.streams - 1):
            stream = streams[:, index + 1 : index + 2].view(-1, self.hidden)
            total = total + ops.match_rms(self.get_submodule(f"{index}")(stream), first, least=_LEAST)
        return total * (1.0 / self.spec.streams)
