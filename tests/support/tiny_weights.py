"""The weights of tiny checkpoints, in Hugging Face's form, such that every bias and gain shows in the logits.

Default initialisation hides bugs: biases are 0, norm gains 1, logits nearly flat. Here matrices are N(0, 2.25/fan_in),
norm gains 1 + N(0, 0.3²) and biases N(0, 0.3²).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


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


def weights(config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, in Hugging Face's names."""
    generator = torch.Generator().manual_seed(seed)
    if config["model_type"] == "gpt2":
        return _gpt2(config, generator)
    if config["model_type"] == "phi":
        return _phi(config, generator)
    hidden, ffn, heads = (config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    head_dim, kv_heads = config.get("head_dim") or hidden // heads, config["num_key_value_heads"]
    has = layout(config)
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, outputs: int, inputs: int, bias: bool = False) -> None:
        tensors[f"{name}.weight"] = torch.randn(outputs, inputs, generator=generator) * 1.5 / inputs**0.5
        if bias:
            tensors[f"{name}.bias"] = torch.randn(outputs, generator=generator) * 0.3

    def norm(name: str, *shape: int) -> None:
        tensors[f"{name}.weight"] = has.norm_center + torch.randn(*shape, generator=generator) * 0.3

    def merge(name: str, *parts: str) -> None:
        place = name.rpartition(".")[0]
        tensors[f"{name}.weight"] = torch.cat([tensors.pop(f"{place}.{part}.weight") for part in parts])

    matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        norm(f"{layer}.{has.norms[0]}", hidden)
        matrix(f"{layer}.self_attn.q_proj", heads * head_dim, hidden, has.qkv_bias)
        matrix(f"{layer}.self_attn.k_proj", kv_heads * head_dim, hidden, has.qkv_bias)
        matrix(f"{layer}.self_attn.v_proj", kv_heads * head_dim, hidden, has.qkv_bias)
        matrix(f"{layer}.self_attn.o_proj", hidden, heads * head_dim, has.o_bias)
        for name, shape in zip(("q_norm", "k_norm"), has.qk_norms, strict=False):
            norm(f"{layer}.self_attn.{name}", *shape)
        for name in has.norms[1:]:
            norm(f"{layer}.{name}", hidden)
        matrix(f"{layer}.mlp.gate_proj", ffn, hidden, has.mlp_bias)
        matrix(f"{layer}.mlp.up_proj", ffn, hidden, has.mlp_bias)
        matrix(f"{layer}.mlp.down_proj", hidden, ffn, has.mlp_bias)
        if has.merged:
            merge(f"{layer}.self_attn.qkv_proj", "q_proj", "k_proj", "v_proj")
            merge(f"{layer}.mlp.gate_up_proj", "gate_proj", "up_proj")
    norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        matrix("lm_head", config["vocab_size"], hidden)
    return tensors


def _gpt2(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """GPT-2's, whose matrices are stored [inputs, outputs] (transformers, modeling_gpt2.py, Conv1D)."""
    hidden = config["n_embd"]
    width = config.get("n_inner") or 4 * hidden
    tensors: dict[str, torch.Tensor] = {}

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def matrix(name: str, inputs: int, outputs: int) -> None:
        tensors[f"{name}.weight"] = randn(inputs, outputs) * 1.5 / inputs**0.5
        tensors[f"{name}.bias"] = randn(outputs) * 0.3

    def norm(name: str) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = 1 + randn(hidden) * 0.3, randn(hidden) * 0.3

    for name, rows in (("wte", config["vocab_size"]), ("wpe", config["n_positions"])):
        tensors[f"transformer.{name}.weight"] = randn(rows, hidden) * 1.5 / hidden**0.5
    for index in range(config["n_layer"]):
        layer = f"transformer.h.{index}"
        norm(f"{layer}.ln_1")
        matrix(f"{layer}.attn.c_attn", hidden, 3 * hidden)
        matrix(f"{layer}.attn.c_proj", hidden, hidden)
        norm(f"{layer}.ln_2")
        matrix(f"{layer}.mlp.c_fc", hidden, width)
        matrix(f"{layer}.mlp.c_proj", width, hidden)
    norm("transformer.ln_f")
    if not config.get("tie_word_embeddings", True):
        tensors["lm_head.weight"] = randn(config["vocab_size"], hidden) * 1.5 / hidden**0.5
    return tensors


def _phi(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Phi 1's and 2's, in which everything has a bias."""
    hidden, heads, width = (config[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    head_dim, kv_heads = config.get("head_dim") or hidden // heads, config["num_key_value_heads"]
    tensors: dict[str, torch.Tensor] = {}

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def matrix(name: str, outputs: int, inputs: int) -> None:
        tensors[f"{name}.weight"] = randn(outputs, inputs) * 1.5 / inputs**0.5
        tensors[f"{name}.bias"] = randn(outputs) * 0.3

    def norm(name: str, size: int = hidden) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = 1 + randn(size) * 0.3, randn(size) * 0.3

    tensors["model.embed_tokens.weight"] = randn(config["vocab_size"], hidden) * 1.5 / hidden**0.5
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        norm(f"{layer}.input_layernorm")
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            matrix(f"{layer}.self_attn.{name}_proj", count * head_dim, hidden)
            if config.get("qk_layernorm") and name != "v":
                norm(f"{layer}.self_attn.{name}_layernorm", hidden // heads)
        matrix(f"{layer}.self_attn.dense", hidden, heads * head_dim)
        matrix(f"{layer}.mlp.fc1", width, hidden)
        matrix(f"{layer}.mlp.fc2", hidden, width)
    norm("model.final_layernorm")
    matrix("lm_head", config["vocab_size"], hidden)
    if config.get("tie_word_embeddings", False):
        del tensors["lm_head.weight"]
    return tensors
