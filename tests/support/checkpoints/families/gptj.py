"""GPT-J and CodeGen: neighbours are rotated, and the head has a bias (transformers, modeling_gptj.py and
modeling_codegen.py)."""

import random
from functools import partial
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from tiny_checkpoint import MAX_SEQ_LEN, Tiny, tiny

from families.family import Config, Family


def _tiny(model_type: str, architecture: str, kind: str, **fields: Any) -> Tiny:
    own = {
        "n_positions": MAX_SEQ_LEN,
        "layer_norm_epsilon": 0.016,
    }
    return tiny(f"{model_type}-{kind}", architecture, 2, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, drawn = config["n_embd"], DrawnWeights(generator)
    width = config.get("n_inner") or 4 * hidden
    drawn.matrix("transformer.wte", config["vocab_size"], hidden)
    for index in range(config["n_layer"]):
        layer = f"transformer.h.{index}"
        drawn.norm(f"{layer}.ln_1", hidden, bias=True)
        if config["model_type"] == "codegen":
            drawn.matrix(f"{layer}.attn.qkv_proj", 3 * hidden, hidden)
        else:
            for name in "kvq":
                drawn.matrix(f"{layer}.attn.{name}_proj", hidden, hidden)
        drawn.matrix(f"{layer}.attn.out_proj", hidden, hidden)
        drawn.matrix(f"{layer}.mlp.fc_in", width, hidden, bias=True)
        drawn.matrix(f"{layer}.mlp.fc_out", hidden, width, bias=True)
    drawn.norm("transformer.ln_f", hidden, bias=True)
    drawn.matrix("lm_head", config["vocab_size"], hidden, bias=True)
    if config.get("tie_word_embeddings", False):
        del drawn.tensors["lm_head.weight"]
    return drawn.tensors


def _random(draw: random.Random, *, blocks: int = 1) -> dict[str, Any]:
    heads, head_dim = blocks * draw.randint(1, 6 // blocks), 2 * draw.randint(1, 16)
    return {
        "n_embd": heads * head_dim,
        "n_layer": draw.randint(1, 4),
        "n_head": heads,
        "n_inner": draw.choice([None, draw.randint(1, 200)]),
        "n_positions": draw.choice([160, 200, 1024]),
        "rotary_dim": 2 * draw.randint(1, head_dim // 2),
        "vocab_size": draw.randint(3, 700),
        "activation_function": draw.choice(["gelu_new", *random_fields.GELU]),
        "layer_norm_epsilon": random_fields.log(draw, 1e-12, 1.0),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **random_fields.dtype(draw),
        **random_fields.flags(draw, "tie_word_embeddings"),
    }


_OPTIONAL = frozenset({"n_inner", "n_positions", "activation_function", "layer_norm_epsilon"})
_GPTJ, _CODEGEN = ("gptj", "GPTJForCausalLM"), ("codegen", "CodeGenForCausalLM")
FAMILIES = (
    Family(
        *_GPTJ,
        tiny=(
            _tiny(*_GPTJ, "plain", n_embd=84, n_layer=3, n_head=6, n_inner=103, rotary_dim=10),
            _tiny(
                *_GPTJ,
                "tied",
                n_embd=64,
                n_layer=2,
                n_head=4,
                rotary_dim=4,
                activation_function="gelu",
                tie_word_embeddings=True,
            ),
        ),
        weights=_weights,
        random=_random,
        cut={"n_embd": 84, "n_head": 6, "n_inner": 103, "n_layer": 1},
        optional=_OPTIONAL,
        bad=(
            ("gptj-plain", "n_embd", 85),
            ("gptj-plain", "n_inner", "wide"),
            ("gptj-plain", "rotary_dim", 16),
            ("gptj-plain", "rotary_dim", 5),
            ("gptj-plain", "rotary_dim", None),
            ("gptj-plain", "activation_function", "tanh"),
        ),
    ),
    Family(
        *_CODEGEN,
        tiny=(_tiny(*_CODEGEN, "blocks", n_embd=112, n_layer=2, n_head=8, n_inner=103, rotary_dim=6),),
        weights=_weights,
        random=partial(_random, blocks=4),
        cut={"n_layer": 1},
        optional=_OPTIONAL,
        bad=(("codegen-blocks", "n_head", 7),),
    ),
)
