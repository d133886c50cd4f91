"""DeciLM and Nemotron-NAS: layers that differ in key-value heads, in width, and in what they have at all.

NVIDIA's modeling_decilm.py and block_config.py (DeltaVector1/Chat-Prompters on GitHub has a copy of the first), and
NeMo's names for what stands in place of a block (nemo_automodel, DeciLMLinearAttention).
"""

import random
from collections.abc import Mapping
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from llama_oracle import LlamaOracle
from tiny_checkpoint import MAX_SEQ_LEN, Tiny, tiny
from tiny_weights import like_llama

from families.family import Config, Family


def _tiny(name: str, model_type: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "model_type": model_type,
        "hidden_size": 84,
        "num_attention_heads": 6,
        "max_position_embeddings": MAX_SEQ_LEN,
        "rms_norm_eps": 0.016,
        "rope_theta": 811.0,
        "tie_word_embeddings": False,
    }
    return tiny(name, "DeciLMForCausalLM", seed, **{**own, **fields})


def _grouped(group: int, **fields: Any) -> dict[str, Any]:
    unused = {"num_sink_tokens": None, "sparsify": None, "unshifted_sink": False}
    return {"n_heads_in_group": group, "no_op": False, "replace_with_linear": False, **unused, **fields}


def _wide(mult: float) -> dict[str, Any]:
    return {"ffn_mult": mult, "no_op": False, "replace_with_linear": False, "sparsify": None}


NO, LINEAR = {"no_op": True}, {"replace_with_linear": True}


