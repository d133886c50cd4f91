"""DBRX: fields in objects, experts as the rows of one matrix (transformers, modeling_dbrx.py)."""

import random
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from tiny_checkpoint import MAX_SEQ_LEN, Tiny, tiny

from families.family import Config, Family


def _tiny(name: str, seed: int, attention: dict[str, Any], experts: dict[str, Any]) -> Tiny:
    return tiny(
        name,
        "DbrxForCausalLM",
        seed,
        d_model=84,
        n_layers=3,
        n_heads=6,
        max_seq_len=MAX_SEQ_LEN,
        attn_config={"kv_n_heads": 2, "rope_theta": 811.0, **attention},
        ffn_config={"ffn_hidden_size": 31, "moe_num_experts": 5, "moe_top_k": 2, **experts},
        rope_theta=811.0,
    )


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Embeddings are so small that the epsilon of norms shows beside them."""
    hidden, experts, width = (
        config["d_model"],
        config["ffn_config"]["moe_num_experts"],
        config["ffn_config"]["ffn_hidden_size"],
    )
    kv_size = hidden // config["n_heads"] * config["attn_config"]["kv_n_heads"]
    drawn = DrawnWeights(generator)
    drawn.matrix("transformer.wte", config["vocab_size"], hidden)
    drawn.tensors["transformer.wte.weight"] *= 0.02
    for index in range(config["n_layers"]):
        layer = f"transformer.blocks.{index}"
        drawn.norm(f"{layer}.norm_attn_norm.norm_1", hidden)
        drawn.matrix(f"{layer}.norm_attn_norm.attn.Wqkv", hidden + 2 * kv_size, hidden)
        drawn.matrix(f"{layer}.norm_attn_norm.attn.out_proj", hidden, hidden)
        drawn.norm(f"{layer}.norm_attn_norm.norm_2", hidden)
        drawn.matrix(f"{layer}.ffn.router.layer", experts, hidden)
        for name, inputs in (("w1", hidden), ("v1", hidden), ("w2", width)):
            drawn.tensors[f"{layer}.ffn.experts.mlp.{name}"] = drawn.randn(experts * width, hidden) * 1.5 / inputs**0.5
    drawn.norm("transformer.norm_f", hidden)
    drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _random(draw: random.Random) -> dict[str, Any]:
    sizes = random_fields.sizes(draw)
    experts = draw.randint(1, 9)
    table = random_fields.rope(draw, sizes, ("default",))
    return {
        "d_model": sizes["num_attention_heads"] * sizes["head_dim"],
        "n_layers": sizes["num_hidden_layers"],
        "n_heads": sizes["num_attention_heads"],
        "max_seq_len": sizes["max_position_embeddings"],
        "attn_config": {
            "kv_n_heads": sizes["num_key_value_heads"],
            "clip_qkv": random_fields.log(draw, 0.05, 8.0),
            "rope_theta": table["rope_theta"],
        },
        "ffn_config": {
            "ffn_hidden_size": draw.randint(1, 60),
            "moe_num_experts": experts,
            "moe_top_k": draw.randint(1, experts),
            "moe_normalize_expert_weights": draw.choice([None, 1.0]),
        },
        "rope_theta": table["rope_theta"],
        "torch_dtype": "float32",
        **{name: sizes[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
    }


FAMILIES = (
    Family(
        "dbrx",
        "DbrxForCausalLM",
        tiny=(
            _tiny("dbrx-clipped", 0, {"clip_qkv": 0.8}, {}),
            _tiny(
                "dbrx-plain",
                1,
                {"kv_n_heads": 6, "clip_qkv": 1.7},
                {"moe_normalize_expert_weights": None, "moe_jitter_eps": None},
            ),
        ),
        weights=_weights,
        random=_random,
        cut={"n_layers": 1},
        optional=frozenset({"attn_config"}),
        bad=(
            ("dbrx-clipped", "attn_config", {"kv_n_heads": 4}),
            ("dbrx-clipped", "attn_config", {"clip_qkv": -1}),
            ("dbrx-clipped", "ffn_config", {"moe_num_experts": 2, "moe_top_k": 3}),
            ("dbrx-clipped", "ffn_config", [1]),
            ("dbrx-clipped", "n_heads", 5),
            ("dbrx-clipped", "tie_word_embeddings", True),
        ),
    ),
)
