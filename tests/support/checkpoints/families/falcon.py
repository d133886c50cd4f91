"""Falcon: q, k and v are one tensor by groups of heads (transformers, modeling_falcon.py; for the names of the first
checkpoints modelling_RW.py, which came with them)."""

import random
from collections.abc import Mapping
from typing import Any
from unittest import mock

import random_fields
import torch
from drawn_weights import DrawnWeights
from tiny_checkpoint import MAX_SEQ_LEN, Tiny, tiny

from families.family import Config, Family

_COMMON = {"alibi": False, "layer_norm_epsilon": 0.016}


def _tiny(kind: str, **fields: Any) -> Tiny:
    own = {**_COMMON, "num_hidden_layers": 3, "max_position_embeddings": MAX_SEQ_LEN, "rope_theta": 811.0}
    return tiny(f"falcon-{kind}", "FalconForCausalLM", 1, **{**own, **fields})


def _first(model_type: str, name: str, **fields: Any) -> Tiny:
    """A checkpoint with the first names. Its tables have one base only."""
    return tiny(name, "RWForCausalLM", 1, **{**_COMMON, "model_type": model_type, "n_layer": 3, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, heads, bias = config["hidden_size"], config["num_attention_heads"], config.get("bias", False)
    new, parallel = config.get("new_decoder_architecture", False), config.get("parallel_attn", True)
    head_dim, width = hidden // heads, config.get("ffn_hidden_size") or 4 * hidden
    rows = 3 * hidden
    if new:
        rows = (config["num_kv_heads"] * 2 + heads) * head_dim
    elif config.get("multi_query", True):
        rows = hidden + 2 * head_dim
    norms = ["input_layernorm"] if parallel else ["input_layernorm", "post_attention_layernorm"]
    if new and config.get("num_ln_in_parallel_attn") in (None, 2):
        norms = ["ln_attn", "ln_mlp"]
    drawn = DrawnWeights(generator)
    drawn.matrix("transformer.word_embeddings", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"transformer.h.{index}"
        for name in norms:
            drawn.norm(f"{layer}.{name}", hidden, bias=True)
        drawn.matrix(f"{layer}.self_attention.query_key_value", rows, hidden, bias=bias)
        drawn.matrix(f"{layer}.self_attention.dense", hidden, hidden, bias=bias)
        drawn.matrix(f"{layer}.mlp.dense_h_to_4h", width, hidden, bias=bias)
        drawn.matrix(f"{layer}.mlp.dense_4h_to_h", hidden, width, bias=bias)
    drawn.norm("transformer.ln_f", hidden, bias=True)
    if not config.get("tie_word_embeddings", True):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    config["hidden_size"] = config["num_attention_heads"] * config.pop("head_dim")
    config["ffn_hidden_size"] = draw.choice([None, config.pop("intermediate_size")])
    config["layer_norm_epsilon"] = random_fields.log(draw, 1e-12, 1.0)
    config["activation"] = draw.choice(["gelu_new", *random_fields.GELU])
    kv_heads = config.pop("num_key_value_heads")
    config |= random_fields.flags(draw, "bias", "multi_query")
    if draw.random() < 0.5:
        config |= {"new_decoder_architecture": True, "num_kv_heads": kv_heads}
        config["num_ln_in_parallel_attn"] = draw.choice([None, 1, 2])
    else:
        config |= random_fields.flags(draw, "parallel_attn")
        if config.get("multi_query", True):
            config["num_kv_heads"] = draw.choice([None, kv_heads])
    table = random_fields.rope(draw, config, ("default", "linear", "llama3", "dynamic", "yarn"))
    random_fields.spell_rope(config, table, draw)
    return config


def _in_todays_names(config: Config) -> dict[str, Any]:
    """What transformers' Falcon calls the fields; code that knows `n_head_kv` is that of the new architecture alone."""
    names = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_head_kv": "num_kv_heads"}
    known = {names.get(name, name): value for name, value in config.items()}
    known |= {"architectures": ["FalconForCausalLM"], "model_type": "falcon"}
    if "n_head_kv" in config:
        return {**known, "new_decoder_architecture": True}
    return {"multi_query": False, "parallel_attn": False, **known}


def _first_weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return _weights(_in_todays_names(config), generator)


def _first_model(
    config: Config, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
) -> torch.nn.Module:
    """Transformers' Falcon, which took over the arithmetic of modelling_RW.py."""
    from hf_model import hf_model  # which finds this file

    model = hf_model(_in_todays_names(config), tensors, dtype, max_seq_len)
    return _WithAlibi(model) if config.get("alibi") else model


class _WithAlibi(torch.nn.Module):
    """Transformers' Falcon with ALiBi as modelling_RW.py has it, in float32: by sdpa, for `eager` adds it twice, and
    without the rounding to bfloat16."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        model.config._attn_implementation = "sdpa"

    def forward(self, ids: torch.Tensor) -> Any:
        from transformers.models.falcon import modeling_falcon

        with mock.patch.object(modeling_falcon, "build_alibi_tensor", _alibi):
            return self.model(ids)


def _alibi(mask: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[heads, 1, n]: the slope of each head times the position (arXiv 2108.12409, code of its authors)."""

    def of_power(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (head + 1) / count) for head in range(count)]

    power = 1 << (heads.bit_length() - 1)
    slopes = torch.tensor([*of_power(power), *of_power(2 * power)[::2]][:heads])
    return (slopes[:, None, None] * torch.arange(mask.shape[1])).to(dtype)


def _first_random(draw: random.Random) -> dict[str, Any]:
    drawn = random_fields.sizes(draw)
    heads = drawn["num_attention_heads"]
    config = {name: drawn[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    config |= {"n_layer": drawn["num_hidden_layers"], "n_head": heads, "hidden_size": heads * drawn["head_dim"]}
    config |= {"layer_norm_epsilon": random_fields.log(draw, 1e-12, 1.0), **random_fields.dtype(draw)}
    return config | random_fields.flags(draw, "bias", "tie_word_embeddings")


def _first_new_random(draw: random.Random) -> dict[str, Any]:
    config = _first_random(draw)
    heads = config["n_head"]
    return {**config, "n_head_kv": draw.choice([some for some in range(1, heads + 1) if heads % some == 0])}


def _first_old_random(draw: random.Random) -> dict[str, Any]:
    return _first_random(draw) | random_fields.flags(draw, "multi_query", "parallel_attn", "alibi")


FAMILIES = (
    Family(
        "falcon",
        "FalconForCausalLM",
        tiny=(
            _tiny(  # as Falcon 40B
                "new",
                hidden_size=84,
                num_attention_heads=6,
                num_kv_heads=2,
                ffn_hidden_size=103,
                new_decoder_architecture=True,
                bias=True,
            ),
            _tiny(  # as Falcon 2 11B
                "grouped",
                hidden_size=96,
                num_attention_heads=8,
                num_kv_heads=4,
                ffn_hidden_size=150,
                new_decoder_architecture=True,
                num_ln_in_parallel_attn=1,
                activation="gelu_new",
                tie_word_embeddings=False,
            ),
            _tiny("query", hidden_size=84, num_attention_heads=6),  # as Falcon 7B
            _tiny("heads", hidden_size=60, num_attention_heads=5, multi_query=False, parallel_attn=False, bias=True),
        ),
        weights=_weights,
        random=_random,
        cut={"num_hidden_layers": 1},
        optional=frozenset(
            {
                *("ffn_hidden_size", "new_decoder_architecture", "num_ln_in_parallel_attn", "activation", "bias"),
                *("num_kv_heads", "multi_query", "parallel_attn", "layer_norm_epsilon", "alibi"),
            }
        ),
        bad=(
            ("falcon-new", "alibi", "yes"),
            ("falcon-new", "hidden_size", 85),
            ("falcon-new", "num_kv_heads", 4),
            ("falcon-new", "num_ln_in_parallel_attn", 3),
            ("falcon-new", "parallel_attn", False),
            ("falcon-new", "bias", 1),
            ("falcon-new", "activation", "tanh"),
            ("falcon-new", "partial_rotary_factor", 0.5),
            ("falcon-new", "n_embed", 0),
            ("falcon-query", "num_ln_in_parallel_attn", 2),
            ("falcon-heads", "num_kv_heads", 1),
        ),
    ),
    Family(
        "RefinedWeb",
        "RWForCausalLM",
        tiny=(_first("RefinedWeb", "falcon_first-new", hidden_size=84, n_head=6, n_head_kv=2, parallel_attn=True),),
        weights=_first_weights,
        random=_first_new_random,
        cut={"n_layer": 1},
        bad=(
            ("falcon_first-new", "n_head", 0),
            ("falcon_first-new", "n_head_kv", "one"),
            ("falcon_first-new", "apply_residual_connection_post_layernorm", True),
        ),
        oracle=_first_model,
    ),
    Family(
        "RefinedWebModel",
        "RWForCausalLM",
        tiny=(
            _first(
                "RefinedWebModel",
                "falcon_first_old-query",
                hidden_size=84,
                n_head=6,
                multi_query=True,
                parallel_attn=True,
                bias=True,
            ),
            _first(  # as Falcon-RW 1B
                "RefinedWebModel",
                "falcon_first_old-alibi",
                hidden_size=60,
                n_head=6,
                alibi=True,
                multi_query=False,
                parallel_attn=False,
                bias=True,
            ),
        ),
        weights=_first_weights,
        random=_first_old_random,
        cut={"n_layer": 1},
        oracle=_first_model,
    ),
)
