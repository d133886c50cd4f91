"""Compute the tables of constants of recipes in float64, to check tables against an independent implementation."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Attrs = Mapping[str, Any]


def expected_table(attrs: Attrs) -> tuple[np.ndarray, np.ndarray]:
    """Return a table of constants, and the error that each of its elements in float32 may have.

    `attrs` are the attributes of the recipe step that makes the table. The attribute `kind` selects it.
    """
    return _TABLES[attrs["kind"]](attrs)


def _rope(attrs: Attrs) -> tuple[np.ndarray, np.ndarray]:
    angles = np.outer(np.arange(int(attrs["positions"])), _frequencies(attrs))
    factor = float(attrs.get("attention_factor", 1.0))
    # Frequencies and angles are rounded to float32, in a few operations.
    allowed = 1e-6 * (1 + np.concatenate([angles, angles], -1)) * factor
    return np.concatenate([np.cos(angles), np.sin(angles)], -1) * factor, allowed


def _alibi(attrs: Attrs) -> tuple[np.ndarray, np.ndarray]:
    slopes = np.array([_slope(attrs, head) for head in range(int(attrs["heads"]))])
    return slopes, np.finfo(np.float32).eps * slopes


def _ones(attrs: Attrs) -> tuple[np.ndarray, np.ndarray]:
    return np.ones(int(attrs["size"])), np.zeros(int(attrs["size"]))


def _hadamard(attrs: Attrs) -> tuple[np.ndarray, np.ndarray]:
    common = np.bitwise_count(np.bitwise_and.outer(*[np.arange(int(attrs["size"]))] * 2))
    return 1.0 - 2.0 * (common % 2), np.zeros(common.shape)


def _slope(attrs: Attrs, head: int) -> float:
    """Return the ALiBi slope of a head (arXiv 2108.12409).

    With 2^n heads, slopes are a geometric sequence. With more heads, those after the first 2^n have every other slope
    of the sequence for 2^(n+1) heads.
    """
    first = 1 << int(attrs["heads"]).bit_length() - 1
    exponent = (head + 1) / first if head < first else (2 * (head - first) + 1) / (2 * first)
    return float(attrs["factor"]) * math.exp(-math.log(2) * float(attrs["flattest"]) * exponent)


def _frequencies(attrs: Attrs) -> np.ndarray:
    """Return the rotary frequency (angle per position) of each pair of rotated elements of a head.

    The attribute `rope_type` selects the formula.
    """
    pairs = int(attrs["rotary_dim"]) // 2
    return np.array([_FREQUENCY[str(attrs["rope_type"])](attrs, pair) for pair in range(pairs)])


def _plain(attrs: Attrs, pair: int) -> float:
    """Return the rotary frequency theta^(-2i/d) of pair i, as in RoFormer (arXiv 2104.09864).

    d is `rotary_dim`, the number of rotated elements of a head.
    """
    return math.exp(-math.log(float(attrs["theta"])) * 2 * pair / int(attrs["rotary_dim"]))


def _llama3(attrs: Attrs, pair: int) -> float:
    """Return a pair's rotary frequency with the context scaling of Llama 3.

    It depends on how many turns the pair makes in the original context. With few turns, the frequency is divided by
    `factor`. With many turns, it is unchanged. In between, it is interpolated.
    """
    plain = _plain(attrs, pair)
    turns = float(attrs["original_max_position"]) * plain / (2 * math.pi)
    low, high = float(attrs["low_freq_factor"]), float(attrs["high_freq_factor"])
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return kept * plain + (1 - kept) * plain / float(attrs["factor"])


def _dynamic(attrs: Attrs, pair: int) -> float:
    """Return a pair's rotary frequency with dynamic NTK scaling.

    Theta grows with the ratio of the context length to the original context length.
    """
    dim, factor, original = int(attrs["rotary_dim"]), float(attrs["factor"]), float(attrs["original_max_position"])
    more = max(float(attrs["positions"]), original) / original
    theta = float(attrs["theta"]) * (factor * more - factor + 1) ** (dim / (dim - 2))
    return _plain({**attrs, "theta": theta}, pair)


def _yarn(attrs: Attrs, pair: int) -> float:
    """Return a pair's rotary frequency with YaRN scaling (arXiv 2309.00071).

    It is a mix of two frequencies: the plain one, and the plain one divided by `factor`. The share of the divided one
    grows linearly over the pairs. It is 0 at the pair that makes `beta_fast` turns in the original context. It is 1 at
    the pair that makes `beta_slow` turns.
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
    """Return a pair's rotary frequency with LongRoPE scaling (arXiv 2402.13753).

    The plain frequency is divided by a number for this pair. The number comes from the list `short_factor`, or from
    `long_factor` if the context is longer than the original one.
    """
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
_TABLES: Mapping[str, Callable[[Attrs], tuple[np.ndarray, np.ndarray]]] = {
    "rope": _rope,
    "alibi": _alibi,
    "ones": _ones,
    "hadamard": _hadamard,
}
