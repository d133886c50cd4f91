"""Write genai_config.json, from which onnxruntime-genai learns the names, sizes and end tokens of a model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.export.onnx.graph import ATTENTION_MASK, INPUT_IDS, LOGITS, CachedLayer
from ingot.ir.errors import CheckpointError, ExportError
from ingot.ir.json_text import parse_json

GENAI_CONFIG = "genai_config.json"
# Types of model for which onnxruntime-genai (src/models/model_type.h) runs a decoder with the inputs of this export.
# Others of its types have further inputs or steps of their own; a model of those is a "decoder".
_TYPES = frozenset(
    {"gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "nemotron", "olmo", "qwen2", "qwen3", "smollm3"}
)


def genai_config(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    layers: Mapping[int, CachedLayer],
    *,
    filename: str,
    vocab_size: int,
    max_seq_len: int,
    eos_token_ids: Sequence[int],
    window_caches: bool,
) -> dict[str, Any]:
    """Return the content of genai_config.json.

    `config` and `generation` are config.json and generation_config.json of the checkpoint. `layers` are the caches by
    number. `eos_token_ids` are the tokens that end a sequence. `window_caches` says that layers with a window have
    caches of about its size. Raises ExportError for layers with caches of different sizes, or whose numbers have gaps,
    and for a model without end tokens.
    """
    if sorted(layers) != list(range(len(layers))):
        raise ExportError("layers without a cache", where=GENAI_CONFIG, expected=f"caches 0 to {len(layers) - 1}")
    if len(sizes := {(one.kv_heads, one.head_dim) for one in layers.values()}) != 1:
        listed = " and ".join(f"{kv_heads} x {head_dim}" for kv_heads, head_dim in sorted(sizes))
        raise ExportError(f"layers with different caches: {listed}", where=GENAI_CONFIG, expected="one size for all")
    kv_heads, head_dim = sizes.pop()
    if not (eos := [one for one in eos_token_ids if 0 <= one < vocab_size]):
        raise ExportError(
            "the model has no token that ends a sequence",
            where=GENAI_CONFIG,
            expected=f"eos_token_id, from 0 to {vocab_size - 1}",
            hint="name one in the checkpoint's generation_config.json or config.json",
        )
    bos = _ids(generation, "bos_token_id") or _ids(config, "bos_token_id")
    pad = _ids(generation, "pad_token_id") or _ids(config, "pad_token_id")
    decoder: dict[str, Any] = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": filename,
        "head_size": head_dim,
        "num_attention_heads": max(one.heads for one in layers.values()),
        "num_hidden_layers": len(layers),
        "num_key_value_heads": kv_heads,
        "inputs": {
            "input_ids": INPUT_IDS,
            "attention_mask": ATTENTION_MASK,
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": LOGITS,
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    if windows := {number: one.window for number, one in layers.items() if window_caches and one.window}:
        # Attention drops old tokens itself, from caches of the window and some more; nothing slides outside the model.
        decoder["sliding_window"] = {
            "window_size": max(windows.values()),
            "slide_key_value_cache": False,
            "slide_inputs": False,
            "layers": sorted(windows),
        }
    kind = str(config.get("model_type", ""))
    model: dict[str, Any] = {
        "type": kind if kind in _TYPES else "decoder",
        "vocab_size": vocab_size,
        "context_length": max_seq_len,
        "eos_token_id": eos,
        "pad_token_id": pad[0] if pad else eos[0],
        "decoder": decoder,
    }
    if bos:
        model["bos_token_id"] = bos[0]
    return {"model": model, "search": {**_search(generation), "max_length": max_seq_len}}


def _search(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the search that the checkpoint recommends. Without them, it is greedy."""
    made: dict[str, Any] = {"do_sample": False, "num_beams": 1, "past_present_share_buffer": True, "min_length": 0}
    if generation.get("do_sample") is True:
        made["do_sample"] = True
    for name, kind in (("temperature", float), ("top_p", float), ("top_k", int), ("repetition_penalty", float)):
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            made[name] = kind(value)
    return made


def _ids(fields: Mapping[str, Any], name: str) -> list[int]:
    found = fields.get(name)
    listed = found if isinstance(found, list) else [found]
    return [one for one in listed if isinstance(one, int) and not isinstance(one, bool)]


def read_generation(files: Mapping[str, Path]) -> dict[str, Any]:
    """Return the content of generation_config.json; {} without one. Raises CheckpointError if it is damaged."""
    path = files.get("generation_config.json")
    if path is None:
        return {}
    try:
        found = parse_json(path.read_bytes(), strict=False)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"generation_config.json cannot be read: {error}", where=str(path)) from error
    if not isinstance(found, dict):
        raise CheckpointError("generation_config.json is no object", where=str(path))
    return found
