"""The scripts in `benchmarks/`, and their shapes made tiny."""

import importlib
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def config_of(shape: str, **changes: Any) -> dict[str, Any]:
    """A shape of the benchmarks, made tiny."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    checkpoints = importlib.import_module("random_checkpoint")
    found: dict[str, Any] = checkpoints.config_of(
        shape, **{**sizes, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 512, **changes}
    )
    return found


# Eight experts, of which a token chooses two. MXFP4 has blocks of 32.
_GPT_OSS = {"num_local_experts": 8, "experts_per_token": 2, "pad_token_id": 0}
_MIXTURES: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-120b": _GPT_OSS,
    "qwen3-30b-a3b": {"num_experts": 8, "moe_intermediate_size": 32},
    "deepseek-v2-lite": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
}


def mixture_of(shape: str, layers: int = 2, **changes: Any) -> dict[str, Any]:
    """A mixture of experts of the benchmarks, made tiny."""
    config = config_of(shape, num_experts_per_tok=2, **{**_MIXTURES[shape], **changes})
    found: dict[str, Any] = importlib.import_module("random_checkpoint").with_layers(config, layers)
    return found
