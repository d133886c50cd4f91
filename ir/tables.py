"""Tables that recipes compute from constants: rotary tables (by `rope_type`), ALiBi slopes, ones, Hadamard matrices.

Every function in `ROPE_TYPES` returns frequencies. A rotary table is f32[positions, rotary_dim]: cosines in the first
half of a row, sines in the second.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ingot.ir.errors import ConfigError

Attrs = Mapping[str, Any]


def _base_frequencies(attrs: Attrs) -> torch.Tensor:
    """Return the rotary frequencies f32[d/2]: theta^(-2i/d) for i < d/2 (arXiv 2104.09864, section 3.2.2).

    They are computed in float32, as in training (transformers, modeling_rope_utils.py). Float64 would round a quarter
    of them differently, and shift angles by 4e-3 radians at position 100,000.
    """
    dim = int(attrs["rotary_dim"])
    return 1.0 / (float(attrs["theta"]) ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _default(attrs: Attrs) -> torch.Tensor:
    return _base_frequencies(attrs)


def _linear(attrs: Attrs) -> torch.Tensor:
    """Return rotary frequencies for position interpolation: all are divided by `factor` (arXiv 2306.15595)."""
    return _base_frequencies(attrs) / float(attrs["factor"])


def _llama3(attrs: Attrs) -> torch.Tensor:
    """Return rotary frequencies scaled as in Llama 3.1.

    Low frequencies are divided by `factor`. High frequencies are kept. Between them, the two are blended linearly. If
    both limits are equal, as in Llama 4 Scout, there is nothing between them.
    """
    frequencies = _base_frequencies(attrs)
    factor, original = float(attrs["factor"]), float(attrs["original_max_position"])
    low, high = float(attrs["low_freq_factor"]), float(attrs["high_freq_factor"])
    wavelengths = 2 * math.pi / frequencies
    turns = original / wavelengths
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0) if high != low else (turns > low).to(turns.dtype)
    return frequencies * (blend + (1 - blend) / factor)


def _dynamic(attrs: Attrs) -> torch.Tensor:
    """Return rotary frequencies by dynamic NTK scaling.

    Theta grows if `positions` exceeds the original context length.
    """
    dim, positions = int(attrs["rotary_dim"]), int(attrs["positions"])
    factor, original = float(attrs["factor"]), float(attrs["original_max_position"])
    stretch = factor * max(positions, original) / original - (factor - 1)
    return _base_frequencies({**attrs, "theta": float(attrs["theta"]) * stretch ** (dim / (dim - 2))})


def _yarn(attrs: Attrs) -> torch.Tensor:
    """Return rotary frequencies by YaRN (arXiv 2309.00071).

    High frequencies are kept. Low frequencies are divided by `factor`. Between them, the two are blended linearly.
    """
    dim, theta, factor = int(attrs["rotary_dim"]), float(attrs["theta"]), float(attrs["factor"])
    original = float(attrs["original_max_position"])

    def dim_of(rotations: float) -> float:
        """Return the index, not rounded, of the frequency with this many rotations over the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(float(attrs["beta_fast"])), dim_of(float(attrs["beta_slow"]))
    if attrs["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width is a step
    frequencies = _base_frequencies(attrs)
    divided = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (1 - divided) + frequencies / factor * divided


def _longrope(attrs: Attrs) -> torch.Tensor:
    """Return rotary frequencies by LongRoPE: each is divided by a factor from a list (arXiv 2402.13753).

    The list is `long_factor` if the compiled context is longer than the original one, else `short_factor`.
    """
    long = int(attrs["positions"]) > float(attrs["original_max_position"])
    factors = torch.tensor(attrs["long_factor" if long else "short_factor"], dtype=torch.float32)
    return _base_frequencies(attrs) / factors


ROPE_TYPES: Mapping[str, Callable[[Attrs], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _alibi_slopes(attrs: Attrs) -> torch.Tensor:
    """Return the ALiBi slopes f32[heads]: 2 ** (-flattest * i / P) for i = 1 to P, times `factor`.

    P is the least power of two >= `heads`. `flattest` is the exponent of the flattest slope, 8 in the paper. For
    `heads` < P, the slopes of even i come first, then those of odd i. The first `heads` of them are returned, as the
    paper's authors do (arXiv 2108.12409; transformers, modeling_bloom.py and modeling_mpt.py).
    """
    heads = int(attrs["heads"])
    power = 1 << (heads - 1).bit_length()
    numbers = torch.arange(1, power + 1, dtype=torch.float64)
    slopes = torch.exp2(-float(attrs["flattest"]) * numbers / power)
    if power != heads:
        slopes = torch.cat([slopes[1::2], slopes[::2]])[:heads]
    return (slopes * float(attrs["factor"])).float()


def _hadamard(size: int) -> torch.Tensor:
    """Return the Hadamard matrix f32[size, size] of ±1 by Sylvester's construction. `size` is a power of two.

    An element is the parity of the bits that its row and column have in common.
    """
    if size < 1 or size & (size - 1):
        raise ConfigError(f"a Hadamard matrix of {size}", expected="a power of two")
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def make_table(attrs: Attrs) -> torch.Tensor:
    """Return the table of constants that `attrs` describes. Its key `kind` selects the table:

    "rope": f32[positions, rotary_dim], cosines and then sines, times `attention_factor`. `rope_type` selects the
    frequencies.

    "alibi": f32[heads], slopes from `heads`, `flattest` and `factor`.

    "ones": f32[size], the gains of a norm without weights.

    "hadamard": f32[size, size], of ±1.

    Raises ConfigError for an unknown kind.
    """
    if attrs.get("kind") == "ones":
        return torch.ones(int(attrs["size"]))
    if attrs.get("kind") == "hadamard":
        return _hadamard(int(attrs["size"]))
    if attrs.get("kind") == "alibi":
        return _alibi_slopes(attrs)
    if attrs.get("kind") != "rope" or attrs.get("rope_type") not in ROPE_TYPES:
        raise ConfigError(
            f"unknown table {attrs.get('kind')!r} / {attrs.get('rope_type')!r}",
            expected=f"ones, alibi, hadamard, or rope with {', '.join(ROPE_TYPES)}",
        )
    frequencies = ROPE_TYPES[str(attrs["rope_type"])](attrs)
    positions = torch.arange(int(attrs["positions"]), dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * float(attrs.get("attention_factor", 1.0))
