"""The weights of tiny checkpoints with Llama's names, in Hugging Face's form."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from drawn_weights import DrawnWeights


@dataclass(frozen=True)
class Layout:
    """What a family stores for a layer, in Hugging Face's names; biases by whether the config switches them on."""

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norms: tuple[tuple[int, ...], ...] = ()  # shapes of the norms of q and of k
    norm_center: float = 1.0
    merged: bool = False  # q, k, v are one tensor, and gate, up


_BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")
_BOTH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def layout(config: Mapping[str, Any]) -> Layout:
    """The layout of a checkpoint, written down from transformers' modeling files apart from Ingot's readers."""
    family, heads, kv_heads = config["model_type"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    everywhere = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": mlp_bias}
    a_head, all_heads = ((head_dim,),) * 2, ((heads * head_dim,), (kv_heads * head_dim,))
    match family:
        case "qwen2":
            return Layout(qkv_bias=True)
        case "qwen3":
            return Layout(**everywhere, qk_norms=a_head)
        case "phi3":
            return Layout(merged=True)
        case "gemma":
            return Layout(**everywhere, norm_center=0.0)
        case "gemma2" | "gemma3_text":
            norms = a_head if family == "gemma3_text" else ()
            return Layout(**everywhere, norms=_BOTH, qk_norms=norms, norm_center=0.0)
        case "olmo2" | "olmo3":
            return Layout(**everywhere, norms=_BEHIND, qk_norms=all_heads)
        case "exaone4":
            return Layout(norms=_BEHIND, qk_norms=a_head)
        case "hyperclovax":
            behind = ("post_norm1", "post_norm2") if config.get("use_post_norm", True) else ()
            return Layout(**everywhere, norms=(*Layout.norms, *behind))
        case "cohere" | "cohere2":
            each = ((heads, head_dim), (kv_heads, head_dim)) if config.get("use_qk_norm") else ()
            return Layout(**everywhere, norms=("input_layernorm",), qk_norms=each)
        case "seed_oss":
            qkv_bias = config.get("attention_bias", True)
            return Layout(qkv_bias=qkv_bias, o_bias=config.get("attention_out_bias", False), mlp_bias=mlp_bias)
        case "helium":
            return Layout(qkv_bias=bias, mlp_bias=mlp_bias)
        case "ernie4_5":
            bias = config.get("use_bias", False)
            return Layout(qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    return Layout(**everywhere)


def like_llama(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint with Llama's names."""
    hidden, ffn, heads = (config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    head_dim, kv_heads = config.get("head_dim") or hidden // heads, config["num_key_value_heads"]
    has = layout(config)
    drawn = DrawnWeights(generator)
    matrix, norm = drawn.matrix, functools.partial(drawn.norm, center=has.norm_center)
    matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        norm(f"{layer}.{has.norms[0]}", hidden)
        matrix(f"{attention}.q_proj", heads * head_dim, hidden, bias=has.qkv_bias)
        matrix(f"{attention}.k_proj", kv_heads * head_dim, hidden, bias=has.qkv_bias)
        matrix(f"{attention}.v_proj", kv_heads * head_dim, hidden, bias=has.qkv_bias)
        matrix(f"{attention}.o_proj", hidden, heads * head_dim, bias=has.o_bias)
        for name, shape in zip(("q_norm", "k_norm"), has.qk_norms, strict=False):
            norm(f"{attention}.{name}", *shape)
        for name in has.norms[1:]:
            norm(f"{layer}.{name}", hidden)
        matrix(f"{mlp}.gate_proj", ffn, hidden, bias=has.mlp_bias)
        matrix(f"{mlp}.up_proj", ffn, hidden, bias=has.mlp_bias)
        matrix(f"{mlp}.down_proj", hidden, ffn, bias=has.mlp_bias)
        if has.merged:
            drawn.merge(f"{attention}.qkv_proj", *(f"{attention}.{name}_proj" for name in "qkv"))
            drawn.merge(f"{mlp}.gate_up_proj", f"{mlp}.gate_proj", f"{mlp}.up_proj")
    norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors
