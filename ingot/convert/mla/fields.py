"""The config.json of a converted checkpoint."""

from collections.abc import Mapping
from typing import Any

from ingot.convert.mla.sizes import Sizes
from ingot.convert.mla.source import FOLDED, Heads

# Of the source's own code, which would read the converted weights as grouped-query attention.
_LEFT_OUT = ("auto_map", "_name_or_path", "transformers_version")
_MODEL_TYPES = {FOLDED: "llama_mla"}


def converted_fields(
    config: Mapping[str, Any], heads: Heads, sizes: Sizes, dtype: str, record: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a converted config.json. `record` describes the conversion, as the field `transmla`."""
    made = {name: value for name, value in config.items() if name not in _LEFT_OUT}
    made |= {
        "architectures": [heads.target],
        "model_type": _MODEL_TYPES.get(heads.target, "qwen3_mla"),
        "kv_lora_rank": sizes.rank,
        "qk_rope_head_dim": sizes.rope_dim,
        "qk_rope_heads": sizes.rope_heads,
        "dtype" if "dtype" in config else "torch_dtype": dtype,
        "transmla": dict(record),
    }
    if heads.target != FOLDED:
        return {**made, "head_dim": sizes.width}
    # Qwen 2 has biases whatever its config.json says, so the field is the source's spec.
    made = {name: value for name, value in made.items() if name not in _WINDOWS}
    return {
        **made,
        "num_key_value_heads": heads.spec.heads,
        "head_dim": sizes.rope_dim // sizes.rope_heads,
        "qk_nope_head_dim": sizes.width,
        "v_head_dim": sizes.width,
        "q_lora_rank": None,
        "qk_latent_layernorm": False,
        "attention_bias": heads.spec.bias,
    }


# Fields of sources without windows, which Llama does not have.
_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
