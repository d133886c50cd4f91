"""The arguments of vLLM's engine, and what each of them means for Ingot. Names and defaults are those of vLLM 0.33.

Arguments of three kinds: they set something (`MEANINGS`), they have no effect on results here (`NO_EFFECT`), or they
are refused unless they have their default (`REFUSED`). A default of None stands for vLLM's empty dicts and lists too.
"""

from collections.abc import Mapping

# name -> (default, meaning)
MEANINGS: Mapping[str, tuple[object, str]] = {
    "model": ("Qwen/Qwen3-0.6B", "an artifact, a checkpoint folder, or a repository on the hub as org/name"),
    "revision": (None, "the revision of a repository on the hub"),
    "code_revision": (None, "accepted: code of a checkpoint is never run"),
    "trust_remote_code": (False, "accepted: code of a checkpoint is never run, whatever the value"),
    "tokenizer": (None, "must be the model: an artifact has the tokenizer of its checkpoint"),
    "tokenizer_revision": (None, "must be the revision of the model"),
    "dtype": ("auto", "the dtype to compile a checkpoint in; auto: the checkpoint's, also if that is float32"),
    "kv_cache_dtype": ("auto", "the dtype of the KV cache to compile a checkpoint with"),
    "quantization": (
        None,
        "the format to round a checkpoint of floats to, or the method that quantized the checkpoint",
    ),
    "tensor_parallel_size": (1, "processes that share each layer; a checkpoint is compiled for them"),
    "pipeline_parallel_size": (
        1,
        "stages of layers, each with processes of its own; a checkpoint is compiled for them",
    ),
    "distributed_executor_backend": (
        None,
        "mp: these processes are on this host, which is the default; ray: on the hosts of a Ray cluster",
    ),
    "max_model_len": (None, "the most tokens of a sequence; a checkpoint is compiled for them"),
    "max_num_seqs": (None, "the most sequences in a step; at most as compiled"),
    "max_num_batched_tokens": (None, "the most tokens in a step; at most as compiled"),
    "block_size": (None, "must be the page size of the artifact"),
    "num_gpu_blocks_override": (None, "the number of pages of the KV cache"),
    "gpu_memory_utilization": (0.92, "the share of the device's memory for serving; by default Ingot's own default"),
    "enable_prefix_caching": (None, "whether prompts with a common prefix share its pages"),
    "enable_chunked_prefill": (None, "whether a long prompt may be split over several steps"),
    "disable_cascade_attn": (None, "whether cascade attention is never used"),
    "scheduling_policy": ("fcfs", "fcfs, or priority: requests may then have priorities"),
    "enforce_eager": (False, "steps on a GPU are not captured as CUDA graphs"),
    "enable_lora": (False, "requests may use LoRA adapters; an artifact must have been compiled for them"),
    "max_loras": (1, "adapters on the device at once; a checkpoint is compiled for them"),
    "max_lora_rank": (16, "the largest rank of an adapter; a checkpoint is compiled for it"),
    "max_cpu_loras": (None, "adapters that the host keeps; by default 64"),
    "seed": (0, "seeds the requests that have no seed"),
    "runner": ("auto", "generate or pooling, which the model must do; auto: what the model does"),
    "convert": ("auto", "auto or none: a model pools if its definition ends in pooling"),
    "max_logprobs": (20, "at most 20"),
    "generation_config": ("auto", "auto: default parameters come from the checkpoint; vllm: they are the class's"),
    "override_generation_config": (None, "default sampling parameters that replace the checkpoint's"),
    "chat_template": (None, "a Jinja template, or the path of one, that replaces the model's"),
    "hf_token": (None, "None or True: the token of the variable HF_TOKEN"),
    "load_format": ("auto", "auto or safetensors"),
    "tokenizer_mode": ("auto", "auto or hf: the tokenizers library reads tokenizer.json"),
    "config_format": ("auto", "auto or hf: config.json is read"),
    "model_impl": ("auto", "auto: Ingot has its own definitions of models"),
}

