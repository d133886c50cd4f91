"""Compute rotary frequencies in float64, one by one, to check rotary tables against an independent implementation."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Attrs = Mapping[str, Any]


def frequencies(attrs: Attrs) -> np.ndarray:
    """Return the rotary frequency (angle per position) of each pair of head elements. `attrs` are the attributes of the
    recipe step that makes the rope table; `rope_type` among them selects the formula."""
    pairs = int(attrs["rotary_dim"]) // 2
    return np.array([_FREQUENCY[str(attrs["rope_type"])](attrs, pair) for pair in range(pairs)])


def _plain(attrs: Attrs, pair: int) -> float:
    """Return theta^(-2i/d), the rotary frequency of pair i among the d rotated elements of a head, as in RoFormer
    (arXiv 2104.09864)."""
    return math.exp(-math.log(float(attrs["theta"])) * 2 * pair / int(attrs["rotary_dim"]))


def _llama3(attrs: Attrs, pair: int) -> float:
    """Return a pair's rotary frequency with Llama 3's context scaling. The frequency is divided if the pair makes few
    turns in the original context, unchanged if it makes many turns, and interpolated in between."""
    plain = _plain(attrs, pair)
    turns = float(attrs["original_max_position"]) * plain / (2 * math.pi)
    low, high = float(attrs["low_freq_factor"]), float(attrs["high_freq_factor"])
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return kept * plain + (1 - kept) * plain / float(attrs["factor"])


def _dynamic(attrs: Attrs, pair: int) -> float:
    """Return a pair's rotary frequency with dynamic NTK scaling: theta grows with the ratio of the context length to
    the original context length."""
    dim, factor, original = int(attrs["rotary_dim"]), float(attrs["factor"]), float(attrs["original_max_position"])
    more = max(float(attrs["positions"]), original) / original
    theta = float(attrs["theta"]) * (factor * more - factor + 1) ** (dim / (dim - 2))
    return _plain({**attrs, "theta": theta}, pair)


def _yarn(attrs: Attrs, pair: int) -> float:
    """Return a pair's rotary frequency with YaRN scaling (arXiv 2309.00071), which mixes the plain frequency and the
    one divided by `factor`.

    The share of the divided one grows linearly over the pairs. It is 0 at the pair that makes `beta_fast` turns in the
    original context, and 1 at the pair that makes `beta_slow`.
    """
    dim, original = int(attrs["rotary_dim"]), float(attrs["original_max_position"])
    ends = [
        dim / 2 * math.log(original / (2 * math.pi * float(attrs[beta]))) / math.log(float(attrs["theta"]))
        for beta in ("beta_fast", "beta_slow")
    ]
    if attrs["truncate"]:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], dim - 1)
    divided = min(1.0, max(0.0, (pair - first) / (last - first or 0.001)))
    return _plain(attrs, pair) * (1 - divided + divided / float(attrs["factor"]))


def _longrope(attrs: Attrs, pair: int) -> float:
    """Return a pair's rotary frequency with LongRoPE scaling (arXiv 2402.13753). It has a divisor for each pair, from
    one list for short contexts and another for long ones."""
    beyond = int(attrs["positions"]) > float(attrs["original_max_position"])
    return _plain(attrs, pair) / float(attrs["long_factor" if beyond else "short_factor"][pair])


_FREQUENCY: Mapping[str, Callable[[Attrs, int], float]] = {
    "default": _plain,
    "linear": lambda attrs, pair: _plain(attrs, pair) / float(attrs["factor"]),
    "llama3": _llama3,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
}
