"""Scales of input channels: large channels of an activation move into the weights that read it, or the reverse.

`x @ w.T` equals `(x / s) @ (w * s).T`. AWQ chooses s so that the weights of large channels lose less by rounding, and
SmoothQuant so that the activations do.
"""

from collections.abc import Sequence

import torch

from ingot.ir.formats import Format
from ingot.ir.formats.grid import Grid

# Exponents that AWQ tries. AutoAWQ tries 20 between 0 and 1; half of them take half the time.
EXPONENTS = tuple(step / 10 for step in range(1, 10))
# SmoothQuant's exponent (arXiv 2211.10438, section 4): activations and weights share the difficulty equally.
MIGRATION = 0.5
# Channels without activations keep a scale near one.
_LEAST = 1e-4


def awq_scales(
    weights: Sequence[torch.Tensor], formats: Sequence[Format], magnitude: torch.Tensor, sample: torch.Tensor
) -> torch.Tensor | None:
    """Return the scales [K] with which rounding `weights` to nearest changes their results least; None for no scales.

    The scales are a power of `magnitude` [K], the mean magnitude of each channel (AWQ, arXiv 2306.00978, section 3.2).
    `weights` are float32 [N, K] and have one input. `sample` [S, K] are rows of this input.
    """
    found, least = None, _change(weights, formats, None, sample)
    for exponent in EXPONENTS:
        scales = magnitude.clamp(min=_LEAST).pow(exponent)
        scales = scales / (scales.max() * scales.min()).sqrt()
        now = _change(weights, formats, scales, sample)
        if now < least:
            found, least = scales, now
    return found


def smooth_scales(weights: Sequence[torch.Tensor], largest: torch.Tensor) -> torch.Tensor:
    """Return SmoothQuant's scales [K], for activations with the magnitudes `largest` [K] (arXiv 2211.10438, section 4).

    `weights` are float32 [N, K] and have one input.
    """
    columns = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    scales = largest.clamp(min=_LEAST).pow(MIGRATION) / columns.clamp(min=_LEAST).pow(1 - MIGRATION)
    return scales.clamp(min=_LEAST)


def _change(
    weights: Sequence[torch.Tensor], formats: Sequence[Format], scales: torch.Tensor | None, sample: torch.Tensor
) -> float:
    """Return the squared change of the results of `sample` when the scaled weights are rounded."""
    total = 0.0
    for weight, format in zip(weights, formats, strict=True):
        scaled = weight if scales is None else weight * scales
        rounded = Grid.of(scaled, format).nearest(scaled)
        error = (rounded if scales is None else rounded / scales) - weight
        total += float((sample @ error.T).square().sum())
    return total
