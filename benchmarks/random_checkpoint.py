"""Checkpoints with random weights, of published shapes: what benchmarks compile.

    python benchmarks/random_checkpoint.py 1b OUT [--layers 4] [--seed 0]

OUT gets config.json and bfloat16 safetensors of 5 GB at most, without a tokenizer. Weights are drawn on the GPU where
there is one: the 16 GB of the 8B shape are then written as fast as the disk takes them.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Config = Mapping[str, Any]
TensorShapes = Mapping[str, tuple[int, ...]]

_SHARD_BYTES = 5 * 10**9
_ITEM_BYTES = 2  # of bfloat16
_WRITERS = 4  # files written at once; what they hold in memory is four times _SHARD_BYTES and a copy of it

# The rotation is Llama 3's, without the scaling of 3.1 and 3.2: it makes tables, which cost the same to read.
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "vocab_size": 151936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
# The sizes are those of config.json of the published checkpoints: meta-llama/Llama-3.2-1B, meta-llama/Llama-3.1-8B,
# Qwen/Qwen3-0.6B, Qwen/Qwen3-1.7B, and google/gemma-3-4b-pt, whose text_config is the language model.
SHAPES: Mapping[str, Config] = {
    "1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
    "8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "intermediate_size": 14336,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    "gemma-3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "torch_dtype": "bfloat16",
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 10240,
        "tie_word_embeddings": True,
    },
}


def config_of(shape: str, **changes: Any) -> Config:
    """The config.json of a shape by its name in SHAPES, with some fields changed."""
    return {**SHAPES[shape], **changes}


def tensor_shapes(config: Config) -> TensorShapes:
    """The tensors of a checkpoint with this config.json, in their order, linears as [out, in]."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": sizes for name, sizes in layer_shapes(config).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def layer_shapes(config: Config) -> TensorShapes:
    """The tensors of one layer, by the names that they have in it."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    gemma = config["model_type"] == "gemma3_text"
    # Llama has neither norms of each head's queries and keys nor two more around the feed-forward part.
    head_norms = ("self_attn.q_norm", "self_attn.k_norm") if gemma or config["model_type"] == "qwen3" else ()
    norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if gemma else ()
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        **dict.fromkeys(head_norms, (head_dim,)),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm", *norms), (hidden,)),
    }


def write_checkpoint(folder: Path, config: Config, *, seed: int = 0) -> Path:
    """Write a checkpoint of this config.json into `folder`, which must not exist yet; returns it.

    Matrices are normal with a deviation of 1/sqrt(fan_in), norms multiply by 1, so that activations keep their size
    through any number of layers. The same seed gives the same weights on the same kind of device.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder.mkdir(parents=True)
    shapes = tensor_shapes(config)
    order = {name: number for number, name in enumerate(shapes)}
    shards = list(_shards(shapes))
    norm = 0.0 if config["model_type"] == "gemma3_text" else 1.0  # Gemma's norms multiply by 1 + weight
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]

    def write(file: str, names: list[str]) -> None:
        # A generator for each tensor: the weights do not depend on which file is drawn first.
        tensors = {name: _draw(shapes[name], (seed << 20) + order[name], device, norm) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})

    with ThreadPoolExecutor(_WRITERS) as writers:
        list(writers.map(write, files, shards))
    if len(shards) > 1:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        total = sum(map(_bytes, shapes.values()))
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def _bytes(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _ITEM_BYTES


def _shards(shapes: TensorShapes) -> Iterator[list[str]]:
    """The names in order, cut so that a file has _SHARD_BYTES at most."""
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        if names and size + _bytes(shape) > _SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += _bytes(shape)
    yield names


def _draw(shape: tuple[int, ...], seed: int, device: torch.device, norm: float) -> torch.Tensor:
    if len(shape) == 1:
        return torch.full(shape, norm, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return drawn.normal_(0, shape[1] ** -0.5, generator=generator).cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--layers", type=int, help="in place of as many as the shape has")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.out.exists():
        sys.exit(f"{options.out} exists already: name a folder that does not")
    changes = {} if options.layers is None else {"num_hidden_layers": options.layers}
    print(write_checkpoint(options.out, config_of(options.shape, **changes), seed=options.seed))


if __name__ == "__main__":
    main()
