"""The arguments of `LLM` that the engine takes. `AsyncLLM` passes all others to the compiler."""

ENGINE_OPTIONS = frozenset(
    {
        "distributed_executor_backend",
        "memory",
        "num_kv_pages",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "disable_cascade_attn",
        "scheduling_policy",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_mixed_tokens",
        "seed",
        "cuda_graphs",
        "enable_lora",
        "max_cpu_loras",
    }
)
