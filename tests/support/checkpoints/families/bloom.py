"""Bloom: ALiBi, q, k and v of each head one after the other (transformers, modeling_bloom.py)."""

import random
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from mutations import Mutation, each, every, some
from tiny_checkpoint import MAX_SEQ_LEN, Tiny, tiny

from families.family import Config, Family
from ingot.models.blocks.alibi import AlibiSpec
from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.layer import LayerSpec


def _tiny(name: str, **fields: Any) -> Tiny:
    own = {
        "seq_length": MAX_SEQ_LEN,
        "layer_norm_epsilon": 0.016,
    }
    return tiny(name, "BloomForCausalLM", 4, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden = config.get("n_embed") or config["hidden_size"]
    layers, drawn = config.get("n_layer") or config["num_hidden_layers"], DrawnWeights(generator)
    drawn.matrix("transformer.word_embeddings", config["vocab_size"], hidden)
    drawn.norm("transformer.word_embeddings_layernorm", hidden, bias=True)
    for index in range(layers):
        layer = f"transformer.h.{index}"
        drawn.norm(f"{layer}.input_layernorm", hidden, bias=True)
        drawn.matrix(f"{layer}.self_attention.query_key_value", 3 * hidden, hidden, bias=True)
        drawn.matrix(f"{layer}.self_attention.dense", hidden, hidden, bias=True)
        drawn.norm(f"{layer}.post_attention_layernorm", hidden, bias=True)
        drawn.matrix(f"{layer}.mlp.dense_h_to_4h", 4 * hidden, hidden, bias=True)
        drawn.matrix(f"{layer}.mlp.dense_4h_to_h", hidden, 4 * hidden, bias=True)
    drawn.norm("transformer.ln_f", hidden, bias=True)
    if not config.get("tie_word_embeddings", True):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _random(draw: random.Random) -> dict[str, Any]:
    heads = draw.randint(1, 9)
    hidden, layers = heads * draw.randint(1, 20), draw.randint(1, 4)
    return {
        draw.choice(["hidden_size", "n_embed"]): hidden,
        draw.choice(["n_layer", "num_hidden_layers"]): layers,
        draw.choice(["n_head", "num_attention_heads"]): heads,
        "seq_length": draw.choice([160, 200, 2048]),
        "vocab_size": draw.randint(3, 700),
        "layer_norm_epsilon": random_fields.log(draw, 1e-12, 1.0),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **random_fields.dtype(draw),
        **random_fields.flags(draw, "apply_residual_connection_post_layernorm", "tie_word_embeddings"),
    }


FAMILIES = (
    Family(
        "bloom",
        "BloomForCausalLM",
        tiny=(
            _tiny("bloom-tied", hidden_size=72, n_layer=3, n_head=6),
            _tiny(
                "bloom-onto",
                n_embed=64,
                num_hidden_layers=2,
                num_attention_heads=8,
                apply_residual_connection_post_layernorm=True,
                tie_word_embeddings=False,
            ),
        ),
        weights=_weights,
        random=_random,
        cut={"n_embed": 72, "n_head": 6, "num_attention_heads": 6, "n_layer": 1, "num_hidden_layers": 1},
        optional=frozenset(
            {
                *("n_embed", "n_layer", "n_head", "layer_norm_epsilon", "seq_length"),
                "apply_residual_connection_post_layernorm",
            }
        ),
        bad=(
            ("bloom-tied", "hidden_size", 73),
            ("bloom-tied", "n_head", 0),
            ("bloom-tied", "n_inner", 100),
            ("bloom-tied", "layer_norm_epsilon", 0),
            ("bloom-tied", "slow_but_exact", True),
            ("bloom-tied", "seq_length", "long"),
            ("bloom-onto", "n_embed", 3.5),
            ("bloom-onto", "apply_residual_connection_post_layernorm", "yes"),
        ),
    ),
)
_SLOPED = some(AttentionSpec, lambda attention: attention.alibi)
MUTATIONS = (
    Mutation("no slopes", "AttentionSpec.alibi", _SLOPED, every(AttentionSpec, alibi=None)),
    Mutation(
        "slopes half as flat",
        "AlibiSpec.flattest",
        _SLOPED,
        each(AlibiSpec, lambda alibi: AlibiSpec(flattest=alibi.flattest - 1, factor=alibi.factor)),
    ),
    Mutation("slopes of scaled scores", "AlibiSpec.factor", _SLOPED, every(AlibiSpec, factor=0.5)),
    Mutation(
        "no norm of the embedding",
        "EmbeddingSpec.norm",
        some(EmbeddingSpec, lambda embedding: embedding.norm),
        every(EmbeddingSpec, norm=None),
    ),
    Mutation(
        "results added to the stream",
        "LayerSpec.onto_norm",
        some(LayerSpec, lambda layer: layer.onto_norm),
        every(LayerSpec, onto_norm=False),
    ),
    Mutation(
        "slopes in another order",
        "AttentionSpec.alibi",
        _SLOPED,
        params=lambda params, dims: params.update(
            {name: slopes.roll(1) for name, slopes in params.items() if name.endswith(".slopes")}
        ),
    ),
)
