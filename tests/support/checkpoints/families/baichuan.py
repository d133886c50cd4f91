"""Baichuan 1 and 2: q, k and v in one tensor; the larger models have ALiBi, and the second ones a normed head.

The oracle is written from the modeling_baichuan.py files that checkpoints of baichuan-inc carry: Baichuan-7B (rotary),
Baichuan-13B-Chat (ALiBi), Baichuan2-7B-Chat and Baichuan2-13B-Chat (NormHead). vLLM has all four in baichuan.py.
"""

import math
import random
from collections.abc import Mapping
from typing import Any

import random_fields
import torch
import torch.nn.functional as F
from drawn_weights import DrawnWeights
from oracle import Oracle, Tensors, attention, frequencies, gated, linear, rms_norm, rotated
from tiny_checkpoint import MAX_SEQ_LEN, Tiny, tiny

from families.family import Config, Family


def _tiny(architecture: str, name: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "model_type": "baichuan",
        "hidden_size": 84,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 103,
        "rms_norm_eps": 0.016,
        "tie_word_embeddings": False,
    }
    return tiny(name, architecture, seed, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, width, drawn = config["hidden_size"], config["intermediate_size"], DrawnWeights(generator)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        drawn.norm(f"{layer}.input_layernorm", hidden)
        drawn.matrix(f"{layer}.self_attn.W_pack", 3 * hidden, hidden)
        drawn.matrix(f"{layer}.self_attn.o_proj", hidden, hidden)
        drawn.norm(f"{layer}.post_attention_layernorm", hidden)
        drawn.matrix(f"{layer}.mlp.gate_proj", width, hidden)
        drawn.matrix(f"{layer}.mlp.up_proj", width, hidden)
        drawn.matrix(f"{layer}.mlp.down_proj", hidden, width)
    drawn.norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _slopes(heads: int) -> list[float]:
    """ALiBi's, as the published code interleaves them where heads are no power of two."""
    if not math.log2(heads).is_integer():
        power = 2 ** int(math.log2(heads))
        return _slopes(power) + _slopes(2 * power)[::2][: heads - power]
    ratio = 2 ** -(2 ** (3 - math.log2(heads)))
    return [ratio**place for place in range(1, heads + 1)]


def _oracle(
    config: Config, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
) -> torch.nn.Module:
    heads, eps = config["num_attention_heads"], config.get("rms_norm_eps", 1e-6)
    rates, slopes = frequencies(10000.0, config["hidden_size"] // heads), torch.tensor(_slopes(heads))
    first = config["architectures"] == ["BaiChuanForCausalLM"]
    rotary = first or config["hidden_size"] == 4096
    normed = not first and ("z_loss_weight" in config or config["vocab_size"] == 125696)

    def attended(t: Tensors, place: str, x: torch.Tensor) -> torch.Tensor:
        q, k, v = linear(t, f"{place}.W_pack", x).view(len(x), 3, heads, -1).unbind(1)
        mixed = attention(rotated(q, rates), rotated(k, rates), v) if rotary else attention(q, k, v, slopes)
        return linear(t, f"{place}.o_proj", mixed)

    def logits(t: Tensors, ids: torch.Tensor) -> torch.Tensor:
        h = t["model.embed_tokens.weight"][ids]
        for index in range(config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            h = h + attended(t, f"{layer}.self_attn", rms_norm(t, f"{layer}.input_layernorm", h, eps))
            x = rms_norm(t, f"{layer}.post_attention_layernorm", h, eps)
            h = h + gated(t, x, *(f"{layer}.mlp.{name}_proj" for name in ("gate", "up", "down")))
        head = "model.embed_tokens" if config.get("tie_word_embeddings", False) else "lm_head"
        table = t[f"{head}.weight"]
        return F.linear(rms_norm(t, "model.norm", h, eps), F.normalize(table) if normed else table)

    return Oracle(tensors, dtype, logits)


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.square_sizes(draw)
    if draw.random() < 0.5:
        del config["num_key_value_heads"]
    else:
        config["num_key_value_heads"] = config["num_attention_heads"]
    second = {"z_loss_weight": 0, "tie_word_embeddings": False, "model_max_length": config["max_position_embeddings"]}
    return {**config, **second} if draw.random() < 0.9 else {**config, "vocab_size": 64000}


FAMILIES = (
    Family(
        "baichuan",
        "BaichuanForCausalLM",
        tiny=(
            # Baichuan 2 of 13 billion weights, and Baichuan 1 of 7.
            _tiny("BaichuanForCausalLM", "baichuan-alibi", 1, model_max_length=MAX_SEQ_LEN, z_loss_weight=0),
            _tiny("BaiChuanForCausalLM", "baichuan7b-rotary", 1, max_position_embeddings=MAX_SEQ_LEN),
        ),
        weights=_weights,
        random=_random,
        cut={"num_hidden_layers": 1},
        oracle=_oracle,
        bad=(
            ("baichuan-alibi", "vocab_size", 0),
            ("baichuan-alibi", "hidden_size", 85),
            ("baichuan-alibi", "tie_word_embeddings", True),
            ("baichuan-alibi", "num_key_value_heads", 2),
            ("baichuan7b-rotary", "rope_theta", 5e5),
            ("baichuan7b-rotary", "num_key_value_heads", 2),
            ("baichuan7b-rotary", "hidden_act", "gelu"),
            ("baichuan7b-rotary", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ),
    ),
)
