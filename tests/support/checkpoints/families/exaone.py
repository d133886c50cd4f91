"""EXAONE 3: Llama by other names (vLLM, model_executor/models/exaone.py)."""

import random
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from llama_oracle import LlamaOracle
from tiny_checkpoint import Tiny, tiny_like_llama

from families.family import Config, Family


def _tiny(name: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "hidden_size": 84,
        "num_layers": 3,
        "activation_function": "silu",
        "layer_norm_epsilon": 0.016,
        "num_hidden_layers": ...,
    }
    return tiny_like_llama(name, "ExaoneForCausalLM", seed, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim, kv_heads = config.get("head_dim") or hidden // heads, config.get("num_key_value_heads") or heads
    width, drawn = config.get("intermediate_size") or 4 * hidden, DrawnWeights(generator)
    drawn.matrix("transformer.wte", config["vocab_size"], hidden)
    for index in range(config["num_layers"]):
        layer = f"transformer.h.{index}"
        drawn.norm(f"{layer}.ln_1", hidden)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            drawn.matrix(f"{layer}.attn.attention.{name}_proj", count * head_dim, hidden)
        drawn.matrix(f"{layer}.attn.attention.out_proj", hidden, heads * head_dim)
        drawn.norm(f"{layer}.ln_2", hidden)
        drawn.matrix(f"{layer}.mlp.c_fc_0", width, hidden)
        drawn.matrix(f"{layer}.mlp.c_fc_1", width, hidden)
        drawn.matrix(f"{layer}.mlp.c_proj", hidden, width)
    drawn.norm("transformer.ln_f", hidden)
    if not config.get("tie_word_embeddings", True):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


class _Oracle(LlamaOracle):
    embed, last_norm, eps_field = "transformer.wte", "transformer.ln_f", "layer_norm_epsilon"

    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", True))

    def layers(self, h: torch.Tensor) -> torch.Tensor:
        for index in range(self.config["num_layers"]):
            layer = f"transformer.h.{index}"
            kv_heads = self.config.get("num_key_value_heads") or self.heads
            h = h + self.attention(self.norm(h, f"{layer}.ln_1"), f"{layer}.attn.attention", kv_heads, o="out_proj")
            h = h + self.gated(self.norm(h, f"{layer}.ln_2"), f"{layer}.mlp", "c_fc_0", "c_fc_1", "c_proj")
        return h


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    config["num_layers"] = config.pop("num_hidden_layers")
    config["layer_norm_epsilon"] = random_fields.log(draw, 1e-12, 1.0)
    if draw.random() < 0.3:
        config["hidden_size"] = config["num_attention_heads"] * config.pop("head_dim")
    if draw.random() < 0.2:
        config["intermediate_size"] = None
    random_fields.spell_rope(config, random_fields.rope(draw, config, ("default", "linear", "llama3", "dynamic")), draw)
    return config


FAMILIES = (
    Family(
        "exaone",
        "ExaoneForCausalLM",
        tiny=(
            _tiny(
                "exaone-scaled",
                0,
                tie_word_embeddings=False,
                rope_scaling={
                    "rope_type": "llama3",
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 3.0,
                    "original_max_position_embeddings": 56,
                },
            ),
            _tiny("exaone-tied", 1, tie_word_embeddings=True, num_key_value_heads=6),
        ),
        weights=_weights,
        random=_random,
        cut={"hidden_size": 84, "num_layers": 1},
        bad=(
            ("exaone-scaled", "num_layers", 0),
            ("exaone-scaled", "activation_function", "gelu_new"),
            ("exaone-scaled", "layer_norm_epsilon", "small"),
        ),
        oracle=_Oracle,
    ),
)
