"""Published mixtures of experts: their config.json, the tensors of their experts, and how many experts a step needs.

The sizes are those of config.json of Qwen/Qwen3-30B-A3B, openai/gpt-oss-20b, openai/gpt-oss-120b and
deepseek-ai/DeepSeek-V2-Lite. Of the last one, `auto_map` is left out, which names Python files of the repository.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from quantized_weights import QUANTIZATION_CONFIGS

# What config.json of GPT-OSS has in both sizes.
_GPT_OSS: Mapping[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "pad_token_id": 199999,
    "quantization_config": QUANTIZATION_CONFIGS["mxfp4"],
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}

MIXTURES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gpt-oss-20b": {
        **_GPT_OSS,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
    },
    "gpt-oss-120b": {
        **_GPT_OSS,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
}

# The families whose checkpoints have a matrix for each expert and projection. Transformers stacks them.
_SINGLE = ("qwen3_moe", "deepseek_v2")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Matrices whose results are added to the stream between layers.
_ADDED = (".o_proj.weight", ".down_proj.weight", ".down_proj")


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Return whether the model that a config.json describes has experts."""
    return any(name in config for name in _COUNTS)


def stored_shapes(
    config: Mapping[str, Any], name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of the tensors in which a checkpoint stores the tensor `name` of transformers' model.

    They are several if transformers stacks experts that the family's checkpoints store one by one.
    """
    module, _, projection = name.rpartition(".")
    if config["model_type"] not in _SINGLE or not module.endswith(".experts"):
        yield name, shape
        return
    parts = _PARTS[projection]
    for expert in range(shape[0]):
        for part in parts:
            yield f"{module}.{expert}.{part}.weight", (shape[1] // len(parts), shape[2])


def deviation(config: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> float:
    """Return the standard deviation of the random numbers of a tensor, for which tokens choose experts evenly.

    A router sees the stream between layers. Its scores are random and independent for tokens whose streams are. Rows of
    the embedding have deviation 1, and matrices that add to the stream are smaller by the square root of their number,
    as GPT-2 initializes them. So a stream is mostly the embedding's row of its token, through all layers. The part that
    all tokens have in common grows less than with the deviations of other shapes.

    Measured with transformers' models of all layers and experts, but 128 numbers of a stream, in decode steps of 32
    tokens: a layer's tokens choose 110.3 of 128 experts of Qwen3 30B-A3B on average (even choices: 111.8; deviations of
    other shapes: 102.8), 31.4 of 32 of GPT-OSS 20B (31.6; 31.4), and 60.8 of 64 of DeepSeek-V2-Lite (61.3).
    """
    if name.endswith("bias"):
        return 0.02
    if name.endswith(("embed_tokens.weight", ".sinks")):
        return 1.0
    scale: float = shape[1] ** -0.5
    return scale * (2 * config["num_hidden_layers"]) ** -0.5 if name.endswith(_ADDED) else scale


def expected_different(experts: int, top_k: int, tokens: int) -> float:
    """Return how many different experts `tokens` tokens choose on average, if each chooses `top_k` evenly."""
    return experts * (1 - (1 - top_k / experts) ** tokens)
