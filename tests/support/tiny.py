"""Tiny checkpoints in Hugging Face's form whose every flag, bias and constant shows in the logits.

Default initialisation hides bugs: biases are 0, norm gains 1, logits nearly flat. Here matrices are N(0, 2.25/fan_in),
norm gains 1 + N(0, 0.3²) and biases N(0, 0.3²), and the constants of norms and rope are far from their defaults.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MAX_SEQ_LEN = 160
# Mixed on purpose: one token, both sides of a page of 16, several pages, and the end inside a page.
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 33, 64, 97)


@dataclass(frozen=True)
class Tiny:
    """A checkpoint to be written: its config.json, the seed of its weights and prompts, and its number of files."""

    name: str
    config: Mapping[str, Any] = field(repr=False)
    seed: int = 0
    shards: int = 1

    @property
    def family(self) -> str:
        return self.name.partition("-")[0]

    def prompts(self) -> list[list[int]]:
        """Eight prompts of mixed length."""
        draw = random.Random(self.seed)
        return [[draw.randrange(self.config["vocab_size"]) for _ in range(length)] for length in PROMPT_LENGTHS]

    def write(self, folder: Path, **changes: Any) -> Path:
        """Write the checkpoint into `folder`, with some fields of config.json changed; the same bytes every time."""
        config = {**self.config, **changes}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        tensors = _weights(config, self.seed)
        if self.shards == 1:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        names = sorted(tensors)
        where: dict[str, str] = {}
        for number in range(self.shards):
            file = f"model-{number + 1:05d}-of-{self.shards:05d}.safetensors"
            part = {name: tensors[name] for name in names[number :: self.shards]}  # layers cut across files
            save_file(part, folder / file, metadata={"format": "pt"})
            where |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
        return folder


def _weights(config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, in Hugging Face's names."""
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn, heads, head_dim = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
    )
    kv_heads = config["num_key_value_heads"]
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, outputs: int, inputs: int, bias: bool = False) -> None:
        tensors[f"{name}.weight"] = torch.randn(outputs, inputs, generator=generator) * 1.5 / inputs**0.5
        if bias:
            tensors[f"{name}.bias"] = torch.randn(outputs, generator=generator) * 0.3

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = 1 + torch.randn(size, generator=generator) * 0.3

    matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
        norm(f"{layer}.input_layernorm", hidden)
        matrix(f"{layer}.self_attn.q_proj", heads * head_dim, hidden, attention_bias)
        matrix(f"{layer}.self_attn.k_proj", kv_heads * head_dim, hidden, attention_bias)
        matrix(f"{layer}.self_attn.v_proj", kv_heads * head_dim, hidden, attention_bias)
        matrix(f"{layer}.self_attn.o_proj", hidden, heads * head_dim, attention_bias)
        if config["model_type"] == "qwen3":
            norm(f"{layer}.self_attn.q_norm", head_dim)
            norm(f"{layer}.self_attn.k_norm", head_dim)
        norm(f"{layer}.post_attention_layernorm", hidden)
        matrix(f"{layer}.mlp.gate_proj", ffn, hidden, mlp_bias)
        matrix(f"{layer}.mlp.up_proj", ffn, hidden, mlp_bias)
        matrix(f"{layer}.mlp.down_proj", hidden, ffn, mlp_bias)
    norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        matrix("lm_head", config["vocab_size"], hidden)
    return tensors


def _llama(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": MAX_SEQ_LEN,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **fields,
    }


def _qwen3(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "max_position_embeddings": MAX_SEQ_LEN,
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **fields,
    }


# Per family: key-value groups of 1, 2 and 3; rope default, linear and llama3; both spellings; a head both tied and not.
# `rms_norm_eps` is large, so that it shows beside activations of size one.
_TINIES = (
    Tiny(
        "llama-plain",
        _llama(
            hidden_size=75,
            num_hidden_layers=3,
            num_attention_heads=5,
            num_key_value_heads=5,
            head_dim=14,
            intermediate_size=117,
            vocab_size=389,
            rms_norm_eps=0.013,
            rope_parameters={"rope_type": "default", "rope_theta": 503.0},
            tie_word_embeddings=False,
            dtype="float32",
        ),
        seed=11,
    ),
    Tiny(
        "llama-biased",
        _llama(
            hidden_size=60,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=10,
            intermediate_size=131,
            vocab_size=401,
            rms_norm_eps=0.021,
            rope_theta=3001.0,
            rope_scaling={"type": "linear", "factor": 2.5},
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            torch_dtype="float32",
        ),
        seed=2,
        shards=3,
    ),
    Tiny(
        "llama-scaled",
        _llama(
            hidden_size=54,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=14,
            intermediate_size=99,
            vocab_size=367,
            rms_norm_eps=0.017,
            rope_theta=701.0,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 5.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 48,
            },
            mlp_bias=True,
            tie_word_embeddings=False,
            torch_dtype="float32",
        ),
        seed=3,
    ),
    Tiny(
        "qwen3-plain",
        _qwen3(
            hidden_size=67,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=22,
            intermediate_size=123,
            vocab_size=383,
            rms_norm_eps=0.019,
            rope_theta=307.0,
            tie_word_embeddings=True,
            torch_dtype="float32",
        ),
        seed=20,
    ),
    Tiny(
        "qwen3-biased",
        _qwen3(
            hidden_size=93,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=20,
            intermediate_size=141,
            vocab_size=409,
            rms_norm_eps=0.011,
            rope_parameters={"rope_type": "linear", "rope_theta": 2003.0, "factor": 1.7},
            attention_bias=True,
            tie_word_embeddings=False,
            dtype="float32",
        ),
        seed=13,
        shards=2,
    ),
    Tiny(
        "qwen3-scaled",
        _qwen3(
            hidden_size=51,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=26,
            intermediate_size=107,
            vocab_size=373,
            rms_norm_eps=0.023,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 907.0,
                "factor": 6.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 40,
            },
            tie_word_embeddings=True,
            dtype="float32",
        ),
        seed=6,
    ),
)
TINY: Mapping[str, Tiny] = {tiny.name: tiny for tiny in _TINIES}
