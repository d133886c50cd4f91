"""MiniCPM and Tele-FLM: Llama's tensors, and factors on embeddings, results and logits.

MiniCPM's oracle is written from vLLM's model_executor/models/minicpm.py, and from copies of what checkpoints of openbmb
carry: the defaults of configuration_minicpm.py and MiniCPMLongRoPE of modeling_minicpm.py. Tele-FLM's is written from
vLLM's teleflm.py, and from configuration_teleflm.py and modeling_teleflm.py as FLM-Audio has them.
"""

import math
import random
from collections.abc import Mapping
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from oracle import Oracle, Tensors, attention, frequencies, gated, linear, rms_norm, rotated, scaled_frequencies
from tiny_checkpoint import MAX_SEQ_LEN, Tiny, tiny_like_llama

from families.family import Config, Family


def _tiny(architecture: str, model_type: str, name: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "hidden_size": 84,
        "rms_norm_eps": 0.016,
    }
    return tiny_like_llama(name, architecture, seed, **{**own, **fields})


def _o_bias(config: Config) -> bool:
    """Tele-FLM's can be switched off alone; MiniCPM has no such field."""
    return config.get("attention_bias", False) and not config.get("disable_att_o_bias", False)


def _tied(config: Config) -> bool:
    return config.get("tie_word_embeddings", config["model_type"] == "minicpm")


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, heads, width = (config[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    kv_heads, bias = config.get("num_key_value_heads") or heads, config.get("attention_bias", False)
    head_dim, drawn = hidden // heads, DrawnWeights(generator)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        drawn.norm(f"{layer}.input_layernorm", hidden)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            drawn.matrix(f"{layer}.self_attn.{name}_proj", count * head_dim, hidden, bias=bias)
        drawn.matrix(f"{layer}.self_attn.o_proj", hidden, hidden, bias=_o_bias(config))
        drawn.norm(f"{layer}.post_attention_layernorm", hidden)
        drawn.matrix(f"{layer}.mlp.gate_proj", width, hidden)
        drawn.matrix(f"{layer}.mlp.up_proj", width, hidden)
        drawn.matrix(f"{layer}.mlp.down_proj", hidden, width)
    drawn.norm("model.norm", hidden)
    if not _tied(config):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _long_frequencies(config: Config, head_dim: int, context: int) -> tuple[torch.Tensor, float]:
    """LongRoPE: one factor for each frequency, and one on cosines and sines that the two contexts give."""
    scaling, base = config["rope_scaling"], config.get("rope_theta", 10000.0)
    original = scaling["original_max_position_embeddings"]
    factors = torch.tensor(scaling["long_factor" if context > original else "short_factor"])
    stretch = config.get("max_position_embeddings", 2048) / original
    return frequencies(base, head_dim) / factors, math.sqrt(1 + math.log(stretch) / math.log(original))


def _llama(config: Config, max_seq_len: int, *, embedding: float = 1.0, result: float = 1.0, width: float = 1.0) -> Any:
    """Logits of Llama with factors: on embeddings, on what each block adds, and on what the head reads."""
    heads, eps = config["num_attention_heads"], config.get("rms_norm_eps", 1e-6)
    kv_heads, bias = config.get("num_key_value_heads") or heads, config.get("attention_bias", False)
    head_dim, scale = config["hidden_size"] // heads, 1.0
    if "long_factor" in (config.get("rope_scaling") or {}):
        rates, scale = _long_frequencies(config, head_dim, max_seq_len)
    else:
        rates = scaled_frequencies(config, head_dim, max_seq_len)

    def attended(t: Tensors, place: str, x: torch.Tensor) -> torch.Tensor:
        q = linear(t, f"{place}.q_proj", x, bias=bias).view(len(x), heads, head_dim)
        k, v = (linear(t, f"{place}.{one}_proj", x, bias=bias).view(len(x), kv_heads, head_dim) for one in "kv")
        mixed = attention(rotated(q, rates, scale), rotated(k, rates, scale), v)
        return linear(t, f"{place}.o_proj", mixed, bias=_o_bias(config))

    def logits(t: Tensors, ids: torch.Tensor) -> torch.Tensor:
        h = t["model.embed_tokens.weight"][ids] * embedding
        for index in range(config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            h = h + attended(t, f"{layer}.self_attn", rms_norm(t, f"{layer}.input_layernorm", h, eps)) * result
            x = rms_norm(t, f"{layer}.post_attention_layernorm", h, eps)
            names = (f"{layer}.mlp.{name}_proj" for name in ("gate", "up", "down"))
            h = h + gated(t, x, *names) * result
        head = "model.embed_tokens" if _tied(config) else "lm_head"
        return linear(t, head, rms_norm(t, "model.norm", h, eps) * width)

    return logits


def _minicpm(
    config: Config, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
) -> torch.nn.Module:
    factors = {
        "embedding": config.get("scale_emb", 1.0),
        "result": config.get("scale_depth", 1.0) / math.sqrt(config["num_hidden_layers"]),
        "width": config.get("dim_model_base", 1.0) / config["hidden_size"],
    }
    return Oracle(tensors, dtype, _llama(config, max_seq_len, **factors))


def _teleflm(
    config: Config, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
) -> torch.nn.Module:
    factors = {}
    if config.get("use_mup", False):
        output = config.get("output_mult", 1.0) / config.get("mup_scale_factor", 1.0)
        factors = {"embedding": config.get("input_mult", 1.0), "width": output}
    return Oracle(tensors, dtype, _llama(config, max_seq_len, **factors))


def _random_long(draw: random.Random, config: Config) -> dict[str, Any]:
    pairs, longest = config["hidden_size"] // config["num_attention_heads"] // 2, config["max_position_embeddings"]
    scaling = {
        name: [random_fields.log(draw, 0.5, 8.0) for _ in range(pairs)] for name in ("short_factor", "long_factor")
    }
    scaling["original_max_position_embeddings"] = draw.randint(8, min(longest, 200))
    return {"rope_theta": random_fields.log(draw, 2.0, 1e7), "rope_scaling": {"type": "longrope", **scaling}}


def _random_minicpm(draw: random.Random) -> dict[str, Any]:
    config = random_fields.square_sizes(draw)
    for name, low, high in (("scale_emb", 0.05, 12.0), ("scale_depth", 0.1, 3.0), ("dim_model_base", 8.0, 500.0)):
        if draw.random() < 0.8:
            config[name] = random_fields.log(draw, low, high)
    if draw.random() < 0.3:
        del config["tie_word_embeddings"]
    rope = _random_long if draw.random() < 0.4 else random_fields.published_rope
    return {**config, **random_fields.flags(draw, "attention_bias"), **rope(draw, config)}


def _random_teleflm(draw: random.Random) -> dict[str, Any]:
    config = random_fields.square_sizes(draw)
    for name in ("input_mult", "output_mult", "mup_scale_factor"):
        if draw.random() < 0.8:
            config[name] = random_fields.log(draw, 0.1, 5.0)
    if draw.random() < 0.3:
        del config["tie_word_embeddings"]
    config |= random_fields.flags(draw, "use_mup", "attention_bias", "disable_att_o_bias")
    return {**config, **random_fields.published_rope(draw, config)}


_LONG = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.4, 2.9],
    "long_factor": [1.5, 2.2, 3.1, 4.7, 6.0, 7.7, 9.1],
    "original_max_position_embeddings": 60,
}
_CUT = {"num_hidden_layers": 1}
FAMILIES = (
    Family(
        "minicpm",
        "MiniCPMForCausalLM",
        tiny=(
            _tiny(
                "MiniCPMForCausalLM",
                "minicpm",
                "minicpm-scaled",
                1,
                scale_emb=2.6,
                scale_depth=1.1,
                dim_model_base=130,
                attention_bias=True,
            ),
            _tiny(
                "MiniCPMForCausalLM",
                "minicpm",
                "minicpm-long",
                2,
                max_position_embeddings=4 * MAX_SEQ_LEN,
                scale_emb=0.7,
                scale_depth=1.3,
                dim_model_base=130,
                rope_scaling=_LONG,
                tie_word_embeddings=False,
            ),
        ),
        weights=_weights,
        random=_random_minicpm,
        cut=_CUT,
        oracle=_minicpm,
        bad=(
            ("minicpm-scaled", "num_experts", 8),
            ("minicpm-scaled", "sparse_config", {"topk": 64}),
            ("minicpm-scaled", "hidden_act", "fatrelu"),
            ("minicpm-scaled", "scale_emb", 0),
            ("minicpm-scaled", "scale_depth", "deep"),
            ("minicpm-scaled", "dim_model_base", -1),
            ("minicpm-scaled", "partial_rotary_factor", 0.5),
            ("minicpm-long", "max_position_embeddings", 59),
            ("minicpm-long", "rope_scaling", {**_LONG, "long_factor": [1.0]}),
        ),
    ),
    Family(
        "teleflm",
        "TeleFLMForCausalLM",
        tiny=(
            _tiny(
                "TeleFLMForCausalLM",
                "teleflm",
                "teleflm-mup",
                1,
                use_mup=True,
                input_mult=2.6,
                output_mult=3.9,
                mup_scale_factor=3.0,
                attention_bias=True,
                disable_att_o_bias=True,
            ),
            # Factors that nothing switches on.
            _tiny(
                "TeleFLMForCausalLM",
                "teleflm",
                "teleflm-plain",
                2,
                input_mult=2.6,
                output_mult=3.9,
                tie_word_embeddings=True,
            ),
        ),
        weights=_weights,
        random=_random_teleflm,
        cut=_CUT,
        oracle=_teleflm,
        bad=(
            ("teleflm-mup", "use_mup", 1),
            ("teleflm-mup", "input_mult", 0),
            ("teleflm-mup", "output_mult", "2"),
            ("teleflm-mup", "mup_scale_factor", -1.0),
            ("teleflm-mup", "disable_att_o_bias", "yes"),
            ("teleflm-mup", "aud_depthgpt", {"n_layer": 4}),
        ),
    ),
)
