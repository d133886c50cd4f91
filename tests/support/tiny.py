"""Tiny checkpoints in Hugging Face's form whose every flag, bias and constant shows in the logits.

Default initialisation hides bugs: biases are 0, norm gains 1, logits nearly flat. Here matrices are N(0, 2.25/fan_in),
norm gains 1 + N(0, 0.3²) and biases N(0, 0.3²), and the constants of norms and rope are far from their defaults.
"""

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MAX_SEQ_LEN = 160
# Mixed on purpose: one token, both sides of a page of 16, several pages, and the end inside a page.
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 33, 64, 97)


@dataclass(frozen=True)
class Tiny:
    """A checkpoint to be written: its config.json, the seed of its weights and prompts, its number of files, and the
    context to compile it for, which chooses some rotary tables."""

    name: str
    config: Mapping[str, Any] = field(repr=False)
    seed: int = 0
    shards: int = 1
    max_seq_len: int = MAX_SEQ_LEN

    @property
    def family(self) -> str:
        return self.name.partition("-")[0]

    def prompts(self) -> list[list[int]]:
        """Eight prompts of mixed length."""
        draw = random.Random(self.seed)
        return [[draw.randrange(self.config["vocab_size"]) for _ in range(length)] for length in PROMPT_LENGTHS]

    def write(self, folder: Path, **changes: Any) -> Path:
        """Write the checkpoint into `folder`, with some fields of config.json changed; the same bytes every time."""
        config = {**self.config, **changes}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        tensors = weights(config, self.seed)
        if self.shards == 1:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        names = sorted(tensors)
        where: dict[str, str] = {}
        for number in range(self.shards):
            file = f"model-{number + 1:05d}-of-{self.shards:05d}.safetensors"
            part = {name: tensors[name] for name in names[number :: self.shards]}  # layers cut across files
            save_file(part, folder / file, metadata={"format": "pt"})
            where |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
        return folder


@dataclass(frozen=True)
class Layout:
    """What a family stores for a layer, in Hugging Face's names; biases by whether the config switches them on."""

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norms: tuple[tuple[int, ...], ...] = ()  # shapes of the norms of q and of k
    norm_center: float = 1.0
    merged: bool = False  # q, k, v are one tensor, and gate, up


_BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")
_BOTH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def layout(config: Mapping[str, Any]) -> Layout:
    """The layout of a checkpoint, written down from transformers' modeling files apart from Ingot's readers."""
    family, heads, kv_heads = config["model_type"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    everywhere = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": mlp_bias}
    a_head, all_heads = ((head_dim,),) * 2, ((heads * head_dim,), (kv_heads * head_dim,))
    match family:
        case "qwen2":
            return Layout(qkv_bias=True)
        case "qwen3":
            return Layout(**everywhere, qk_norms=a_head)
        case "phi3":
            return Layout(merged=True)
        case "gemma":
            return Layout(**everywhere, norm_center=0.0)
        case "gemma2" | "gemma3_text":
            norms = a_head if family == "gemma3_text" else ()
            return Layout(**everywhere, norms=_BOTH, qk_norms=norms, norm_center=0.0)
        case "olmo2" | "olmo3":
            return Layout(**everywhere, norms=_BEHIND, qk_norms=all_heads)
        case "exaone4":
            return Layout(norms=_BEHIND, qk_norms=a_head)
        case "hyperclovax":
            behind = ("post_norm1", "post_norm2") if config.get("use_post_norm", True) else ()
            return Layout(**everywhere, norms=(*Layout.norms, *behind))
        case "cohere" | "cohere2":
            each = ((heads, head_dim), (kv_heads, head_dim)) if config.get("use_qk_norm") else ()
            return Layout(**everywhere, norms=("input_layernorm",), qk_norms=each)
        case "seed_oss":
            qkv_bias = config.get("attention_bias", True)
            return Layout(qkv_bias=qkv_bias, o_bias=config.get("attention_out_bias", False), mlp_bias=mlp_bias)
        case "helium":
            return Layout(qkv_bias=bias, mlp_bias=mlp_bias)
        case "ernie4_5":
            bias = config.get("use_bias", False)
            return Layout(qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    return Layout(**everywhere)


def weights(config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, in Hugging Face's names."""
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn, heads = (config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    head_dim, kv_heads = config.get("head_dim") or hidden // heads, config["num_key_value_heads"]
    has = layout(config)
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, outputs: int, inputs: int, bias: bool = False) -> None:
        tensors[f"{name}.weight"] = torch.randn(outputs, inputs, generator=generator) * 1.5 / inputs**0.5
        if bias:
            tensors[f"{name}.bias"] = torch.randn(outputs, generator=generator) * 0.3

    def norm(name: str, *shape: int) -> None:
        tensors[f"{name}.weight"] = has.norm_center + torch.randn(*shape, generator=generator) * 0.3

    def merge(name: str, *parts: str) -> None:
        place = name.rpartition(".")[0]
        tensors[f"{name}.weight"] = torch.cat([tensors.pop(f"{place}.{part}.weight") for part in parts])

    matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        norm(f"{layer}.{has.norms[0]}", hidden)
        matrix(f"{layer}.self_attn.q_proj", heads * head_dim, hidden, has.qkv_bias)
        matrix(f"{layer}.self_attn.k_proj", kv_heads * head_dim, hidden, has.qkv_bias)
        matrix(f"{layer}.self_attn.v_proj", kv_heads * head_dim, hidden, has.qkv_bias)
        matrix(f"{layer}.self_attn.o_proj", hidden, heads * head_dim, has.o_bias)
        for name, shape in zip(("q_norm", "k_norm"), has.qk_norms, strict=False):
            norm(f"{layer}.self_attn.{name}", *shape)
        for name in has.norms[1:]:
            norm(f"{layer}.{name}", hidden)
        matrix(f"{layer}.mlp.gate_proj", ffn, hidden, has.mlp_bias)
        matrix(f"{layer}.mlp.up_proj", ffn, hidden, has.mlp_bias)
        matrix(f"{layer}.mlp.down_proj", hidden, ffn, has.mlp_bias)
        if has.merged:
            merge(f"{layer}.self_attn.qkv_proj", "q_proj", "k_proj", "v_proj")
            merge(f"{layer}.mlp.gate_up_proj", "gate_proj", "up_proj")
    norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        matrix("lm_head", config["vocab_size"], hidden)
    return tensors


def _llama(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": MAX_SEQ_LEN,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **fields,
    }


def _qwen3(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "max_position_embeddings": MAX_SEQ_LEN,
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **fields,
    }


# Per family: key-value groups of 1, 2 and 3; rope default, linear and llama3; both spellings; a head both tied and not.
# `rms_norm_eps` is large, so that it shows beside activations of size one.
_TINIES = (
    Tiny(
        "llama-plain",
        _llama(
            hidden_size=75,
            num_hidden_layers=3,
            num_attention_heads=5,
            num_key_value_heads=5,
            head_dim=14,
            intermediate_size=117,
            vocab_size=389,
            rms_norm_eps=0.013,
            rope_parameters={"rope_type": "default", "rope_theta": 503.0},
            tie_word_embeddings=False,
            dtype="float32",
        ),
        seed=11,
    ),
    Tiny(
        "llama-biased",
        _llama(
            hidden_size=60,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=10,
            intermediate_size=131,
            vocab_size=401,
            rms_norm_eps=0.021,
            rope_theta=3001.0,
            rope_scaling={"type": "linear", "factor": 2.5},
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            torch_dtype="float32",
        ),
        seed=2,
        shards=3,
    ),
    Tiny(
        "llama-scaled",
        _llama(
            hidden_size=54,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=14,
            intermediate_size=99,
            vocab_size=367,
            rms_norm_eps=0.017,
            rope_theta=701.0,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 5.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 48,
            },
            mlp_bias=True,
            tie_word_embeddings=False,
            torch_dtype="float32",
        ),
        seed=3,
    ),
    Tiny(
        "qwen3-plain",
        _qwen3(
            hidden_size=67,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=22,
            intermediate_size=123,
            vocab_size=383,
            rms_norm_eps=0.019,
            rope_theta=307.0,
            tie_word_embeddings=True,
            torch_dtype="float32",
        ),
        seed=20,
    ),
    Tiny(
        "qwen3-biased",
        _qwen3(
            hidden_size=93,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=20,
            intermediate_size=141,
            vocab_size=409,
            rms_norm_eps=0.011,
            rope_parameters={"rope_type": "linear", "rope_theta": 2003.0, "factor": 1.7},
            attention_bias=True,
            tie_word_embeddings=False,
            dtype="float32",
        ),
        seed=13,
        shards=2,
    ),
    Tiny(
        "qwen3-scaled",
        _qwen3(
            hidden_size=51,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=26,
            intermediate_size=107,
            vocab_size=373,
            rms_norm_eps=0.023,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 907.0,
                "factor": 6.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 40,
            },
            tie_word_embeddings=True,
            dtype="float32",
        ),
        seed=6,
    ),
)


def _family(name: str, architecture: str, seed: int, max_seq_len: int = MAX_SEQ_LEN, **fields: Any) -> Tiny:
    """A checkpoint of a family with one: sizes that share no factor by chance, and the quirks in `fields`."""
    config = {
        "architectures": [architecture],
        "model_type": name.partition("-")[0],
        "hidden_size": 66,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 103,
        "vocab_size": 379,
        "max_position_embeddings": MAX_SEQ_LEN,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    norm = "layer_norm_eps" if "Cohere" in architecture else "rms_norm_eps"
    return Tiny(name, {**config, norm: 0.016, **fields}, seed, max_seq_len=max_seq_len)


_FULL, _SLIDING = "full_attention", "sliding_attention"
_LONG = {"short_factor": [1.0, 1.1, 1.3, 1.6, 2.0], "long_factor": [1.5, 2.2, 3.1, 4.7, 6.0]}
_PHI3: dict[str, Any] = {
    "hidden_size": 84,
    "partial_rotary_factor": 0.75,  # 10 of a head's 14 elements
    "sliding_window": 29,
    "max_position_embeddings": 4 * MAX_SEQ_LEN,
    "original_max_position_embeddings": MAX_SEQ_LEN,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 56,
}
_FAMILIES = (
    # Mistral: every layer has the window. The others' windows alternate, and all are shorter than most prompts.
    _family("mistral-window", "MistralForCausalLM", 1, head_dim=14, sliding_window=21, rope_theta=811.0),
    _family(
        "ministral-window",
        "MinistralForCausalLM",
        0,
        head_dim=14,
        sliding_window=13,
        layer_types=[_SLIDING, _FULL, _SLIDING],
        rope_theta=811.0,
    ),
    # Qwen 2: biases on q, k and v alone; layers from the second on have the window.
    _family(
        "qwen2-window",
        "Qwen2ForCausalLM",
        0,
        head_dim=16,
        hidden_act="silu",
        use_sliding_window=True,
        sliding_window=18,
        max_window_layers=1,
        rope_theta=1009.0,
    ),
    _family(
        "qwen2-yarn",
        "Qwen2ForCausalLM",
        0,
        head_dim=16,
        rope_theta=1009.0,
        rope_scaling={
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 40,
            "beta_fast": 1.5,
            "beta_slow": 0.3,
        },
    ),
    _family(
        "llama-yarn",
        "LlamaForCausalLM",
        4,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 607.0,
            "factor": 5.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.4,
            "mscale_all_dim": 0.3,
            "truncate": False,
        },
    ),
    # Both sides of the switch at the context that was compiled for.
    _family(
        "llama-dynamic",
        "LlamaForCausalLM",
        0,
        head_dim=14,
        rope_theta=701.0,
        rope_scaling={"type": "dynamic", "factor": 3.0},
    ),
    _family(
        "llama-stretched",
        "LlamaForCausalLM",
        1,
        max_seq_len=2 * MAX_SEQ_LEN,
        head_dim=14,
        rope_theta=701.0,
        rope_scaling={"type": "dynamic", "factor": 3.0},
    ),
    _family(
        "phi3-short",
        "Phi3ForCausalLM",
        0,
        **{**_PHI3, "rope_parameters": {"rope_type": "longrope", "rope_theta": 907.0, **_LONG}},
    ),
    _family(
        "phi3-long",
        "Phi3ForCausalLM",
        0,
        max_seq_len=MAX_SEQ_LEN + 1,
        **{**_PHI3, "rope_theta": 907.0, "rope_scaling": {"type": "longrope", **_LONG}},
    ),
    _family(
        "gemma-tied",
        "GemmaForCausalLM",
        0,
        head_dim=14,
        hidden_act="gelu",
        rope_theta=811.0,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    _family(
        "gemma2-capped",
        "Gemma2ForCausalLM",
        0,
        head_dim=14,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=23,
        sliding_window=11,
        attn_logit_softcapping=1.7,
        final_logit_softcapping=5.0,
        attention_bias=True,
        rope_theta=907.0,
        tie_word_embeddings=True,
    ),
    _family(
        "gemma3_text-old",
        "Gemma3ForCausalLM",
        0,
        head_dim=14,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=19,
        sliding_window=12,
        sliding_window_pattern=2,
        rope_theta=2003.0,
        rope_local_base_freq=101.0,
        rope_scaling={"rope_type": "linear", "factor": 2.5},
        tie_word_embeddings=True,
    ),
    _family(
        "gemma3_text-new",
        "Gemma3ForCausalLM",
        0,
        head_dim=14,
        hidden_activation="gelu",
        query_pre_attn_scalar=19,
        sliding_window=12,
        layer_types=[_FULL, _SLIDING, _SLIDING],
        final_logit_softcapping=5.0,
        rope_parameters={
            _FULL: {"rope_type": "linear", "factor": 2.5, "rope_theta": 2003.0},
            _SLIDING: {"rope_type": "default", "rope_theta": 101.0},
        },
        tie_word_embeddings=True,
    ),
    _family("olmo2-biased", "Olmo2ForCausalLM", 1, hidden_size=84, attention_bias=True, rope_theta=811.0),
    _family(
        "olmo3-window",
        "Olmo3ForCausalLM",
        0,
        hidden_size=84,
        sliding_window=17,
        layer_types=[_SLIDING, _FULL, _SLIDING],
        rope_parameters={
            _FULL: {**_LLAMA3, "rope_theta": 811.0},
            _SLIDING: {"rope_type": "default", "rope_theta": 307.0},
        },
    ),
    _family(
        "granite-scaled",
        "GraniteForCausalLM",
        0,
        hidden_size=84,
        embedding_multiplier=2.6,
        residual_multiplier=0.6,
        attention_multiplier=0.45,
        logits_scaling=0.7,
        attention_bias=True,
        mlp_bias=True,
        rope_theta=811.0,
    ),
    _family(
        "hyperclovax-scaled",
        "HyperCLOVAXForCausalLM",
        0,
        hidden_size=84,
        embedding_multiplier=2.6,
        residual_multiplier=0.6,
        attention_multiplier=0.45,
        logits_scaling=1.3,
        attention_bias=True,
        rope_theta=811.0,
    ),
    _family(
        "cohere-normed",
        "CohereForCausalLM",
        0,
        hidden_size=84,
        use_qk_norm=True,
        attention_bias=True,
        logit_scale=0.6,
        rope_theta=811.0,
        tie_word_embeddings=True,
    ),
    _family(
        "cohere2-window",
        "Cohere2ForCausalLM",
        0,
        hidden_size=84,
        logit_scale=1.4,
        sliding_window=15,
        sliding_window_pattern=2,
        rope_theta=811.0,
        tie_word_embeddings=True,
    ),
    _family(
        "smollm3-nope",
        "SmolLM3ForCausalLM",
        0,
        hidden_size=84,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=19,
        attention_bias=True,
        mlp_bias=True,
        rope_theta=811.0,
        tie_word_embeddings=True,
    ),
    _family(
        "seed_oss-biased",
        "SeedOssForCausalLM",
        0,
        head_dim=14,
        attention_bias=True,
        attention_out_bias=False,
        mlp_bias=True,
        rope_theta=811.0,
    ),
    _family(
        "helium-biased", "HeliumForCausalLM", 0, hidden_size=84, head_dim=14, attention_bias=True, rope_theta=811.0
    ),
    _family("ernie4_5-biased", "Ernie4_5ForCausalLM", 0, head_dim=14, use_bias=True, rope_theta=811.0),
    _family("cwm-window", "CwmForCausalLM", 3, head_dim=14, sliding_window=16, rope_theta=811.0, rope_scaling=_LLAMA3),
    _family(
        "exaone4-window",
        "Exaone4ForCausalLM",
        1,
        head_dim=14,
        sliding_window=14,
        sliding_window_pattern=3,
        rope_theta=811.0,
    ),
)
TINY: Mapping[str, Tiny] = {tiny.name: tiny for tiny in (*_TINIES, *_FAMILIES)}


def _cut(tiny: Tiny) -> Tiny:
    """The first layer of a checkpoint, in sizes that all cuts share.

    What two families compute alike is then one executable. Each takes the compiler some seven seconds, whatever its
    size; and the region between two layers, which a cut lacks, repeats what stands in the others.
    """
    sizes = {"hidden_size": 84, "head_dim": 14, "num_attention_heads": 6, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 103, "vocab_size": 379, "num_hidden_layers": 1}
    config = {**tiny.config, **sizes}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:1]
    return replace(tiny, name=f"{tiny.family}-cut", config=config)


# One of each family but the first two, whose checkpoints are small enough to be compiled whole.
CUTS: Mapping[str, Tiny] = {
    f"{tiny.family}-cut": _cut(tiny)
    for tiny in reversed(_FAMILIES)  # the first checkpoint of a family comes last and stays
    if tiny.family not in {whole.family for whole in _TINIES}
}
CHECKPOINTS: Mapping[str, Tiny] = {**TINY, **CUTS}

# One checkpoint for each mechanism, for what every test run can afford; the others are for `--run-slow`.
QUICK = ("llama-biased", "qwen3-scaled", "gemma2-capped", "cohere-normed", "smollm3-nope", "phi3-long")


def quick_first(names: Iterable[str]) -> list[Any]:
    """Parameters for pytest: `names`, all but the quick ones marked slow."""
    import pytest

    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]
