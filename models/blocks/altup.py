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
    """AltUp (Alternating Updates): a token has `streams` residual streams. Layers compute the stream number `active`.

    `norm` is the norm of the router's input.
    """

    streams: int
    active: int
    norm: NormSpec

    def active_of(self, streams: torch.Tensor, hidden: int) -> torch.Tensor:
        """Return the stream [T, hidden] that layers compute, of all `streams` [T, streams, hidden]."""
        return streams[:, self.active : self.active + 1].view(-1, hidden)


class Router(Block):
    """The router of AltUp: x [T, hidden] -> [T, streams], within ±1.

    The prediction and the correction of streams compute their weights from it.
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
    """The prediction of AltUp: the streams [T, streams, hidden] before a layer -> a guess of those after it."""

    def __init__(self, spec: AltUpSpec, place: Place) -> None:
        super().__init__()
        self.streams = spec.streams
        self.linear = Linear(place / "prediction_coefs", spec.streams, spec.streams**2)

    def forward(self, streams: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        """Return the predicted streams [T, streams, hidden]: each is itself plus a learned mix of all.

        `routed` [T, streams] is the router's output for the active stream.
        """
        return ops.mix(streams, self.linear(routed).view(-1, self.streams, self.streams)) + streams


class Correction(Block):
    """The correction of AltUp: adds the error of the active stream's prediction to all predicted streams, weighted."""

    def __init__(self, spec: AltUpSpec, place: Place, hidden: int) -> None:
        super().__init__()
        self.streams, self.hidden = spec.streams, hidden
        self.linear = Linear(place / "correction_coefs", spec.streams, spec.streams)

    def forward(
        self, predicted: torch.Tensor, active: torch.Tensor, computed: torch.Tensor, routed: torch.Tensor
    ) -> torch.Tensor:
        """Return the corrected streams [T, streams, hidden].

        `predicted` are the predicted streams, and `active` [T, hidden] is the active one of them. `computed` is the
        layer's result for it, and `routed` [T, streams] the router's output for `computed`.
        """
        weights, missed = self.linear(routed) + 1.0, computed + active * -1.0
        return ops.mix(missed.view(-1, 1, self.hidden), weights.view(-1, self.streams, 1)) + predicted


class Streams(Block):
    """Computes the residual streams that the first layer reads, from the embedding of the tokens."""

    def __init__(self, spec: AltUpSpec, place: Place, hidden: int) -> None:
        super().__init__()
        self.spec, self.hidden, others = spec, hidden, spec.streams - 1
        parts = [(place / "altup_projections" / index).source("weight") for index in range(others)]
        self.weight = parameter((others * hidden, hidden), recipe.concat(parts), place.dtype)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Return the streams [T, streams, hidden]: h [T, hidden] itself, and projections of it, scaled to its RMS."""
        first, shape = h.view(-1, 1, self.hidden), (-1, self.spec.streams - 1, self.hidden)
        return ops.concat(first, ops.match_rms(ops.linear(h, self.weight).view(*shape), first, least=_LEAST), dim=1)


class JoinedStreams(Block):
    """Joins the residual streams after the last layer into one hidden state."""

    def __init__(self, spec: AltUpSpec, place: Place, hidden: int) -> None:
        super().__init__()
        self.spec, self.hidden = spec, hidden
        for index in range(spec.streams - 1):
            self.add_module(f"{index}", Linear(place / "altup_unembed_projections" / index, hidden, hidden))

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the hidden state [T, hidden] of streams [T, streams, hidden].

        It is the mean of the first stream and of projections of the others, each scaled to the RMS of the first.
        """
        first = total = streams[:, :1].view(-1, self.hidden)
        for index in range(self.spec.streams - 1):
            stream = streams[:, index + 1 : index + 2].view(-1, self.hidden)
            total = total + ops.match_rms(self.get_submodule(f"{index}")(stream), first, least=_LEAST)
        return total * (1.0 / self.spec.streams)
