"""GPT-2: names of its own for all sizes; matrices are stored [inputs, outputs] (transformers, modeling_gpt2.py)."""

import random
from dataclasses import replace
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from mutations import Change, Mutation, each, some
from tiny_checkpoint import MAX_SEQ_LEN, Tiny, tiny

from families.family import Config, Family
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.learned_positions import LearnedPositionsSpec


def _tiny(name: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "n_positions": MAX_SEQ_LEN,
    }
    return tiny(name, "GPT2LMHeadModel", seed, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, drawn = config["n_embd"], DrawnWeights(generator)
    width = config.get("n_inner") or 4 * hidden
    drawn.matrix("transformer.wte", config["vocab_size"], hidden)
    drawn.matrix("transformer.wpe", config["n_positions"], hidden)
    for index in range(config["n_layer"]):
        layer = f"transformer.h.{index}"
        drawn.norm(f"{layer}.ln_1", hidden, bias=True)
        drawn.matrix(f"{layer}.attn.c_attn", 3 * hidden, hidden, bias=True, transposed=True)
        drawn.matrix(f"{layer}.attn.c_proj", hidden, hidden, bias=True, transposed=True)
        drawn.norm(f"{layer}.ln_2", hidden, bias=True)
        drawn.matrix(f"{layer}.mlp.c_fc", width, hidden, bias=True, transposed=True)
        drawn.matrix(f"{layer}.mlp.c_proj", hidden, width, bias=True, transposed=True)
    drawn.norm("transformer.ln_f", hidden, bias=True)
    if not config.get("tie_word_embeddings", True):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _random(draw: random.Random) -> dict[str, Any]:
    heads = draw.randint(1, 6)
    return {
        "n_embd": heads * draw.randint(1, 20),
        "n_layer": draw.randint(1, 4),
        "n_head": heads,
        "n_inner": draw.choice([None, draw.randint(1, 200)]),
        "n_positions": draw.choice([160, 200, 1024]),
        "vocab_size": draw.randint(3, 700),
        "activation_function": draw.choice(["gelu_new", *random_fields.GELU]),
        "layer_norm_epsilon": random_fields.log(draw, 1e-12, 1.0),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **random_fields.dtype(draw),
        **random_fields.flags(draw, "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "tie_word_embeddings"),
    }


def _without_positions(dims: DecoderSpec) -> DecoderSpec:
    given = dims.embedding
    assert isinstance(given, LearnedPositionsSpec)
    return replace(dims, embedding=EmbeddingSpec(stored=given.stored, projection=given.projection))


FAMILIES = (
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        tiny=(
            _tiny(  # scores are divided by the number of the layer
                "gpt2-learned",
                3,
                n_embd=84,
                n_layer=3,
                n_head=6,
                n_inner=103,
                layer_norm_epsilon=0.016,
                scale_attn_by_inverse_layer_idx=True,
                tie_word_embeddings=False,
            ),
            _tiny(
                "gpt2-tied",
                0,
                n_embd=60,
                n_layer=2,
                n_head=4,
                vocab_size=211,
                layer_norm_epsilon=0.01,
                activation_function="gelu",
            ),
        ),
        weights=_weights,
        random=_random,
        cut={"n_embd": 84, "n_head": 6, "n_inner": 103, "vocab_size": 379, "n_layer": 1},
        optional=frozenset(
            {
                *("n_embd", "n_layer", "n_head", "n_inner", "n_positions", "activation_function"),
                *("layer_norm_epsilon", "scale_attn_by_inverse_layer_idx"),
            }
        ),
        bad=(
            ("gpt2-learned", "n_embd", 0),
            ("gpt2-learned", "n_embd", 85),
            ("gpt2-learned", "n_inner", "wide"),
            ("gpt2-learned", "activation_function", "silu"),
            ("gpt2-learned", "layer_norm_epsilon", -1.0),
            ("gpt2-learned", "scale_attn_by_inverse_layer_idx", "yes"),
            ("gpt2-learned", "add_cross_attention", True),
        ),
    ),
)
MUTATIONS = (
    Mutation(
        "no learned positions",
        "DecoderSpec.embedding",
        some(LearnedPositionsSpec, lambda embedding: True),
        _without_positions,
    ),
)
SIZES: dict[str, Change] = {
    "LearnedPositionsSpec.positions": each(LearnedPositionsSpec, lambda one: replace(one, positions=7)),
}
STORAGE = ("LearnedPositionsSpec.stored", "LearnedPositionsSpec.stored_positions")