# reason -> name -> default
NO_EFFECT: Mapping[str, Mapping[str, object]] = {
    "logs and figures are not collected here": {
        "aggregate_engine_logging": False,
        "collect_detailed_traces": None,
        "cudagraph_metrics": False,
        "custom_histogram_buckets": None,
        "disable_log_stats": False,
        "enable_log_requests": False,
        "enable_logging_iteration_details": False,
        "enable_mfu_metrics": False,
        "enable_mm_processor_stats": False,
        "jit_monitor_mode": "warn",
        "jit_monitor_verbose": False,
        "kv_cache_metrics": False,
        "kv_cache_metrics_sample": 0.01,
        "log_config_file": None,
        "log_level": None,
        "logging_config": None,
        "per_request_spec_decode_metrics": "none",
        "served_model_name": None,
        "show_hidden_metrics_for_version": None,
        "use_tqdm_on_load": True,
    },
    "the compiler has chosen kernels and launches": {
        "async_scheduling": None,
        "attention_backend": None,
        "compilation_config": None,
        "cudagraph_capture_sizes": None,
        "disable_custom_all_reduce": False,
        "disable_hybrid_kv_cache_manager": None,
        "enable_flashinfer_autotune": None,
        "gdn_prefill_backend": None,
        "ir_op_priority": None,
        "kda_decode_backend": None,
        "kda_prefill_backend": None,
        "kernel_config": None,
        "linear_backend": "auto",
        "max_cudagraph_capture_size": None,
        "moe_backend": "auto",
        "monokernel": False,
        "optimization_level": None,
        "performance_mode": "balanced",
        "sparse_indexer_topk_backend": "auto",
    },
    "an artifact is mapped into memory": {
        "ignore_patterns": None,
        "max_parallel_loading_workers": None,
        "pt_load_map_location": "cpu",
        "safetensors_load_strategy": None,
        "safetensors_prefetch_block_size": None,
        "safetensors_prefetch_num_threads": None,
    },
    "the scheduler has its own rules": {
        "long_prefill_token_threshold": 0,
        "long_prefill_token_threshold_adaptive": False,
        "max_long_partial_prefills": 1,
        "max_num_partial_prefills": 1,
        "prefill_schedule_interval": 1,
        "prefix_cache_retention_interval": 0,
        "prefix_caching_hash_algo": "sha256",
        "prefix_match_unit": None,
        "scheduler_reserve_full_isl": True,
        "stream_interval": 1,
        "swap_space": 4,
        "watermark": 0.0,
    },
    "models take text only": {
        "disable_chunked_mm_input": False,
        "interleave_mm_strings": False,
        "language_model_only": False,
        "limit_mm_per_prompt": None,
        "media_io_kwargs": None,
        "mm_hasher_algorithm": "blake3",
        "mm_processor_cache_gb": 4,
        "mm_processor_cache_type": "lru",
        "mm_processor_device": "auto",
        "mm_shm_cache_max_object_size_mb": 128,
        "mm_tensor_ipc": "direct_rpc",
        "skip_mm_profiling": False,
        "video_pruning_method": "evs",
    },
}

# reason -> name -> default
REFUSED: Mapping[str, Mapping[str, object]] = {
    "the ranks of a mesh run on one machine, and serve one model together": {
        "all2all_backend": "allgather_reducescatter",
        "cp_kv_cache_interleave_size": None,
        "data_parallel_address": None,
        "data_parallel_backend": "mp",
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
        "data_parallel_multi_port_external_lb": False,
        "data_parallel_rank": None,
        "data_parallel_rpc_port": None,
        "data_parallel_size": 1,
        "data_parallel_size_local": None,
        "data_parallel_start_rank": None,
        "dcp_comm_backend": None,
        "dcp_kv_cache_interleave_size": 1,
        "decode_context_parallel_size": 1,
        "device_ids": None,
        "distributed_timeout_seconds": None,
        "enable_dbo": False,
        "enable_elastic_ep": False,
        "enable_eplb": False,
        "enable_expert_parallel": False,
        "master_addr": "127.0.0.1",
        "master_port": 29501,
        "nnodes": 1,
        "node_rank": 0,
        "numa_bind": False,
        "prefill_context_parallel_size": 1,
        "ray_workers_use_nsight": False,
        "worker_cls": "auto",
        "worker_extension_cls": "",
    },
    "adapters have the model's dtype, on one device, for all linears": {
        "default_mm_loras": None,
        "fully_sharded_loras": False,
        "lora_dtype": "auto",
        "lora_target_modules": None,
        "specialize_active_lora": False,
    },
    "llguidance is the only library for grammars": {
        "structured_outputs_config": None,
    },
    "reasoning is not told apart from answers yet": {
        "reasoning_config": None,
        "reasoning_parser": "",
        "reasoning_parser_plugin": None,
    },
    "draft models are entries of a model's definition": {
        "diffusion_config": None,
        "spec_method": None,
        "spec_model": None,
        "spec_tokens": None,
        "speculative_config": None,
    },
    "config.json of the checkpoint is compiled as it is": {
        "disable_sliding_window": False,
        "hf_config_path": None,
        "hf_overrides": None,
        "model_class_overrides": None,
        "pooler_config": None,
        "quantization_config": None,
    },
    "all weights and caches stay in the device's memory": {
        "cpu_offload_gb": 0,
        "enable_sleep_mode": False,
        "kv_events_config": None,
        "kv_offloading_size": None,
        "kv_transfer_config": None,
        "offload_group_size": 0,
    },
    "pass `num_gpu_blocks_override`, or `memory` to `ingot.LLM`": {"kv_cache_memory_bytes": None},
    "checkpoints from the hub go to the hub's own cache; set the variable HF_HOME": {"download_dir": None},
    "steps run no Python code of callers": {
        "io_processor_plugin": None,
        "logits_processors": None,
        "model_loader_extra_config": None,
        "scheduler_cls": None,
    },
    "log-probabilities come from the model's raw logits": {"logprobs_mode": "raw_logprobs"},
    "pass token ids as prompts and SamplingParams(detokenize=False)": {"skip_tokenizer_init": False},
    "prompts are texts or token ids": {
        "allowed_local_media_path": "",
        "allowed_media_domains": None,
        "enable_mm_embeds": False,
        "enable_prompt_embeds": False,
        "mm_processor_kwargs": None,
    },
    "use `ingot bench` and `ingot explain --measure`": {
        "enable_layerwise_nvtx_tracing": False,
        "otlp_traces_endpoint": None,
        "profiler_config": None,
    },
    "Ingot has nothing that it would set": {
        "additional_config": None,
        "attention_config": None,
        "calculate_kv_scales": False,
        "enable_return_routed_experts": False,
        "enable_trace_replay": False,
        "kv_cache_dtype_skip_layers": None,
        "kv_sharing_fast_prefill": False,
        "mamba_cache_dtype": "auto",
        "mamba_config": None,
        "max_num_queued_reqs": None,
        "max_num_queued_tokens": None,
        "max_num_scheduled_tokens": None,
        "model_weights": "",
        "return_sampling_mask": False,
        "use_fp64_gumbel": False,
        "weight_transfer_config": None,
    },
}

