"""A tiny checkpoint that every kernel of a GPU takes, and the limits that reach all bucket classes."""

from typing import Any

from tiny_checkpoint import Tiny

# Sizes as kernels like them, and a head that is no power of two.
MODEL = Tiny(
    "qwen3-gpu",
    {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
    seed=3,
)
LIMITS: dict[str, Any] = {"max_batch": 96, "max_tokens": 256, "max_seq_len": 256, "jobs": 1}
