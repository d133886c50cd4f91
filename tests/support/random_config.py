"""Random configurations of each family, within what transformers takes: sizes, flags, rotary types, windows, scales.

Sizes and constants go to their ends: one head, one layer, odd widths, an epsilon that vanishes or that rules.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

_FULL, _SLIDING = "full_attention", "sliding_attention"
_GELU = ("gelu", "gelu_pytorch_tanh")


def random_config(architecture: str, model_type: str, draw: random.Random) -> dict[str, Any]:
    """A config.json of `architecture`."""
    if model_type == "gpt2":
        return _gpt2(architecture, draw)
    kv_heads = draw.choice([1, 1, 2, 3, 4])
    heads, head_dim = kv_heads * draw.choice([1, 2, 3, 4]), 2 * draw.randint(1, 16)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": draw.randint(3, 150),
        "num_hidden_layers": draw.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": draw.randint(1, 200),
        "vocab_size": draw.randint(3, 700),
        "max_position_embeddings": draw.choice([32, 100, 160, 4096, 131072]),
        "tie_word_embeddings": draw.random() < 0.5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        draw.choice(["dtype", "torch_dtype"]): draw.choice(["float32", "float32", "bfloat16", "float16"]),
    }
    if draw.random() < 0.3:  # the size of a head is derived, save where a family has a default of its own
        config["hidden_size"] = heads * head_dim
        if model_type in ("llama", "mistral", "qwen2", "phi3", "granite", "olmo2", "olmo3", "cohere", "smollm3"):
            del config["head_dim"]
    elif model_type in (
        "helium",
        "phi",
        "phi3",
    ):  # the output projection is square; the length of factors follows from both
        config["hidden_size"] = heads * head_dim
    elif model_type in _HIDDEN_OF_HEADS:
        config["hidden_size"] = heads * draw.randint(1, 30)
    eps = "layer_norm_eps" if model_type in ("cohere", "cohere2", "phi") else "rms_norm_eps"
    config[eps] = _log(draw, 1e-12, 1.0)
    if model_type not in _ROPE_OF_THEIR_OWN:
        _spell_rope(config, _rope(draw, config, ("default", "linear", "llama3", "dynamic", "yarn", "longrope")), draw)
    for flag in _FLAGS.get(model_type, ()):
        if draw.random() < 0.7:
            config[flag] = draw.random() < 0.5
    _EXTRAS.get(model_type, _nothing)(config, draw)
    return config


def _gpt2(architecture: str, draw: random.Random) -> dict[str, Any]:
    """Sizes have names of their own."""
    heads = draw.randint(1, 6)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "gpt2",
        "n_embd": heads * draw.randint(1, 20),
        "n_layer": draw.randint(1, 4),
        "n_head": heads,
        "n_inner": draw.choice([None, draw.randint(1, 200)]),
        "n_positions": draw.choice([160, 200, 1024]),
        "vocab_size": draw.randint(3, 700),
        "activation_function": draw.choice(["gelu_new", *_GELU]),
        "layer_norm_epsilon": _log(draw, 1e-12, 1.0),
        "bos_token_id": 1,
        "eos_token_id": 2,
        draw.choice(["dtype", "torch_dtype"]): draw.choice(["float32", "float32", "bfloat16", "float16"]),
    }
    for flag in ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "tie_word_embeddings"):
        if draw.random() < 0.7:
            config[flag] = draw.random() < 0.5
    return config


def _nothing(config: dict[str, Any], draw: random.Random) -> None:
    """A family whose fields all stand above."""


def _log(draw: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** draw.random())


def _rope(draw: random.Random, config: Mapping[str, Any], kinds: tuple[str, ...]) -> dict[str, Any]:
    """A rotary table of one of `kinds`, with its base."""
    kind = draw.choice(kinds)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": _log(draw, 2.0, 1e7)}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotary_dim = int(head_dim * config.get("partial_rotary_factor", 1.0))
    if kind == "dynamic" and rotary_dim < 4:
        return {**rope, "rope_type": "default"}
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        rope["factor"] = _log(draw, 1.0, 40.0)
    if kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = draw.randint(8, 200)
    if kind == "llama3":
        low = _log(draw, 0.3, 4.0)
        rope |= {"low_freq_factor": low, "high_freq_factor": low * _log(draw, 1.1, 9.0)}
    if kind == "yarn":
        rope |= draw.choice([{}, {"beta_fast": 8.0, "beta_slow": 0.7}, {"truncate": False}, {"attention_factor": 1.3}])
        rope |= draw.choice([{}, {"mscale": 1.4, "mscale_all_dim": 0.6}])
    if kind == "longrope":
        rope |= {
            name: [_log(draw, 0.5, 8.0) for _ in range(rotary_dim // 2)] for name in ("short_factor", "long_factor")
        }
        rope |= draw.choice([{}, {"factor": 3.5}, {"attention_factor": 1.2}])
    return rope


def _spell_rope(config: dict[str, Any], rope: dict[str, Any], draw: random.Random) -> None:
    """Write the table in the new spelling or in the old one."""
    if draw.random() < 0.5:
        config["rope_parameters"] = rope
        return
    config["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope


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
    rope = _rope(draw, config, ("default", "longrope"))
    if rope["rope_type"] == "longrope":
        rope.pop("factor", None)  # Phi-3's is the ratio of the two maxima
        config["original_max_position_embeddings"] = rope["original_max_position_embeddings"] = original
        config["max_position_embeddings"] = max(original, config["max_position_embeddings"])
    _spell_rope(config, rope, draw)


def _phi(config: dict[str, Any], draw: random.Random) -> None:
    config["hidden_act"] = draw.choice(["gelu_new", *_GELU])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    config["partial_rotary_factor"] = 2 * draw.randint(1, head_dim // 2) / head_dim
    _spell_rope(config, _rope(draw, config, ("default", "linear", "llama3", "yarn")), draw)


def _gemma(config: dict[str, Any], draw: random.Random) -> None:
    config["hidden_act"] = "gelu_pytorch_tanh"


def _gemma2(config: dict[str, Any], draw: random.Random) -> None:
    config["hidden_activation"] = draw.choice(_GELU)
    config["query_pre_attn_scalar"] = draw.randint(1, 300)
    _window(config, draw)
    if draw.random() < 0.5:
        _layer_types(config, draw)
    if config["model_type"] == "gemma2":
        config["attn_logit_softcapping"] = draw.choice([None, _log(draw, 0.5, 100.0)])
    config["final_logit_softcapping"] = draw.choice([None, _log(draw, 0.5, 100.0)])


def _two_ropes(config: dict[str, Any], draw: random.Random) -> None:
    full = _rope(draw, config, ("default", "linear", "llama3", "yarn"))
    config["rope_parameters"] = {
        _FULL: full,
        _SLIDING: {"rope_type": "default", "rope_theta": _log(draw, 2.0, 1e7)},
    }


def _gemma3(config: dict[str, Any], draw: random.Random) -> None:
    _gemma2(config, draw)
    if "layer_types" not in config:
        config["sliding_window_pattern"] = draw.randint(1, 4)
    if draw.random() < 0.5:
        _two_ropes(config, draw)
        return
    rope = _rope(draw, config, ("default", "linear"))
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_local_base_freq": _log(draw, 2.0, 1e6)}
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope


def _olmo3(config: dict[str, Any], draw: random.Random) -> None:
    _window(config, draw)
    if draw.random() < 0.5:
        _layer_types(config, draw)
    _two_ropes(config, draw)


def _granite(config: dict[str, Any], draw: random.Random) -> None:
    for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"):
        if draw.random() < 0.8:
            config[name] = _log(draw, 0.05, 10.0 if name != "attention_multiplier" else 1.0)


def _cohere(config: dict[str, Any], draw: random.Random) -> None:
    config["logit_scale"] = _log(draw, 0.02, 5.0)


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
_ROPE_OF_THEIR_OWN = ("phi", "phi3", "gemma3_text", "olmo3")
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
    "phi": ("qk_layernorm",),
}
_EXTRAS: Mapping[str, Callable[[dict[str, Any], random.Random], None]] = {
    "mistral": _mistral,
    "ministral": _ministral,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "phi": _phi,
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