# Further arguments of vLLM. They tune features that Ingot does not have: other memories, several devices, images.
# Each is refused with any value, and has no option on a command line.
_ABSENT = """allow_deprecated_quantization aux_output_config cpu_distributed_timeout_seconds cpu_offload_params
    dbo_decode_token_threshold dbo_prefill_token_threshold dcp_q_replicate disable_nccl_for_dp_synchronization
    dp_sync_interval ec_manager_config ec_transfer_config elastic_ep_max_dp_size enable_batch_sharded_sampling
    enable_cumem_allocator enable_ep_weight_filter enable_fault_tolerance enable_hc_sp
    enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mixed_moe_lora_format
    enable_moe_shared_loras enable_nccl_comm_suspend enable_shm_tensor_arena enable_tower_connector_lora engram_config
    eplb_config expert_placement_strategy fail_on_environ_validation fault_tolerance_config kv_offloading_backend
    mamba_backend mamba_block_size mamba_cache_mode mamba_cache_philox_rounds mamba_ssm_cache_dtype mamba_ssu_algorithm
    max_lora_cls_labels max_num_active_seqs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype
    mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only
    mm_encoder_tp_mode mm_ipc_gpu_memory_gb numa_bind_cpus numa_bind_nodes offload_backend offload_num_in_group
    offload_params offload_prefetch_step override_attention_dtype renderer_num_workers replayssm_buffer_len
    shutdown_timeout sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names swa_bounded_replay
    tokens_only ubatch_size use_replayssm video_pruning_rate watchdog_config watermark_config"""
OF_ABSENT_FEATURES = frozenset(_ABSENT.split())

# Arguments of earlier versions of vLLM, and what to use.
FORMER: Mapping[str, str] = {
    "device": "an artifact is compiled for its device: pass `--target` to compile-model",
    "disable_async_output_proc": "leave it out; outputs are processed while the next step runs",
    "enable_prompt_adapter": "prompt adapters are not supported",
    "guided_decoding_backend": "leave it out",
    "max_seq_len_to_capture": "leave it out; enforce_eager=True captures nothing",
    "num_lookahead_slots": "draft models are entries of a model's definition",
    "num_scheduler_steps": "leave it out",
    "override_neuron_config": "leave it out",
    "override_pooler_config": "a model pools as its definition says",
    "preemption_mode": "leave it out; preempted sequences are computed again",
    "rope_scaling": "config.json of the checkpoint is compiled as it is",
    "rope_theta": "config.json of the checkpoint is compiled as it is",
    "speculative_model": "draft models are entries of a model's definition",
    "task": "pass runner='generate' or runner='pooling', or leave it out",
    "use_v2_block_manager": "leave it out",
    "worker_use_ray": "Ingot serves on one device",
}

# Arguments of vLLM's command line that an `LLM` sets only in code: no option is added for them.
IN_CODE_ONLY = frozenset({"chat_template"})


def defaults() -> dict[str, object]:
    """Return the default of each argument: name -> value."""
    found = {name: default for name, (default, _) in MEANINGS.items()}
    for groups in (NO_EFFECT, REFUSED):
        for arguments in groups.values():
            found |= arguments
    return found


def meanings() -> dict[str, str]:
    """Return what each argument means for Ingot, in a line: name -> text."""
    found = {name: meaning for name, (_, meaning) in MEANINGS.items()}
    for reason, arguments in NO_EFFECT.items():
        found |= dict.fromkeys(arguments, f"no effect: {reason}")
    for reason, arguments in REFUSED.items():
        found |= dict.fromkeys(arguments, f"only the default: {reason}")
    return found
