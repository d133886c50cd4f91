"""The meaning of config.json fields in any model family: which change the computation, which do not, and synonyms."""

import re
from collections.abc import Mapping
from typing import Any

# Fields that change a model's computation, and that a family's reader may not know, each with its effect. Sources: the
# configuration classes of transformers 5.23 (models/*/configuration_*.py); for models without one, the published
# config.json and code of the models named here.
CHANGES_THE_COMPUTATION: Mapping[str, str] = {
    # experts: mixtral, qwen2_moe, qwen3_moe, deepseek_v3, ernie4_5_moe, dbrx, llama4
    **dict.fromkeys(
        (
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "n_shared_experts",
            "num_shared_experts",
            "moe_num_experts",
            "moe_num_shared_experts",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "ffn_config",
        ),
        "experts",
    ),
    # latent attention: deepseek_v2, deepseek_v3, minicpm3, glm4_moe_lite
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), "latent attention"),
    # an indexer that chooses positions: deepseek_v32, glm_moe_dsa
    **dict.fromkeys(("index_topk", "index_head_dim", "index_n_heads"), "sparse attention"),
    # scans and convolutions: mamba, mamba2, jamba, bamba, zamba2, nemotron_h, falcon_h1, qwen3_next, lfm2, rwkv
    **dict.fromkeys(
        (
            "ssm_cfg",
            "ssm_state_size",
            "state_size",
            "mamba_d_state",
            "mamba_d_ssm",
            "mamba_expand",
            "attn_layer_period",
            "attn_layer_indices",
            "hybrid_override_pattern",
            "layers_block_type",
            "block_types",
            "linear_num_value_heads",
            "linear_attn_config",
            "full_attention_interval",
            "conv_L_cache",
            "attention_hidden_size",
        ),
        "a scan or a convolution",
    ),
    # positions: falcon, bloom, mpt, gptj, gpt_neox, cohere2, deepseek_v3, llama4, granitemoehybrid, qwen2_vl
    **dict.fromkeys(
        (
            "alibi",
            "use_alibi",
            "position_embedding_type",
            "rope_interleave",
            "rope_interleaved",
            "rotary_interleaved",
            "rotary_dim",
            "rotary_pct",
            "rotary_emb_base",
            "rope_ratio",
            "use_mrope",
            "mrope_section",
            "attn_temperature_tuning",
            "nope_layer_interval",
        ),
        "another kind of positions",
    ),
    # within a table of rope: phimoe
    **dict.fromkeys(("short_mscale", "long_mscale"), "another scale of rotations"),
    # caps and clamps: gemma2, grok, recurrent_gemma, olmo, dbrx, mpt
    **dict.fromkeys(
        (
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "router_logit_softcapping",
            "output_logit_softcapping",
            "logits_soft_cap",
            "clip_qkv",
            "attn_config",
        ),
        "a cap or a clamp",
    ),
    # norms: phi, cohere, stablelm, persimmon, olmoe, hunyuan, chameleon, glm4_moe, bloom, opt
    **dict.fromkeys(
        (
            "qk_layernorm",
            "qk_norm",
            "use_qk_norm",
            "add_qk_norm",
            "use_qkv_norm",
            "qk_ln",
            "swin_norm",
            "apply_residual_connection_post_layernorm",
            "do_layer_norm_before",
            "_remove_final_layer_norm",
        ),
        "other norms",
    ),
    # biases and sizes: falcon, internlm2, starcoder2, qwen2_moe, phi, mistral
    **dict.fromkeys(("bias", "use_bias", "qkv_bias", "attention_bias", "mlp_bias"), "biases"),
    "head_dim": "another size of heads",
    # scales: granite, cohere, minicpm, falcon_h1, grok, phi3small
    **dict.fromkeys(
        (
            "embedding_multiplier",
            "residual_multiplier",
            "attention_multiplier",
            "logits_scaling",
            "logit_scale",
            "scale_emb",
            "scale_depth",
            "scale_embedding",
            "dim_model_base",
            "embedding_multiplier_scale",
            "output_multiplier_scale",
            "lm_head_multiplier",
            "key_multiplier",
            "attention_in_multiplier",
            "attention_out_multiplier",
            "mlp_multipliers",
            "mup_use_scaling",
            "mup_attn_multiplier",
            "mup_embedding_multiplier",
            "mup_width_multiplier",
            "use_mup",
        ),
        "a scale",
    ),
    # what attention sees and which layers share: llama4, gemma3, gemma3n, hunyuan, mllama, prophetnet, phi3small
    **dict.fromkeys(
        (
            "is_causal",
            "use_bidirectional_attention",
            "attention_chunk_size",
            "attention_sinks",
            "prefix_lm",
            "num_kv_shared_layers",
            "use_cla",
            "cla_share_factor",
            "cross_attention_layers",
            "add_cross_attention",
            "cross_attention_hidden_size",
            "is_encoder_decoder",
            "dense_attention_every_n_layers",
            "pruned_heads",
        ),
        "another attention",
    ),
    # the shape of a layer: gpt_neox, falcon, stablelm, gemma3n, nanochat
    **dict.fromkeys(
        (
            "parallel_attn",
            "use_parallel_residual",
            "use_parallel_block",
            "new_decoder_architecture",
            "hidden_size_per_layer_input",
            "altup_num_inputs",
            "laurel_rank",
            "activation_sparsity_pattern",
            "block_configs",
            "word_embed_proj_dim",
        ),
        "another layer",
    ),
}

