"""TeleChat 2: names of its own, keys and values in turns in one tensor, a rotary base that follows from two lengths.

The oracle is written from modeling_telechat2.py of github.com/Tele-AI/TeleChat2 (llama_factory_training) and from the
configuration_telechat2.py that the checkpoints carry (vLLM has a copy: transformers_utils/configs/telechat2.py).
"""

import math
import random
from collections.abc import Mapping
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from oracle import Oracle, Tensors, attention, frequencies, gated, linear, rms_norm, rotated
from tiny_checkpoint import MAX_SEQ_LEN, Tiny, tiny

from families.family import Config, Family


def _tiny(name: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "model_type": "telechat",
        "auto_map": {"AutoModelForCausalLM": "modeling_telechat2.Telechat2ForCausalLM"},
        "hidden_size": 84,
        "n_layer": 3,
        "n_head": 6,
        "num_key_value_heads": 2,
        "ffn_hidden_size": 103,
        "layer_norm_epsilon": 0.016,
        "training_seqlen": MAX_SEQ_LEN,
        "base_seqlen": 60,
        "tie_word_embeddings": False,
        "pad_token_id": 3,
    }
    return tiny(name, "TeleChat2ForCausalLM", seed, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, heads, width = config.get("n_embed") or config["hidden_size"], config["n_head"], config["ffn_hidden_size"]
    kv_size, drawn = hidden // heads * (config.get("num_key_value_heads") or heads), DrawnWeights(generator)
    drawn.matrix("transformer.word_embeddings", config["vocab_size"], hidden)
    if config.get("embed_layernorm", False):
        drawn.norm("transformer.word_embeddings_layernorm", hidden)
    for index in range(config["n_layer"]):
        layer = f"transformer.h.{index}"
        drawn.norm(f"{layer}.input_layernorm", hidden)
        drawn.matrix(f"{layer}.self_attention.query", hidden, hidden)
        drawn.matrix(f"{layer}.self_attention.key_value", 2 * kv_size, hidden)
        drawn.matrix(f"{layer}.self_attention.dense", hidden, hidden, bias=True)
        drawn.norm(f"{layer}.post_attention_layernorm", hidden)
        drawn.matrix(f"{layer}.mlp.gate_proj", width, hidden)
        drawn.matrix(f"{layer}.mlp.up_proj", width, hidden)
        drawn.matrix(f"{layer}.mlp.down_proj", hidden, width, bias=True)
    drawn.norm("transformer.ln_f", hidden)
    if not config.get("tie_word_embeddings", True):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _table(config: Config, head_dim: int, context: int) -> tuple[torch.Tensor, float]:
    """Frequencies, and the factor on cosines and sines, in a sequence of `context` tokens."""
    context = max(context, config.get("training_seqlen", 8192))
    alpha = max(2 ** math.ceil(math.log(context / config["base_seqlen"], 2) + 1) - 1, 1)
    beyond = context / config.get("training_seqlen", 8192)
    scale = 1.0 if beyond <= 1 else 0.1 * math.log(beyond) + 1.0
    return frequencies(10000 * alpha ** (head_dim / (head_dim - 2)), head_dim), scale


def _oracle(
    config: Config, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
) -> torch.nn.Module:
    heads, eps = config["n_head"], config.get("layer_norm_epsilon", 1e-5)
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = (config.get("n_embed") or config["hidden_size"]) // heads
    onto_norm = config.get("apply_residual_connection_post_layernorm", False)
    rates, scale = _table(config, head_dim, max_seq_len)

    def attended(t: Tensors, place: str, x: torch.Tensor) -> torch.Tensor:
        q = linear(t, f"{place}.query", x).view(len(x), heads, head_dim)
        k, v = linear(t, f"{place}.key_value", x).view(len(x), kv_heads, 2 * head_dim).split(head_dim, -1)
        mixed = attention(rotated(q, rates, scale), rotated(k, rates, scale), v)
        return linear(t, f"{place}.dense", mixed, bias=True)

    def logits(t: Tensors, ids: torch.Tensor) -> torch.Tensor:
        h = t["transformer.word_embeddings.weight"][ids]
        if config.get("embed_layernorm", False):
            h = rms_norm(t, "transformer.word_embeddings_layernorm", h, eps)
        for index in range(config["n_layer"]):
            layer = f"transformer.h.{index}"
            x = rms_norm(t, f"{layer}.input_layernorm", h, eps)
            h = (x if onto_norm else h) + attended(t, f"{layer}.self_attention", x)
            x = rms_norm(t, f"{layer}.post_attention_layernorm", h, eps)
            h = (x if onto_norm else h) + gated(
                t, x, *(f"{layer}.mlp.{one}_proj" for one in ("gate", "up", "down")), down_bias=True
            )
        head = "transformer.word_embeddings" if config.get("tie_word_embeddings", True) else "lm_head"
        return linear(t, head, rms_norm(t, "transformer.ln_f", h, eps))

    return Oracle(tensors, dtype, logits)


_FLAGS = ("tie_word_embeddings", "embed_layernorm", "apply_residual_connection_post_layernorm")


def _random(draw: random.Random) -> dict[str, Any]:
    kv_heads = draw.choice([1, 1, 2, 3, 4])
    heads = kv_heads * draw.choice([1, 2, 3, 4])
    hidden, training = heads * 2 * draw.randint(2, 16), draw.choice([160, 200, 8192, 32768])
    config = {
        draw.choice(["hidden_size", "n_embed"]): hidden,
        "n_layer": draw.randint(1, 4),
        "n_head": heads,
        "num_key_value_heads": None if kv_heads == heads and draw.random() < 0.5 else kv_heads,
        "ffn_hidden_size": draw.randint(1, 200),
        "vocab_size": draw.randint(3, 700),
        "layer_norm_epsilon": random_fields.log(draw, 1e-12, 1.0),
        "training_seqlen": training,
        "base_seqlen": draw.choice([training, 2 * training, training // 2, draw.randint(1, training)]),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **random_fields.dtype(draw),
    }
    return {**config, **random_fields.flags(draw, *_FLAGS)}


FAMILIES = (
    Family(
        "telechat",
        "TeleChat2ForCausalLM",
        tiny=(
            _tiny("telechat2-grown", 1),
            _tiny(
                "telechat2-tied",
                2,
                n_layer=2,
                num_key_value_heads=None,
                base_seqlen=40,
                embed_layernorm=True,
                apply_residual_connection_post_layernorm=True,
                tie_word_embeddings=True,
            ),
        ),
        weights=_weights,
        random=_random,
        cut={"n_layer": 1},
        aliases=("TelechatForCausalLM", "TeleChatForCausalLM", "Telechat2ForCausalLM"),
        oracle=_oracle,
        bad=(
            ("telechat2-grown", "embed_layernorm", "yes"),
            ("telechat2-grown", "apply_residual_connection_post_layernorm", 1),
            ("telechat2-grown", "base_seqlen", None),
            ("telechat2-grown", "training_seqlen", -1),
            ("telechat2-grown", "n_head", 5),
            ("telechat2-grown", "num_key_value_heads", 4),
            ("telechat2-grown", "rope_theta", 1e6),
            ("telechat2-grown", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ),
    ),
)
