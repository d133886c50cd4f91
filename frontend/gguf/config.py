"""The config.json that the metadata of a GGUF file stands for.

The keys are listed in ggml's `docs/gguf.md`. A key of the architecture that is not known here is an error, because it
could change the computation.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from ingot.frontend.gguf.file import GgufFile

# llama.cpp's name of an architecture -> that of transformers, its model_type, and further fields.
ARCHITECTURES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", {"hidden_act": "silu"}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", {"hidden_act": "silu"}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {"hidden_act": "silu"}),
    "gemma": ("GemmaForCausalLM", "gemma", {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", {"hidden_activation": "gelu_pytorch_tanh"}),
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the fields of a config.json. Raises ConfigError for an architecture or a key that is not known."""
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise file.error(f"the architecture '{name}' of a GGUF file cannot be read", ", ".join(ARCHITECTURES))
    architecture, model_type, fields = ARCHITECTURES[name]
    own = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    read = _Keys(file, name, own)
    heads, hidden = read.whole("attention.head_count"), read.whole("embedding_length")
    head_dim = read.whole("attention.key_length", hidden // max(heads, 1))
    for key, expected in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
        if (found := read.whole(key, expected)) != expected:
            raise file.error(f"{name}.{key} is {found}", f"{expected}, the size of a head")
    if read.whole("expert_count", 0):
        raise file.error(f"the model has {own['expert_count']} experts", "a dense model")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    rows = file.shape("token_embd.weight")[0] if "token_embd.weight" in file.tensors else 0
    read.whole("vocab_size", rows)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        **fields,
        "hidden_size": hidden,
        "num_hidden_layers": read.whole("block_count"),
        "intermediate_size": read.whole("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": read.whole("context_length"),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": read.number("rope.freq_base", 10000.0),
        "vocab_size": rows or (len(tokens) if isinstance(tokens, list) else 0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "torch_dtype": "bfloat16",  # a GGUF file does not say in which dtype to compute
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "quantization_config": {"quant_method": "gguf"},
    }
    if name == "qwen2":
        del config["attention_bias"]  # q, k and v always have a bias
    if name == "gemma3":
        # llama.cpp, src/models/gemma3.cpp: the 27B model, of 62 layers, divides by the hidden size of a head.
        scale = hidden // heads if config["num_hidden_layers"] == 62 else head_dim
        config |= {"query_pre_attn_scalar": scale, "rope_local_base_freq": 10000.0, "attn_logit_softcapping": None}
        config |= {"final_logit_softcapping": None, "sliding_window": read.whole("attention.sliding_window")}
        config |= {"sliding_window_pattern": 6}
    if (scaling := _rope_scaling(file, read, head_dim)) is not None:
        config["rope_scaling"] = scaling
    read.end()
    return config


class _Keys:
    """The keys of a model's architecture, and which of them were read."""

    def __init__(self, file: GgufFile, name: str, values: Mapping[str, Any]) -> None:
        self.file, self.name, self.values, self.read = file, name, values, set[str]()

    def _get(self, key: str, kinds: tuple[type, ...], default: float | None) -> float:
        self.read.add(key)
        value: Any = self.values.get(key, default)
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        if not fits or not math.isfinite(number := float(value)) or number < 0:
            raise self.file.error(f"{self.name}.{key} is {value!r:.80}", "a number")
        return number

    def whole(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, (int,), default))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, (int, float), default))

    def text(self, key: str, default: str) -> str:
        self.read.add(key)
        return str(self.values.get(key, default))

    def end(self) -> None:
        if unread := sorted(self.values.keys() - self.read):
            raise self.file.error(
                f"the model has keys that are not understood: {', '.join(unread)[:300]}",
                f"only {', '.join(sorted(self.read))}",
                "use the safetensors checkpoint that the file was made from",
            )


def _rope_scaling(file: GgufFile, read: _Keys, head_dim: int) -> dict[str, Any] | None:
    kind, factor = read.text("rope.scaling.type", "none"), read.number("rope.scaling.factor", 1.0)
    if kind == "linear" and factor != 1.0:
        return {"rope_type": "linear", "factor": factor}
    if kind != "none" and kind != "linear":
        raise file.error(f"{read.name}.rope.scaling.type is '{kind}'", "none or linear")
    if "rope_freqs.weight" not in file.tensors:
        return None
    # Llama 3.1 and later: the file stores what frequencies are divided by, and not the numbers that define it.
    found = _floats(file, "rope_freqs.weight")
    theta = float(read.values.get("rope.freq_base", 10000.0))
    for guess in (2.0, 4.0, 8.0, 16.0, 32.0):
        if torch.allclose(found, _llama3_factors(theta, head_dim, guess), rtol=1e-3):
            return {"rope_type": "llama3", "factor": guess, **_LLAMA3}
    raise file.error("rope_freqs.weight holds factors that are not those of Llama 3.1", "factors of Llama 3.1")


def _floats(file: GgufFile, name: str) -> torch.Tensor:
    info = file.tensors[name]
    data = info.file.read_bytes()[info.begin : info.end]
    return torch.frombuffer(bytearray(data), dtype=info.dtype).float()


def _llama3_factors(theta: float, head_dim: int, factor: float) -> torch.Tensor:
    """Return what each frequency is divided by (llama.cpp, `convert_hf_to_gguf.py`, `generate_extra_tensors`)."""
    waves = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2).double() / head_dim)
    length, low, high = 8192.0, 1.0, 4.0
    smooth = (length / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    ends = torch.where(waves < length / high, torch.ones_like(waves), torch.full_like(waves, factor))
    inside = (waves >= length / high) & (waves <= length / low)
    return torch.where(inside, between, ends).float()