# Neutral values, besides null, false, 0, "" and empty ones: factors of one, and the behaviour of all definitions here.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "do_layer_norm_before": (True,),
    "scale_attn_weights": (True,),
    "rotary_pct": (1,),
    "rope_ratio": (1,),
    "partial_rotary_factor": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "lm_head_multiplier": (1,),
    "key_multiplier": (1,),
    "attention_in_multiplier": (1,),
    "attention_out_multiplier": (1,),
    "embedding_multiplier_scale": (1,),
    "output_multiplier_scale": (1,),
    "mup_attn_multiplier": (1,),
    "mup_embedding_multiplier": (1,),
    "mup_width_multiplier": (1,),
    "short_mscale": (1,),
    "long_mscale": (1,),
    "cla_share_factor": (1,),
}
# For these fields, false is not neutral: it disables something that all definitions here do.
ON_BY_DEFAULT = ("is_causal", "do_layer_norm_before", "scale_attn_weights")

HIDDEN = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads")
POSITIONS = (
    *("max_position_embeddings", "max_position_embedding", "n_positions", "n_ctx"),
    *("max_sequence_length", "seq_length", "max_seq_len"),
)
# Synonyms: a field with the same value as another field of its row, which is read, changes nothing.
SAME = (
    HIDDEN,
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    HEADS,
    KV_HEADS,
    ("head_dim", "kv_channels", "attention_head_dim", "head_size"),
    ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    POSITIONS,
    ("hidden_act", "activation_function", "hidden_activation", "activation"),
    ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    ("partial_rotary_factor", "rotary_pct", "rope_pct"),
    ("rope_theta", "rotary_emb_base", "rope_base"),
    ("tie_word_embeddings", "tie_embeddings"),
    ("sliding_window", "sliding_window_size"),
)

# Fields of windows and of experts, which have no meaning in a model without windows or experts.
OF_WINDOWS = ("sliding_window", "max_window_layers", "sliding_window_pattern", "rope_local_base_freq")
OF_EXPERTS = ("moe_intermediate_size", "shared_expert_intermediate_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# Fields that any configuration may have and that do not affect the computation: attributes of transformers'
# PretrainedConfig (4.x included), fields for generation and tokenizers, and notes of a model's authors. The last ones
# describe other parts of a model, which the tensors reveal.
_GENERAL = """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _rope_scaling_validation architectures
    attn_implementation auto_map bos_token_id cache_implementation chunk_size_feed_forward custom_pipelines
    decoder_start_token_id dtype eos_token_id finetuning_task generation_config id2label is_decoder label2id
    model_max_length model_type name num_labels output_attentions output_hidden_states pad_token_id prefix problem_type
    return_dict sep_token_id task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class tokenizer_name
    torch_dtype torchscript transformers_version unk_token_id use_bfloat16 use_cache use_return_dict
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    quantization_config compression_config unsloth_version unsloth_fixed transformers.js_config
    gradient_checkpointing pretraining_tp reorder_and_upcast_attn use_flash_attn use_flash_attention use_flash_attn_2
    attn_impl keys_to_ignore_at_inference is_llama_config use_parallel_embedding predict_special_tokens n_special onnx
    text_config vision_config audio_config mm_tokens_per_image vision_soft_tokens_per_image audio_soft_tokens_per_image
    understand_projector_stride projector_bias
    num_nextn_predict_layers num_mtp_layers ep_size learned_pos_emb _from_model_config attention_softmax_in_fp32
    scale_attention_softmax_in_fp32 masked_softmax_fusion skip_bias_add skip_bias_add_qkv offset_alibi verbose transmla
"""
GENERIC = frozenset(_GENERAL.split())
# Fields of training only (dropout under all its names, weight initialization, losses, gradients), and token ids.
ASIDE = re.compile(
    r".*dropout.*|.*_pdrop|.*initializer_(range|factor)|init_(std|device|config).*|.*_loss_coef|moe_loss_weight|aux_loss_alpha|seq_aux|altup_coef_clip"
    r"|embedding_fraction|.*_token_(id|ids|index)"
)
