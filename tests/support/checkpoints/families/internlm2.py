"""InternLM 2: names of its own, and the rows of wqkv by groups of heads.

The oracle is written from modeling_internlm2.py and configuration_internlm2.py, which the checkpoints of
internlm/internlm2_5-7b carry; SGLang has the configuration class (python/sglang/srt/configs/internvl.py).
"""

import random
from collections.abc import Mapping
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from oracle import Oracle, Tensors, attention, gated, linear, rms_norm, rotated, scaled_frequencies
from tiny_checkpoint import Tiny, tiny_like_llama

from families.family import Config, Family


def _tiny(name: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
        "hidden_size": 84,
        "rms_norm_eps": 0.016,
        "pad_token_id": 2,
    }
    return tiny_like_llama(name, "InternLM2ForCausalLM", seed, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, heads, width = (config[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    kv_heads, bias = config.get("num_key_value_heads") or heads, config.get("bias", True)
    head_dim, drawn = hidden // heads, DrawnWeights(generator)
    drawn.matrix("model.tok_embeddings", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        drawn.norm(f"{layer}.attention_norm", hidden)
        drawn.matrix(f"{layer}.attention.wqkv", (heads + 2 * kv_heads) * head_dim, hidden, bias=bias)
        drawn.matrix(f"{layer}.attention.wo", hidden, hidden, bias=bias)
        drawn.norm(f"{layer}.ffn_norm", hidden)
        drawn.matrix(f"{layer}.feed_forward.w1", width, hidden)
        drawn.matrix(f"{layer}.feed_forward.w3", width, hidden)
        drawn.matrix(f"{layer}.feed_forward.w2", hidden, width)
    drawn.norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        drawn.matrix("output", config["vocab_size"], hidden)
    return drawn.tensors


def _oracle(
    config: Config, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
) -> torch.nn.Module:
    heads, eps = config["num_attention_heads"], config.get("rms_norm_eps", 1e-6)
    kv_heads, bias = config.get("num_key_value_heads") or heads, config.get("bias", True)
    head_dim = config["hidden_size"] // heads
    rates = scaled_frequencies(config, head_dim, max_seq_len)

    def attended(t: Tensors, layer: str, x: torch.Tensor) -> torch.Tensor:
        groups = linear(t, f"{layer}.wqkv", x, bias=bias).view(len(x), kv_heads, heads // kv_heads + 2, head_dim)
        q, k, v = groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]
        return linear(t, f"{layer}.wo", attention(rotated(q, rates), rotated(k, rates), v), bias=bias)

    def logits(t: Tensors, ids: torch.Tensor) -> torch.Tensor:
        h = t["model.tok_embeddings.weight"][ids]
        for index in range(config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            h = h + attended(t, f"{layer}.attention", rms_norm(t, f"{layer}.attention_norm", h, eps))
            x, mlp = rms_norm(t, f"{layer}.ffn_norm", h, eps), f"{layer}.feed_forward"
            h = h + gated(t, x, f"{mlp}.w1", f"{mlp}.w3", f"{mlp}.w2")
        head = "model.tok_embeddings" if config.get("tie_word_embeddings", False) else "output"
        return linear(t, head, rms_norm(t, "model.norm", h, eps))

    return Oracle(tensors, dtype, logits)


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.square_sizes(draw)
    config |= random_fields.flags(draw, "bias")
    return {**config, **random_fields.published_rope(draw, config)}


FAMILIES = (
    Family(
        "internlm2",
        "InternLM2ForCausalLM",
        tiny=(
            # `bias` is missing and means biases; the context is longer than the one that was trained for.
            _tiny(
                "internlm2-dynamic",
                1,
                max_position_embeddings=64,
                rope_scaling={"type": "dynamic", "factor": 3.0},
                tie_word_embeddings=False,
            ),
            _tiny(
                "internlm2-tied",
                2,
                hidden_size=60,
                num_hidden_layers=2,
                num_key_value_heads=6,
                bias=False,
                rope_scaling={"type": "linear", "factor": 2.5},
                tie_word_embeddings=True,
            ),
        ),
        weights=_weights,
        random=_random,
        cut={"num_hidden_layers": 1},
        oracle=_oracle,
        bad=(
            ("internlm2-tied", "bias", "no"),
            ("internlm2-tied", "hidden_act", "gelu"),
            ("internlm2-tied", "hidden_size", 62),
            ("internlm2-tied", "head_dim", 12),
            ("internlm2-tied", "num_key_value_heads", 0),
            ("internlm2-tied", "rope_scaling", {"type": "linear"}),
        ),
    ),
)
