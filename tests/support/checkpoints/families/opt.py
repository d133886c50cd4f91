"""OPT: names and sizes of its own, norms before blocks or after sums (transformers, modeling_opt.py)."""

import random
from dataclasses import replace
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from mutations import Change, Mutation, each, some
from tiny_checkpoint import MAX_SEQ_LEN, Tiny, tiny

from families.family import Config, Family
from ingot.models.blocks.layer import BranchSpec
from ingot.models.blocks.learned_positions import LearnedPositionsSpec
from ingot.models.blocks.projection import ProjectionSpec


def _tiny(name: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "max_position_embeddings": MAX_SEQ_LEN,
    }
    return tiny(name, "OPTForCausalLM", seed, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Where head and embedding are two tables, embeddings are so small that the epsilon of norms shows beside them."""
    hidden, ffn, drawn = config["hidden_size"], config["ffn_dim"], DrawnWeights(generator)
    width, bias = config.get("word_embed_proj_dim") or hidden, config.get("enable_bias", True)
    before = config.get("do_layer_norm_before", True)

    def norm(name: str) -> None:
        if config.get("layer_norm_elementwise_affine", True):
            drawn.norm(name, hidden, bias=True)

    root = "model.decoder"
    drawn.matrix(f"{root}.embed_tokens", config["vocab_size"], width)
    drawn.matrix(f"{root}.embed_positions", config["max_position_embeddings"] + 2, hidden)
    if not config.get("tie_word_embeddings", True):
        drawn.tensors = {name: tensor * 0.02 for name, tensor in drawn.tensors.items()}
        drawn.matrix("lm_head", config["vocab_size"], width)
    if width != hidden:
        drawn.matrix(f"{root}.project_in", hidden, width)
        drawn.matrix(f"{root}.project_out", width, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"{root}.layers.{index}"
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            drawn.matrix(f"{layer}.self_attn.{name}", hidden, hidden, bias=bias)
        norm(f"{layer}.self_attn_layer_norm")
        drawn.matrix(f"{layer}.fc1", ffn, hidden, bias=bias)
        drawn.matrix(f"{layer}.fc2", hidden, ffn, bias=bias)
        norm(f"{layer}.final_layer_norm")
    if before and not config.get("_remove_final_layer_norm", False):
        norm(f"{root}.final_layer_norm")
    return drawn.tensors


def _random(draw: random.Random) -> dict[str, Any]:
    heads = draw.randint(1, 6)
    return {
        "hidden_size": heads * draw.randint(1, 20),
        "num_hidden_layers": draw.randint(1, 4),
        "num_attention_heads": heads,
        "ffn_dim": draw.randint(1, 200),
        "word_embed_proj_dim": draw.choice([None, draw.randint(1, 90)]),
        "max_position_embeddings": draw.choice([160, 200, 1024]),
        "vocab_size": draw.randint(3, 700),
        "activation_function": draw.choice(["relu", "relu2", "gelu_new", *random_fields.GELU]),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **random_fields.dtype(draw),
        **random_fields.flags(
            draw,
            *("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine", "tie_word_embeddings"),
            "_remove_final_layer_norm",
        ),
    }


FAMILIES = (
    Family(
        "opt",
        "OPTForCausalLM",
        tiny=(
            _tiny(  # as the model of 350m
                "opt-after",
                3,
                hidden_size=84,
                num_hidden_layers=3,
                num_attention_heads=6,
                ffn_dim=103,
                word_embed_proj_dim=52,
                do_layer_norm_before=False,
            ),
            _tiny(
                "opt-before",
                1,
                hidden_size=60,
                num_hidden_layers=2,
                num_attention_heads=4,
                ffn_dim=131,
                vocab_size=211,
                activation_function="gelu",
                tie_word_embeddings=False,
            ),
            _tiny(
                "opt-bare",
                2,
                hidden_size=60,
                num_hidden_layers=2,
                num_attention_heads=4,
                ffn_dim=131,
                word_embed_proj_dim=77,
                vocab_size=211,
                enable_bias=False,
                layer_norm_elementwise_affine=False,
                tie_word_embeddings=False,
                _remove_final_layer_norm=True,
            ),
        ),
        weights=_weights,
        random=_random,
        cut={"hidden_size": 84, "num_attention_heads": 6, "ffn_dim": 103, "vocab_size": 379, "num_hidden_layers": 1},
        optional=frozenset(
            {
                *("ffn_dim", "activation_function", "word_embed_proj_dim"),
                *("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine", "_remove_final_layer_norm"),
            }
        ),
        bad=(
            ("opt-after", "hidden_size", 85),
            ("opt-after", "num_attention_heads", 0),
            ("opt-after", "ffn_dim", "wide"),
            ("opt-after", "word_embed_proj_dim", 0),
            ("opt-after", "activation_function", "tanh"),
            ("opt-after", "do_layer_norm_before", 1),
            ("opt-after", "enable_bias", "yes"),
            ("opt-after", "layer_norm_elementwise_affine", "no"),
            ("opt-after", "_remove_final_layer_norm", 0),
            ("opt-after", "max_position_embeddings", -2),
        ),
    ),
)
MUTATIONS = (
    Mutation(
        "positions a row before",
        "LearnedPositionsSpec.offset",
        some(LearnedPositionsSpec, lambda embedding: embedding.offset),
        each(LearnedPositionsSpec, lambda embedding: replace(embedding, offset=1)),
    ),
    Mutation(
        "norms of sums before blocks",
        "BranchSpec.stream_norm",
        some(BranchSpec, lambda branch: branch.stream_norm),
        each(BranchSpec, lambda branch: replace(branch, norm=branch.stream_norm, stream_norm=None)),
    ),
)
SIZES: dict[str, Change] = {
    "ProjectionSpec.width": each(ProjectionSpec, lambda one: replace(one, width=2 * one.width)),
}
STORAGE = ("ProjectionSpec.stored",)
PARTS = ("LearnedPositionsSpec.projection", "EmbeddingSpec.projection", "HeadSpec.projection")
