"""The names of tensors in GGUF files, and the names that the same tensors have in Hugging Face checkpoints."""

import re
from collections.abc import Mapping

# llama.cpp, gguf-py/gguf/constants.py (TENSOR_NAMES) and tensor_mapping.py.
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma 3 has four norms in a layer, and `ffn_norm` is the one before the feed-forward part.
_NORMS: Mapping[str, Mapping[str, str]] = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_USUAL_NORMS = {"ffn_norm": "post_attention_layernorm"}


def hugging_face_name(name: str, architecture: str) -> str | None:
    """Return the name of a tensor in Hugging Face checkpoints; None if it is not known."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer = {**_LAYER, **_NORMS.get(architecture, _USUAL_NORMS)}.get(match[2])
        return None if layer is None else f"model.layers.{match[1]}.{layer}.{match[3]}"
    module, _, part = name.rpartition(".")
    return f"{_TOP[module]}.{part}" if module in _TOP and part == "weight" else None
