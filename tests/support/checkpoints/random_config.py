"""Random configurations of each family, within what transformers takes: sizes, flags, rotary types, windows, scales.

Sizes and constants go to their ends: one head, one layer, odd widths, an epsilon that vanishes or that rules.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

from families import FAMILIES
from random_fields import GELU, flags, log, rope, sizes, spell_rope, stream_of_heads

_FULL, _SLIDING = "full_attention", "sliding_attention"


def random_config(architecture: str, model_type: str, draw: random.Random) -> dict[str, Any]:
    """A config.json of `architecture`."""
    named = {"architectures": [architecture], "model_type": model_type}
    if model_type in FAMILIES:
        return {**named, **FAMILIES[model_type].random(draw)}
    config: dict[str, Any] = {**named, **sizes(draw)}
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    if draw.random() < 0.3:  # the size of a head is derived, save where a family has a default of its own
        config["hidden_size"] = heads * head_dim
        if model_type in ("llama", "mistral", "qwen2", "phi3", "granite", "olmo2", "olmo3", "cohere", "smollm3"):
            del config["head_dim"]
    elif model_type in ("helium", "phi3"):  # the output projection is square; the length of factors follows from both
        config["hidden_size"] = heads * head_dim
    elif model_type in _HIDDEN_OF_HEADS:
        config["hidden_size"] = stream_of_heads(draw, heads)
    eps = "layer_norm_eps" if model_type in ("cohere", "cohere2") else "rms_norm_eps"
    config[eps] = log(draw, 1e-12, 1.0)
    if model_type not in _ROPE_OF_THEIR_OWN:
        spell_rope(config, rope(draw, config, ("default", "linear", "llama3", "dynamic", "yarn", "longrope")), draw)
    config |= flags(draw, *_FLAGS.get(model_type, ()))
    _EXTRAS.get(model_type, _nothing)(config, draw)
    return config


def _nothing(config: dict[str, Any], draw: random.Random) -> None:
    """A family whose fields all stand above."""


def _layer_types(config: dict[str, Any], draw: random.Random) -> None:
    config["layer_types"] = [draw.choice([_FULL, _SLIDING]) for _ in range(config["num_hidden_layers"])]


def _window(config: dict[str, Any], draw: random.Random, *, none: bool = False) -> None:
    if draw.random() < 0.85:  # else the family's default
        config["sliding_window"] = None if none and draw.random() < 0.3 else draw.randint(1, 40)


def _mistral(config: dict[str, Any], draw: random.Random) -> None:
    _window(config, draw, none=True)


def _ministral(config: dict[str, Any], draw: random.Random) -> None:
    _window(config, draw)
    if draw.random() < 0.7:
        _layer_types(config, draw)


def _qwen(config: dict[str, Any], draw: random.Random) -> None:
    config["use_sliding_window"] = draw.random() < 0.7
    _window(config, draw)
    if draw.random() < 0.5:
        config["max_window_layers"] = draw.randint(1, 4)
    elif config["use_sliding_window"]:
        _layer_types(config, draw)


def _phi3(config: dict[str, Any], draw: random.Random) -> None:
    _window(config, draw, none=True)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    config["partial_rotary_factor"] = draw.choice([1.0, 2 * draw.randint(1, head_dim // 2) / head_dim])
    original = draw.randint(8, 200)
    table = rope(draw, config, ("default", "longrope"))
    if table["rope_type"] == "longrope":
        table.pop("factor", None)  # Phi-3's is the ratio of the two maxima
        config["original_max_position_embeddings"] = table["original_max_position_embeddings"] = original
        config["max_position_embeddings"] = max(original, config["max_position_embeddings"])
    spell_rope(config, table, draw)


def _gemma(config: dict[str, Any], draw: random.Random) -> None:
    config["hidden_act"] = "gelu_pytorch_tanh"


def _gemma2(config: dict[str, Any], draw: random.Random) -> None:
    config["hidden_activation"] = draw.choice(GELU)
    config["query_pre_attn_scalar"] = draw.randint(1, 300)
    _window(config, draw)
    if draw.random() < 0.5:
        _layer_types(config, draw)
    if config["model_type"] == "gemma2":
        config["attn_logit_softcapping"] = draw.choice([None, log(draw, 0.5, 100.0)])
    config["final_logit_softcapping"] = draw.choice([None, log(draw, 0.5, 100.0)])


def _two_ropes(config: dict[str, Any], draw: random.Random) -> None:
    full = rope(draw, config, ("default", "linear", "llama3", "yarn"))
    config["rope_parameters"] = {
        _FULL: full,
        _SLIDING: {"rope_type": "default", "rope_theta": log(draw, 2.0, 1e7)},
    }


def _gemma3(config: dict[str, Any], draw: random.Random) -> None:
    _gemma2(config, draw)
    if "layer_types" not in config:
        config["sliding_window_pattern"] = draw.randint(1, 4)
    if draw.random() < 0.5:
        _two_ropes(config, draw)
        return
    table = rope(draw, config, ("default", "linear"))
    config |= {"rope_theta": table.pop("rope_theta"), "rope_local_base_freq": log(draw, 2.0, 1e6)}
    if table["rope_type"] != "default":
        config["rope_scaling"] = table


def _olmo3(config: dict[str, Any], draw: random.Random) -> None:
    _window(config, draw)
    if draw.random() < 0.5:
        _layer_types(config, draw)
    _two_ropes(config, draw)


def _granite(config: dict[str, Any], draw: random.Random) -> None:
    for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"):
        if draw.random() < 0.8:
            config[name] = log(draw, 0.05, 10.0 if name != "attention_multiplier" else 1.0)


def _cohere(config: dict[str, Any], draw: random.Random) -> None:
    config["logit_scale"] = log(draw, 0.02, 5.0)


def _cohere2(config: dict[str, Any], draw: random.Random) -> None:
    _cohere(config, draw)
    _window(config, draw)
    if draw.random() < 0.5:
        _layer_types(config, draw)
    elif draw.random() < 0.7:
        config["sliding_window_pattern"] = draw.randint(1, 4)


def _smollm3(config: dict[str, Any], draw: random.Random) -> None:
    layers = config["num_hidden_layers"]
    if draw.random() < 0.5:
        config["no_rope_layer_interval"] = draw.randint(1, 4)
    elif draw.random() < 0.5:
        config["no_rope_layers"] = [draw.randint(0, 1) for _ in range(layers)]
    if draw.random() < 0.5:
        config |= {"use_sliding_window": True, "sliding_window": draw.randint(1, 40)}
        if draw.random() < 0.5:
            _layer_types(config, draw)


def _cwm(config: dict[str, Any], draw: random.Random) -> None:
    _window(config, draw)
    if draw.random() < 0.5:
        _layer_types(config, draw)


def _exaone4(config: dict[str, Any], draw: random.Random) -> None:
    _window(config, draw, none=True)
    if config.get("sliding_window", 1) is None:  # as the small model has it; transformers derives no types then
        config["layer_types"] = [_FULL] * config["num_hidden_layers"]
    elif draw.random() < 0.3:
        _layer_types(config, draw)
    elif draw.random() < 0.7:
        config["sliding_window_pattern"] = draw.randint(1, 4)


# Whose hidden size transformers wants to be a multiple of the heads, whatever the size of a head.
_HIDDEN_OF_HEADS = ("llama", "cwm", "gemma2", "gemma3_text", "hyperclovax")
_ROPE_OF_THEIR_OWN = ("phi3", "gemma3_text", "olmo3")
_FLAGS: Mapping[str, tuple[str, ...]] = {
    "llama": ("attention_bias", "mlp_bias"),
    "qwen3": ("attention_bias",),
    "gemma": ("attention_bias",),
    "gemma2": ("attention_bias",),
    "gemma3_text": ("attention_bias",),
    "olmo2": ("attention_bias",),
    "olmo3": ("attention_bias",),
    "granite": ("attention_bias", "mlp_bias"),
    "hyperclovax": ("attention_bias", "mlp_bias", "use_post_norm"),
    "cohere": ("attention_bias", "use_qk_norm"),
    "cohere2": ("attention_bias",),
    "smollm3": ("attention_bias", "mlp_bias"),
    "seed_oss": ("attention_bias", "attention_out_bias", "mlp_bias"),
    "helium": ("attention_bias", "mlp_bias"),
    "ernie4_5": ("use_bias",),
}
_EXTRAS: Mapping[str, Callable[[dict[str, Any], random.Random], None]] = {
    "mistral": _mistral,
    "ministral": _ministral,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "phi3": _phi3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "olmo3": _olmo3,
    "granite": _granite,
    "hyperclovax": _granite,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "smollm3": _smollm3,
    "cwm": _cwm,
    "exaone4": _exaone4,
}
