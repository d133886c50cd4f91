"""A tiny checkpoint to calibrate, with outlier channels and a tokenizer with a token a byte."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from command_world import write_tokenizer
from tiny_checkpoint import Tiny
from tiny_weights import like_llama

OUTLIERS = [3, 17, 40]


def with_outliers(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Some channels of the hidden states are many times the others, as in trained models."""
    tensors = like_llama(config, generator)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[OUTLIERS] *= 8
    return tensors


MODEL = Tiny(
    "llama-calibrated",
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 260,
        "rms_norm_eps": 0.01,
        "rope_theta": 1000.0,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 160,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
    seed=11,
    weights=with_outliers,
)


def write_model(folder: Path, **changes: Any) -> Path:
    """The checkpoint with its tokenizer."""
    MODEL.write(folder, **changes)
    write_tokenizer(folder)
    return folder


def write_text(path: Path, words: int = 400, seed: int = 0) -> Path:
    """A text of random words, about five tokens each."""
    draw = random.Random(seed)
    known = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(60)]
    path.write_text(" ".join(draw.choice(known) for _ in range(words)), encoding="utf-8")
    return path
