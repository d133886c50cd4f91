"""Configurations that are published on the Hugging Face hub, whole, by the name of the checkpoint: what real ones hold
beside the fields that a definition reads. Lists with an item for each layer are written as their rule."""

from collections.abc import Mapping
from typing import Any

_FULL, _SLIDING = "full_attention", "sliding_attention"


def _published(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    common = {"architectures": [architecture], "model_type": model_type, "use_cache": True, "initializer_range": 0.02}
    return {**common, **fields}


def _sizes(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, positions: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }


def _llama(**fields: Any) -> dict[str, Any]:
    usual = {"hidden_act": "silu", "pretraining_tp": 1, "rope_scaling": None, "tie_word_embeddings": False}
    return _published("LlamaForCausalLM", "llama", **{**usual, "bos_token_id": 1, "eos_token_id": 2, **fields})


_LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def _qwen2(**fields: Any) -> dict[str, Any]:
    return _published(
        "Qwen2ForCausalLM",
        "qwen2",
        attention_dropout=0.0,
        bos_token_id=151643,
        hidden_act="silu",
        rope_theta=1000000.0,
        torch_dtype="bfloat16",
        use_sliding_window=False,
        **{"eos_token_id": 151643, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, **fields},
    )


def _qwen3(**fields: Any) -> dict[str, Any]:
    return _published(
        "Qwen3ForCausalLM",
        "qwen3",
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=151643,
        eos_token_id=151645,
        head_dim=128,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        torch_dtype="bfloat16",
        transformers_version="4.51.0",
        use_sliding_window=False,
        **fields,
    )


def _mistral(**fields: Any) -> dict[str, Any]:
    usual = {
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    return _published("MistralForCausalLM", "mistral", **{**usual, "tie_word_embeddings": False, **fields})


def _gemma(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    usual = {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    return _published(architecture, model_type, **{**usual, "head_dim": 256, "rms_norm_eps": 1e-6, **fields})


def _gemma2(**fields: Any) -> dict[str, Any]:
    return _gemma(
        "Gemma2ForCausalLM",
        "gemma2",
        attn_logit_softcapping=50.0,
        cache_implementation="hybrid",
        final_logit_softcapping=30.0,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        rope_theta=10000.0,
        sliding_window=4096,
        torch_dtype="float32",
        **fields,
    )


def _phi3(**fields: Any) -> dict[str, Any]:
    code = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    return _published(
        "Phi3ForCausalLM",
        "phi3",
        _name_or_path="Phi-3-mini-4k-instruct",
        attention_bias=False,
        attention_dropout=0.0,
        auto_map=code,
        bos_token_id=1,
        embd_pdrop=0.0,
        eos_token_id=32000,
        hidden_act="silu",
        pad_token_id=32000,
        resid_pdrop=0.0,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        **fields,
    )


def _granite(**fields: Any) -> dict[str, Any]:
    return _published(
        "GraniteForCausalLM",
        "granite",
        attention_bias=False,
        attention_dropout=0.1,
        bos_token_id=0,
        embedding_multiplier=12.0,
        eos_token_id=0,
        hidden_act="silu",
        mlp_bias=False,
        pad_token_id=0,
        residual_multiplier=0.22,
        rms_norm_eps=1e-5,
        rope_scaling=None,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        **fields,
    )


def _cohere(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    usual = {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 5, "eos_token_id": 255001}
    more = {"hidden_act": "silu", "layer_norm_eps": 1e-5, "pad_token_id": 0}
    return _published(architecture, model_type, **{**usual, **more, **fields})


_SUMMARY = {
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}

PUBLISHED: Mapping[str, dict[str, Any]] = {
    "Llama-2-7b-hf": _llama(
        **_sizes(4096, 11008, 32, 32, 32, 32000, 4096),
        _name_or_path="meta-llama/Llama-2-7b-hf",
        rms_norm_eps=1e-5,
        torch_dtype="float16",
        transformers_version="4.31.0.dev0",
    ),
    "Meta-Llama-3-8B": _llama(
        **_sizes(4096, 14336, 32, 32, 8, 128256, 8192),
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=128000,
        eos_token_id=128001,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        torch_dtype="bfloat16",
        transformers_version="4.40.0.dev0",
    ),
    "Llama-3.1-70B-Japanese-Instruct-2407": _llama(
        **_sizes(8192, 28672, 80, 64, 8, 128256, 131072),
        _name_or_path="Llama-3.1-70B-Japanese-Instruct-2407",
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
        mlp_bias=False,
        rms_norm_eps=1e-5,
        rope_scaling=_LLAMA3,
        rope_theta=500000.0,
        torch_dtype="bfloat16",
        transformers_version="4.44.0.dev0",
    ),
    "SmolLM2-135M": _llama(
        **_sizes(576, 1536, 30, 9, 3, 49152, 8192),
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.041666666666666664,
        is_llama_config=True,
        rms_norm_eps=1e-5,
        rope_interleaved=False,
        rope_theta=100000,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        transformers_version="4.40.1",
    ),
    "Yi-1.5-6B": _llama(
        **_sizes(4096, 11008, 32, 32, 4, 64000, 4096),
        attention_bias=False,
        attention_dropout=0.0,
        pad_token_id=0,
        rms_norm_eps=1e-6,
        rope_theta=5000000.0,
        torch_dtype="bfloat16",
        transformers_version="4.37.2",
    ),
    "deepseek-llm-7b-base": _llama(
        **_sizes(4096, 11008, 30, 32, 32, 102400, 4096),
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        torch_dtype="bfloat16",
        transformers_version="4.33.1",
    ),
    "Mistral-7B-v0.1": _mistral(
        **_sizes(4096, 14336, 32, 32, 8, 32000, 32768),
        rope_theta=10000.0,
        sliding_window=4096,
        transformers_version="4.34.0.dev0",
    ),
    "Mistral-7B-Instruct-v0.3": _mistral(
        **_sizes(4096, 14336, 32, 32, 8, 32768, 32768),
        attention_dropout=0.0,
        rope_theta=1000000.0,
        sliding_window=None,
        transformers_version="4.42.0.dev0",
    ),
    "Qwen1.5-110B": _qwen2(
        **_sizes(8192, 49152, 80, 64, 8, 152064, 32768),
        max_window_layers=28,
        sliding_window=32768,
        transformers_version="4.37.0",
    ),
    "Qwen2-7B": _qwen2(
        **_sizes(3584, 18944, 28, 28, 4, 152064, 131072),
        max_window_layers=28,
        sliding_window=131072,
        transformers_version="4.37.2",
    ),
    "Qwen2-72B-Instruct": _qwen2(
        **_sizes(8192, 29568, 80, 64, 8, 152064, 32768),
        eos_token_id=151645,
        max_window_layers=80,
        sliding_window=131072,
        transformers_version="4.40.1",
    ),
    "Qwen2.5-1.5B": _qwen2(
        **_sizes(1536, 8960, 28, 12, 2, 151936, 131072),
        max_window_layers=28,
        sliding_window=131072,
        tie_word_embeddings=True,
        transformers_version="4.40.1",
        use_mrope=False,
    ),
    "Qwen3-8B": _qwen3(
        **_sizes(4096, 12288, 36, 32, 8, 151936, 40960), max_window_layers=36, tie_word_embeddings=False
    ),
    "Qwen3-0.6B": _qwen3(
        **_sizes(1024, 3072, 28, 16, 8, 151936, 40960), max_window_layers=28, tie_word_embeddings=True
    ),
    "gemma-2b": _gemma(
        "GemmaForCausalLM",
        "gemma",
        **_sizes(2048, 16384, 18, 8, 1, 256000, 8192),
        hidden_act="gelu",
        hidden_activation="gelu_pytorch_tanh",
        rope_scaling=None,
        rope_theta=10000.0,
        torch_dtype="bfloat16",
        transformers_version="4.38.1",
    ),
    "gemma-2-2b": _gemma2(**_sizes(2304, 9216, 26, 8, 4, 256000, 8192), transformers_version="4.42.4"),
    "gemma-2-9b": _gemma2(
        **_sizes(3584, 14336, 42, 16, 8, 256000, 8192),
        sliding_window_size=4096,
        transformers_version="4.42.0.dev0",
    ),
    "gemma-3-1b-pt": _gemma(
        "Gemma3ForCausalLM",
        "gemma3_text",
        **_sizes(1152, 6912, 26, 4, 1, 262144, 32768),
        attn_logit_softcapping=None,
        cache_implementation="hybrid",
        final_logit_softcapping=None,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        rope_local_base_freq=10000,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=512,
        sliding_window_pattern=6,
        torch_dtype="bfloat16",
        transformers_version="4.50.0.dev0",
    ),
    "gemma-3-270m": _gemma(
        "Gemma3ForCausalLM",
        "gemma3_text",
        **_sizes(640, 2048, 18, 4, 1, 262144, 32768),
        _sliding_window_pattern=6,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        hidden_activation="gelu_pytorch_tanh",
        layer_types=[_SLIDING if (index + 1) % 6 else _FULL for index in range(18)],
        query_pre_attn_scalar=256,
        rope_local_base_freq=10000.0,
        rope_scaling=None,
        rope_theta=1000000.0,
        sliding_window=512,
        torch_dtype="bfloat16",
        transformers_version="4.55.0.dev0",
        use_bidirectional_attention=False,
    ),
    "phi-2": _published(
        "PhiForCausalLM",
        "phi",
        **_sizes(2560, 10240, 32, 32, 32, 51200, 2048),
        _name_or_path="microsoft/phi-2",
        attention_dropout=0.0,
        bos_token_id=50256,
        embd_pdrop=0.0,
        eos_token_id=50256,
        hidden_act="gelu_new",
        layer_norm_eps=1e-5,
        partial_rotary_factor=0.4,
        qk_layernorm=False,
        resid_pdrop=0.1,
        rope_scaling=None,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        torch_dtype="float16",
        transformers_version="4.37.0",
    ),
    "Phi-3-mini-4k-instruct": _phi3(
        **_sizes(3072, 8192, 32, 32, 32, 32064, 4096),
        original_max_position_embeddings=4096,
        rope_scaling=None,
        sliding_window=2047,
        transformers_version="4.40.2",
    ),
    "Phi-3-mini-128k-instruct": _phi3(
        **_sizes(3072, 8192, 32, 32, 32, 32064, 131072),
        original_max_position_embeddings=4096,
        rope_scaling={"long_factor": [1.5] * 48, "short_factor": [1.1] * 48, "type": "longrope"},
        sliding_window=262144,
        transformers_version="4.40.2",
    ),
    "granite-3.1-2b-base": _granite(
        **_sizes(2048, 8192, 40, 32, 8, 49152, 131072),
        attention_multiplier=0.015625,
        logits_scaling=8.0,
        rope_theta=5000000.0,
        transformers_version="4.47.0",
    ),
    "OLMo-2-0425-1B": _published(
        "Olmo2ForCausalLM",
        "olmo2",
        **_sizes(2048, 8192, 16, 16, 16, 100352, 4096),
        attention_bias=False,
        attention_dropout=0.0,
        eos_token_id=100257,
        hidden_act="silu",
        pad_token_id=100277,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=500000,
        tie_word_embeddings=False,
        torch_dtype="float32",
        transformers_version="4.47.0",
    ),
    "c4ai-command-r-v01": _cohere(
        "CohereForCausalLM",
        "cohere",
        **_sizes(8192, 22528, 40, 64, 64, 256000, 8192),
        logit_scale=0.0625,
        model_max_length=131072,
        rope_theta=8000000.0,
        torch_dtype="float16",
        transformers_version="4.38.2",
        use_qk_norm=False,
    ),
    "c4ai-command-r7b-12-2024": _cohere(
        "Cohere2ForCausalLM",
        "cohere2",
        **_sizes(4096, 14336, 32, 32, 8, 256000, 8192),
        cache_implementation="hybrid",
        head_dim=128,
        layer_switch=4,
        logit_scale=0.25,
        order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj",
        rope_scaling=None,
        rope_theta=50000,
        rotary_pct=1.0,
        sliding_window=4096,
        sliding_window_pattern=4,
        torch_dtype="bfloat16",
        transformers_version="4.48.0.dev0",
        use_embedding_sharing=True,
        use_gated_activation=True,
        use_parallel_block=True,
        use_parallel_embedding=True,
    ),
    "EXAONE-4.0-1.2B": _published(
        "Exaone4ForCausalLM",
        "exaone4",
        **_sizes(2048, 4096, 30, 32, 8, 102400, 65536),
        attention_dropout=0.0,
        bos_token_id=1,
        eos_token_id=361,
        head_dim=64,
        hidden_act="silu",
        layer_types=[_FULL] * 30,
        pad_token_id=0,
        rms_norm_eps=1e-5,
        rope_scaling={**_LLAMA3, "factor": 16.0},
        rope_theta=1000000,
        sliding_window=None,
        sliding_window_pattern=None,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        transformers_version="4.54.0.dev0",
    ),
    "EXAONE-4.0-32B": _published(
        "Exaone4ForCausalLM",
        "exaone4",
        **_sizes(5120, 27392, 64, 40, 8, 102400, 131072),
        attention_dropout=0.0,
        bos_token_id=1,
        eos_token_id=361,
        head_dim=128,
        hidden_act="silu",
        layer_types=[_SLIDING if (index + 1) % 4 else _FULL for index in range(64)],
        pad_token_id=0,
        rms_norm_eps=1e-5,
        rope_scaling={**_LLAMA3, "factor": 16.0},
        rope_theta=1000000,
        sliding_window=4096,
        sliding_window_pattern="LLLG",
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        transformers_version="4.54.0.dev0",
    ),
    "SmolLM3-3B": _published(
        "SmolLM3ForCausalLM",
        "smollm3",
        **_sizes(2048, 11008, 36, 16, 4, 128256, 65536),
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=128012,
        hidden_act="silu",
        layer_types=[_FULL] * 36,
        max_window_layers=28,
        mlp_bias=False,
        no_rope_layer_interval=4,
        no_rope_layers=[int((index + 1) % 4 != 0) for index in range(36)],
        pad_token_id=128004,
        pretraining_tp=2,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=5000000.0,
        sliding_window=None,
        torch_dtype="bfloat16",
        transformers_version="4.54.0",
        use_sliding_window=False,
    ),
    "gpt2": _published(
        "GPT2LMHeadModel",
        "gpt2",
        **_SUMMARY,
        activation_function="gelu_new",
        attn_pdrop=0.1,
        bos_token_id=50256,
        embd_pdrop=0.1,
        eos_token_id=50256,
        layer_norm_epsilon=1e-5,
        n_ctx=1024,
        n_embd=768,
        n_head=12,
        n_layer=12,
        n_positions=1024,
        resid_pdrop=0.1,
        vocab_size=50257,
    ),
}