def _blocks(*blocks: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    return {
        "num_hidden_layers": len(blocks),
        "block_configs": [{"attention": attention, "ffn": ffn} for attention, ffn in blocks],
    }


def _width(config: Config, ffn: Mapping[str, Any]) -> int:
    if ffn.get("ffn_mult") is None:
        return int(ffn["intermediate_size"])
    size = int(2 * round(ffn["ffn_mult"], 6) * config["hidden_size"] / 3)
    return size if size % 256 == 0 else size + 256 - size % 256


def _has(block: Mapping[str, Any], field: str) -> bool:
    return bool(block.get(field, False))


def _block_weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, heads, drawn = config["hidden_size"], config["num_attention_heads"], DrawnWeights(generator)
    head_dim, bias, mlp_bias = hidden // heads, config.get("attention_bias", False), config.get("mlp_bias", False)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index, block in enumerate(config["block_configs"]):
        layer, attention, ffn = f"model.layers.{index}", block["attention"], block["ffn"]
        if not _has(attention, "no_op"):
            drawn.norm(f"{layer}.input_layernorm", hidden)
            if _has(attention, "replace_with_linear"):
                drawn.matrix(f"{layer}.self_attn.linear_attn", hidden, hidden)
            else:
                kv_heads = heads // attention["n_heads_in_group"]
                for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                    drawn.matrix(f"{layer}.self_attn.{name}_proj", count * head_dim, hidden, bias=bias)
                drawn.matrix(f"{layer}.self_attn.o_proj", hidden, hidden, bias=bias)
        if not _has(ffn, "no_op"):
            drawn.norm(f"{layer}.post_attention_layernorm", hidden)
            if _has(ffn, "replace_with_linear"):
                drawn.matrix(f"{layer}.mlp.linear_mlp", hidden, hidden)
            else:
                for name in ("gate", "up"):
                    drawn.matrix(f"{layer}.mlp.{name}_proj", _width(config, ffn), hidden, bias=mlp_bias)
                drawn.matrix(f"{layer}.mlp.down_proj", hidden, _width(config, ffn), bias=mlp_bias)
    drawn.norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


class _BlockOracle(LlamaOracle):
    def layers(self, h: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.config["block_configs"]):
            layer, attention, ffn = f"model.layers.{index}", block["attention"], block["ffn"]
            if not _has(attention, "no_op"):
                x = self.norm(h, f"{layer}.input_layernorm")
                if _has(attention, "replace_with_linear"):
                    h = h + self.linear(x, f"{layer}.self_attn.linear_attn")
                else:
                    kv_heads, window = self.heads // attention["n_heads_in_group"], attention.get("window_length")
                    h = h + self.attention(x, f"{layer}.self_attn", kv_heads, window)
            if not _has(ffn, "no_op"):
                x = self.norm(h, f"{layer}.post_attention_layernorm")
                if _has(ffn, "replace_with_linear"):
                    h = h + self.linear(x, f"{layer}.mlp.linear_mlp")
                else:
                    h = h + self.gated(x, f"{layer}.mlp", "gate_proj", "up_proj", "down_proj")
        return h


def _random_blocks(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    heads = config["num_attention_heads"]
    config["hidden_size"] = heads * config.pop("head_dim")
    config["num_key_value_heads"] = config["intermediate_size"] = None
    config["rms_norm_eps"] = random_fields.log(draw, 1e-12, 1.0)
    config |= random_fields.flags(draw, "attention_bias", "mlp_bias")
    groups = [group for group in range(1, heads + 1) if heads % group == 0]
    blocks = []
    for _ in range(draw.randint(1, 6)):
        window = draw.choice([None, None, draw.randint(1, 40)])
        attention = draw.choice([NO, LINEAR, *[_grouped(draw.choice(groups), window_length=window)] * 3])
        ffn = draw.choice([NO, LINEAR, _wide(draw.uniform(0.1, 8.0)), {"intermediate_size": draw.randint(1, 200)}])
        blocks.append((attention, ffn))
    config |= _blocks(*blocks)
    table = random_fields.rope(draw, config, ("default", "linear", "llama3", "dynamic"))
    random_fields.spell_rope(config, table, draw)
    return config


class _HeadsOracle(LlamaOracle):
    def layers(self, h: torch.Tensor) -> torch.Tensor:
        for index, kv_heads in enumerate(self.config["num_key_value_heads_per_layer"]):
            layer = f"model.layers.{index}"
            h = h + self.attention(self.norm(h, f"{layer}.input_layernorm"), f"{layer}.self_attn", kv_heads)
            x = self.norm(h, f"{layer}.post_attention_layernorm")
            h = h + self.gated(x, f"{layer}.mlp", "gate_proj", "up_proj", "down_proj")
        return h


def _heads_weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Of DeciLM 7B, in which the projections of keys and values are as wide as their layer has heads."""
    heads_by_layer, head_dim = (
        config["num_key_value_heads_per_layer"],
        config["hidden_size"] // config["num_attention_heads"],
    )
    tensors = like_llama({**config, "num_key_value_heads": max(heads_by_layer)}, generator)
    for index, kv_heads in enumerate(heads_by_layer):
        for name in "kv":
            for tensor in ("weight", "bias"):
                at = f"model.layers.{index}.self_attn.{name}_proj.{tensor}"
                if at in tensors:
                    tensors[at] = tensors[at][: kv_heads * head_dim].contiguous()
    return tensors


def _random_heads(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    heads = config["num_attention_heads"]
    config["hidden_size"] = heads * config.pop("head_dim")
    del config["num_key_value_heads"]
    divisors = [count for count in range(1, heads + 1) if heads % count == 0]
    config["num_key_value_heads_per_layer"] = [draw.choice(divisors) for _ in range(config["num_hidden_layers"])]
    config["rms_norm_eps"] = random_fields.log(draw, 1e-12, 1.0)
    config |= random_fields.flags(draw, "attention_bias", "mlp_bias")
    table = random_fields.rope(draw, config, ("default", "linear", "dynamic"))
    random_fields.spell_rope(config, table, draw)
    return config


FAMILIES = (
    Family(
        "nemotron-nas",
        "DeciLMForCausalLM",
        tiny=(
            _tiny(
                "nemotron_nas-blocks",
                "nemotron-nas",
                0,
                **_blocks(
                    (_grouped(2), _wide(2.3)),
                    (NO, _wide(5.4)),
                    (LINEAR, LINEAR),
                    (_grouped(6), NO),
                    (NO, NO),
                    (_grouped(3, window_length=19), {"intermediate_size": 103, "hidden_act": "silu"}),
                ),
                attention_bias=True,
            ),
            _tiny(  # the first layers add nothing, or no attention
                "nemotron_nas-late",
                "nemotron-nas",
                1,
                **_blocks((NO, NO), (NO, LINEAR), (_grouped(1), _wide(1.2)), (_grouped(6), LINEAR), (LINEAR, NO)),
                tie_word_embeddings=True,
                mlp_bias=True,
            ),
        ),
        weights=_block_weights,
        random=_random_blocks,
        cut={**_blocks((_grouped(3), {"intermediate_size": 103})), "vocab_size": 379},
        bad=(
            ("nemotron_nas-blocks", "block_configs", [{}]),
            ("nemotron_nas-blocks", "position_embedding_type", "rope_llama4"),
            ("nemotron_nas-blocks", "hidden_act", "gelu"),
        ),
        oracle=_BlockOracle,
    ),
    Family(
        "deci",
        "DeciLMForCausalLM",
        tiny=(
            _tiny(
                "decilm-heads",
                "deci",
                0,
                num_hidden_layers=4,
                num_key_value_heads_per_layer=[2, 6, 1, 3],
                intermediate_size=103,
            ),
        ),
        weights=_heads_weights,
        random=_random_heads,
        cut={"num_hidden_layers": 1, "num_key_value_heads_per_layer": [2], "vocab_size": 379},
        bad=(
            ("decilm-heads", "num_key_value_heads_per_layer", [2, 6, 1]),
            ("decilm-heads", "num_key_value_heads_per_layer", None),
        ),
        oracle=_HeadsOracle,
    ),
)
STORAGE = ("LinearPartSpec.stored",)
