"""Checkpoints of four layers: deep enough that a fault has a layer, small enough that 200 of them are compiled."""

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny import TINY
from tiny_checkpoint import Tiny

LAYERS = 4
_FULL, _SLIDING = "full_attention", "sliding_attention"

# Groups of 32 for quantizing; square projections, whose transposition fits; heads that two ranks share.
_SQUARE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 256,
}
_GROUPED = {**_SQUARE, "num_key_value_heads": 2, "intermediate_size": 64}
# One head of k and v, which two ranks share.
_SINGLE = {**_SQUARE, "num_key_value_heads": 1}


def _deep(name: str, *, seed: int, **changes: Any) -> Tiny:
    """A tiny checkpoint with four layers, and windows on every other one where it has a list of them."""
    tiny = TINY[name]
    config = {**tiny.config, "num_hidden_layers": LAYERS, **changes}
    if "layer_types" in config:
        config["layer_types"] = [_SLIDING, _FULL] * (LAYERS // 2)
    return replace(tiny, name=f"{tiny.family}-deep", config=config, seed=seed, shards=1)


DEEP: Mapping[str, Tiny] = {
    "llama": _deep("llama-plain", seed=41, **_SQUARE),
    "llama-biased": _deep("llama-biased", seed=42, **_GROUPED),
    "llama-single": _deep("llama-scaled", seed=53, **_SINGLE),
    "qwen2": _deep("qwen2-window", seed=43, **_GROUPED),
    "qwen3": _deep("qwen3-plain", seed=44, **_SQUARE),
    "qwen3-grouped": _deep("qwen3-scaled", seed=45, **_GROUPED),
    "gemma2": _deep("gemma2-capped", seed=46, **_GROUPED),
    "gemma3": _deep("gemma3_text-new", seed=47, **_SQUARE),
    "phi3": _deep("phi3-short", seed=48),
    "olmo2": _deep("olmo2-biased", seed=49, **_GROUPED),
    "granite": _deep("granite-scaled", seed=50, **_SQUARE),
    "cohere": _deep("cohere-normed", seed=51, **_GROUPED),
    "smollm3": _deep("smollm3-nope", seed=52, **_GROUPED),
}


def checkpoint(model: str, folder: Path) -> Path:
    """The folder of the checkpoint `model`, written on the first call."""
    place = folder / "checkpoints" / model
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        made = DEEP[model].write(Path(tempfile.mkdtemp(dir=place.parent)))
        with contextlib.suppress(OSError):  # another process was first, with the same bytes
            made.rename(place)
    return place
