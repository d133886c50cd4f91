"""StableLM: a part of a head is rotated, each head may have a norm of its own (transformers, modeling_stablelm.py; for
the names of the first checkpoints modeling_stablelm_epoch.py, which came with them)."""

import random
from collections.abc import Mapping
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from tiny_checkpoint import Tiny, tiny_like_llama

from families.family import Config, Family


def _tiny(model_type: str, architecture: str, kind: str, **fields: Any) -> Tiny:
    own = {
        "tie_word_embeddings": False,
    }
    return tiny_like_llama(f"{model_type}-{kind}", architecture, 1, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, width, drawn = config["hidden_size"], config["intermediate_size"], DrawnWeights(generator)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        drawn.norm(f"{layer}.input_layernorm", hidden, bias=True)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            rows, bias = count * (hidden // heads), config.get("use_qkv_bias", False)
            drawn.matrix(f"{layer}.self_attn.{name}_proj", rows, hidden, bias=bias)
            if config.get("qk_layernorm", False) and name != "v":
                for head in range(count):
                    drawn.norm(f"{layer}.self_attn.{name}_layernorm.norms.{head}", hidden // heads)
        drawn.matrix(f"{layer}.self_attn.o_proj", hidden, hidden)
        if not config.get("use_parallel_residual", False):
            drawn.norm(f"{layer}.post_attention_layernorm", hidden, bias=True)
        drawn.matrix(f"{layer}.mlp.gate_proj", width, hidden)
        drawn.matrix(f"{layer}.mlp.up_proj", width, hidden)
        drawn.matrix(f"{layer}.mlp.down_proj", hidden, width)
    drawn.norm("model.norm", hidden, bias=True)
    if not config.get("tie_word_embeddings", False):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    head_dim = config.pop("head_dim")
    config["hidden_size"] = config["num_attention_heads"] * head_dim
    config["layer_norm_eps"] = random_fields.log(draw, 1e-12, 1.0)
    config["partial_rotary_factor"] = 2 * draw.randint(1, head_dim // 2) / head_dim
    config |= random_fields.flags(draw, "use_qkv_bias", "qk_layernorm", "use_parallel_residual")
    table = random_fields.rope(draw, config, ("default", "linear", "llama3", "yarn"))
    random_fields.spell_rope(config, table, draw)
    return config


_OLD_NAMES = {"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor"}


def _first_random(draw: random.Random) -> dict[str, Any]:
    config, old = _random(draw), {new: name for name, new in _OLD_NAMES.items()}
    for name in ("qk_layernorm", "use_parallel_residual", "rope_parameters", "rope_scaling"):
        config.pop(name, None)
    return {old.get(name, name): value for name, value in config.items()}


def _first_model(
    config: Config, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
) -> torch.nn.Module:
    """Transformers' StableLM, which took over the arithmetic of modeling_stablelm_epoch.py."""
    from hf_model import hf_model  # which finds this file

    known = {_OLD_NAMES.get(name, name): value for name, value in config.items()}
    known |= {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm"}
    return hf_model(known, tensors, dtype, max_seq_len)


_STABLELM, _FIRST = ("stablelm", "StableLmForCausalLM"), ("stablelm_epoch", "StableLMEpochForCausalLM")
FAMILIES = (
    Family(
        *_STABLELM,
        tiny=(
            _tiny(  # as StableLM 2 12B
                *_STABLELM,
                "normed",
                hidden_size=84,
                layer_norm_eps=0.016,
                partial_rotary_factor=0.75,
                qk_layernorm=True,
                use_parallel_residual=True,
            ),
            _tiny(
                *_STABLELM,
                "biased",
                hidden_size=96,
                layer_norm_eps=0.013,
                use_qkv_bias=True,
                tie_word_embeddings=True,
            ),
        ),
        weights=_weights,
        random=_random,
        cut={"hidden_size": 84, "num_hidden_layers": 1},
        optional=frozenset({"use_qkv_bias", "qk_layernorm", "use_parallel_residual", "partial_rotary_factor"}),
        bad=(
            ("stablelm-normed", "hidden_size", 85),
            ("stablelm-normed", "hidden_act", "relu"),
            ("stablelm-normed", "use_qkv_bias", "yes"),
            ("stablelm-normed", "qk_layernorm", 1),
            ("stablelm-normed", "use_parallel_residual", 1),
            ("stablelm-normed", "partial_rotary_factor", 0.5),
        ),
    ),
    Family(
        *_FIRST,
        tiny=(_tiny(*_FIRST, "first", hidden_size=84, norm_eps=0.016, rope_pct=0.75, use_qkv_bias=True),),
        weights=_weights,
        random=_first_random,
        cut={"num_hidden_layers": 1},
        bad=(
            ("stablelm_epoch-first", "norm_eps", 0),
            ("stablelm_epoch-first", "rope_pct", "half"),
            ("stablelm_epoch-first", "rotary_scaling_factor", 2.0),
        ),
        oracle=_first_model,
    ),
)
STORAGE = ("NormSpec.apart",)
