"""Configurations and weights of tiny checkpoints with experts, in Llama's names for all but the feed-forward parts."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from tiny_checkpoint import Tiny, tiny_like_llama
from tiny_weights import Layout

# Draws the tensors of the feed-forward part of a layer: (drawn, prefix of the layer, its index).
FeedForward = Callable[[DrawnWeights, str, int], None]

CUT: Mapping[str, Any] = {
    "hidden_size": 84,
    "head_dim": 14,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 379,
    "num_hidden_layers": 1,
}


def tiny(name: str, architecture: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "hidden_size": 66,
        "head_dim": 14,
        "intermediate_size": 53,
        "rms_norm_eps": 0.016,
        "tie_word_embeddings": False,
    }
    return tiny_like_llama(name, architecture, seed, **{**own, **fields})


def decoder(
    config: Mapping[str, Any],
    generator: torch.Generator,
    feed_forward: FeedForward,
    has: Layout,
    norm_bias: bool = False,
    head_bias: bool = False,
    qk_names: tuple[str, str] = ("q_norm", "k_norm"),
) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim, kv_heads = config.get("head_dim") or hidden // heads, config["num_key_value_heads"]
    drawn = DrawnWeights(generator)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for name in has.norms:
            drawn.norm(f"{layer}.{name}", hidden, bias=norm_bias)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            drawn.matrix(f"{layer}.self_attn.{name}_proj", count * head_dim, hidden, bias=has.qkv_bias)
        drawn.matrix(f"{layer}.self_attn.o_proj", hidden, heads * head_dim, bias=has.o_bias)
        for name, shape in zip(qk_names, has.qk_norms, strict=False):
            drawn.norm(f"{layer}.self_attn.{name}", *shape)
        feed_forward(drawn, layer, index)
    drawn.norm("model.norm", hidden, bias=norm_bias)
    if not config.get("tie_word_embeddings", False):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    if head_bias:
        drawn.tensors["lm_head.bias"] = drawn.randn(config["vocab_size"]) * 0.3
    return drawn.tensors


def gated(drawn: DrawnWeights, place: str, width: int, hidden: int, *, bias: bool = False) -> None:
    drawn.matrix(f"{place}.gate_proj", width, hidden, bias=bias)
    drawn.matrix(f"{place}.up_proj", width, hidden, bias=bias)
    drawn.matrix(f"{place}.down_proj", hidden, width, bias=bias)


def each_expert(
    drawn: DrawnWeights,
    place: str,
    count: int,
    width: int,
    hidden: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> None:
    """Three matrices for each expert; `names` are those of gate, up and down."""
    for expert in range(count):
        for name in names[:2]:
            drawn.matrix(f"{place}.{expert}.{name}", width, hidden)
        drawn.matrix(f"{place}.{expert}.{names[2]}", hidden, width)


def sizes(draw: random.Random, *, top_k: str = "num_experts_per_tok", experts: str = "num_experts") -> dict[str, Any]:
    """Sizes of a random config.json with experts. In float32: in 16 bits rounding would choose other experts."""
    config = random_fields.sizes(draw)
    for name in ("dtype", "torch_dtype"):
        if name in config:
            config[name] = "float32"
    config[experts] = draw.randint(1, 9)
    config[top_k] = draw.randint(1, config[experts])
    config["intermediate_size"] = draw.randint(1, 60)
    config["rms_norm_eps"] = random_fields.log(draw, 1e-12, 1.0)
    return config


def stacked(names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), block: str = "mlp") -> Any:
    """`restored` of a family: the matrices of experts as transformers stacks them. `names` are those of gate, up and
    down, and `block` is the name of the feed-forward part."""

    def restored(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {name.replace(f".{block}.", ".mlp."): one for name, one in tensors.items() if ".experts." not in name}
        for index in range(config["num_hidden_layers"]):
            place = f"model.layers.{index}.{block}.experts"
            count = len([name for name in tensors if name.startswith(f"{place}.") and f".{names[0]}." in name])
            if count:
                gate, up, down = (
                    torch.stack([tensors[f"{place}.{expert}.{name}.weight"] for expert in range(count)])
                    for name in names
                )
                kept[f"model.layers.{index}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], 1)
                kept[f"model.layers.{index}.mlp.experts.down_proj"] = down
        return kept

    return restored


def sigmoid_experts(drawn: DrawnWeights, mlp: str, count: int, width: int, hidden: int, shared: int) -> None:
    """The tensors of experts with sigmoid scores and a bias for the choice. The bias is as large as scores differ."""
    drawn.matrix(f"{mlp}.gate", count, hidden)
    drawn.tensors[f"{mlp}.gate.e_score_correction_bias"] = drawn.randn(count) * 0.3
    each_expert(drawn, f"{mlp}.experts", count, width, hidden)
    gated(drawn, f"{mlp}.shared_experts", shared, hidden)


def groups(draw: random.Random, experts: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of experts with sigmoid scores, with other numbers of experts that groups divide."""
    count, size = draw.randint(1, 4), draw.randint(2, 4)
    kept = draw.randint(1, count)
    return {
        experts: count * size,
        "num_experts_per_tok": draw.randint(1, kept * size),
        "n_group": count,
        "topk_group": kept,
        "moe_intermediate_size": draw.randint(1, 60),
        "routed_scaling_factor": random_fields.log(draw, 0.1, 5.0),
    }
