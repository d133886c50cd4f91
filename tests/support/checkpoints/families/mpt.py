"""MPT: ALiBi, and no biases anywhere (transformers, modeling_mpt.py).

Transformers takes `alibi_bias_max` and hands it to nothing: of other numbers test_tables.py asks its function.
"""

import random
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from tiny_checkpoint import MAX_SEQ_LEN, Tiny, tiny

from families.family import Config, Family


def _tiny(name: str, **fields: Any) -> Tiny:
    own = {
        "max_seq_len": MAX_SEQ_LEN,
        "layer_norm_epsilon": 0.016,
    }
    return tiny(name, "MptForCausalLM", 2, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, drawn = config["d_model"], DrawnWeights(generator)
    drawn.matrix("transformer.wte", config["vocab_size"], hidden)
    for index in range(config["n_layers"]):
        layer = f"transformer.blocks.{index}"
        drawn.norm(f"{layer}.norm_1", hidden)
        drawn.matrix(f"{layer}.attn.Wqkv", 3 * hidden, hidden)
        drawn.matrix(f"{layer}.attn.out_proj", hidden, hidden)
        drawn.norm(f"{layer}.norm_2", hidden)
        drawn.matrix(f"{layer}.ffn.up_proj", 4 * hidden, hidden)
        drawn.matrix(f"{layer}.ffn.down_proj", hidden, 4 * hidden)
    drawn.norm("transformer.norm_f", hidden)
    if not config.get("tie_word_embeddings", True):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _random(draw: random.Random) -> dict[str, Any]:
    heads = draw.randint(1, 9)
    attention = {
        "clip_qkv": draw.choice([None, 0.5, 2.0]),
        "softmax_scale": draw.choice([None, 0.3]),
        "alibi": True,
    }
    return {
        "d_model": heads * draw.randint(1, 20),
        "n_layers": draw.randint(1, 4),
        "n_heads": heads,
        "max_seq_len": draw.choice([160, 200, 2048]),
        "vocab_size": draw.randint(3, 700),
        "layer_norm_epsilon": random_fields.log(draw, 1e-12, 1.0),
        "attn_config": {name: value for name, value in attention.items() if value is not None},
        "bos_token_id": 1,
        "eos_token_id": 2,
        **random_fields.dtype(draw),
        **random_fields.flags(draw, "learned_pos_emb", "tie_word_embeddings"),
    }


FAMILIES = (
    Family(
        "mpt",
        "MptForCausalLM",
        tiny=(
            _tiny(
                "mpt-clipped",
                d_model=84,
                n_layers=3,
                n_heads=7,
                attn_config={"alibi": True, "clip_qkv": 0.7, "softmax_scale": 0.41},
                tie_word_embeddings=False,
            ),
            _tiny("mpt-plain", architectures=["MPTForCausalLM"], d_model=64, n_layers=2, n_heads=4),
        ),
        weights=_weights,
        random=_random,
        cut={"d_model": 84, "n_heads": 7, "n_layers": 1},
        optional=frozenset({"d_model", "n_heads", "n_layers", "max_seq_len", "layer_norm_epsilon", "attn_config"}),
        bad=(
            ("mpt-clipped", "d_model", 85),
            ("mpt-clipped", "n_heads", "many"),
            ("mpt-clipped", "max_seq_len", 0),
            ("mpt-clipped", "expansion_ratio", 3),
            ("mpt-clipped", "no_bias", False),
            ("mpt-clipped", "logit_scale", 0.5),
            ("mpt-clipped", "logit_scale", "inv_sqrt_d_model"),
            ("mpt-clipped", "norm_type", "rmsnorm"),
            ("mpt-clipped", "attn_config", []),
            ("mpt-clipped", "attn_config", {"alibi": False}),
            ("mpt-clipped", "attn_config", {"qk_ln": True}),
            ("mpt-clipped", "attn_config", {"attn_type": "multiquery_attention"}),
            ("mpt-clipped", "attn_config", {"clip_qkv": -1.0}),
            ("mpt-clipped", "attn_config", {"alibi_bias_max": 0}),
            ("mpt-clipped", "attn_config", {"prefix_lm": True}),
        ),
    ),
)
