"""Write checkpoints of published shapes with random weights, for benchmarks to compile.

    python benchmarks/random_checkpoint.py 1b OUT [--layers 4] [--seed 0] [--tokenizer] [--format int4_g128]

OUT gets config.json and bfloat16 safetensors of at most 5 GB each, and with `--tokenizer` a tokenizer of random words.
With `--format`, linears are quantized as checkpoints on the hub store them (quantized_weights.py).
Its tensors are those of the published checkpoint. Weights are drawn on the GPU if there is one: the 16 GB of the 8B
shape are then written as fast as the disk allows. Mixtures of experts (mixtures.py) are in files of at most 2 GB, since
more of them are written at once.
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
from mixtures import MIXTURES, deviation, is_mixture, stored_shapes
from quantized_weights import FORMATS, QUANTIZATION_CONFIGS, format_of, is_quantized, quantized
from random_tokenizer import write_tokenizer
from safetensors.torch import save_file

Config = Mapping[str, Any]
TensorShapes = Mapping[str, tuple[int, ...]]

_SHARD_BYTES = 5 * 10**9
_ITEM_BYTES = 2  # of bfloat16
_WRITERS = 4  # files written at once; their memory is four times _SHARD_BYTES
# Of mixtures. A thread of its own copies each file's weights from the GPU and into the file, which takes longer than to
# draw them. The memory is 24 GB, next to the 61 GB of Qwen3 30B-A3B if OUT is in memory too. On the GPU, a writer has
# up to 7 GB: of GPT-OSS 120B, the gate and up projections of a layer in bf16, and their blocks twice.
_MIXTURE_SHARD_BYTES, _MIXTURE_WRITERS = 2 * 10**9, 12

# The rotation is Llama 3's, without the scaling of 3.1 and 3.2: the tables cost the same to read.
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
# Shapes with Llama's field names. The sizes are those of config.json of the published checkpoints:
# meta-llama/Llama-3.2-1B, meta-llama/Llama-3.1-8B, Qwen/Qwen3-0.6B, Qwen/Qwen3-1.7B, Qwen/Qwen3-32B, and
# google/gemma-3-4b-pt, whose language model is described in text_config.
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
    "qwen3-32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "max_window_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
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


# Other families, with their own fields and tensors: config.json of cerebras/Cerebras-GPT-2.7B, microsoft/phi-2 and
# tiiuae/falcon-7b.
FAMILIES: Mapping[str, Config] = {
    "gpt2-2.7b": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5,
        "n_embd": 2560,
        "n_head": 32,
        "n_inner": 10240,
        "n_layer": 32,
        "n_positions": 2048,
        "scale_attn_weights": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "vocab_size": 50257,
    },
    "phi-2": {
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.4,
        "qk_layernorm": False,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "vocab_size": 51200,
    },
    "falcon-7b": {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "alibi": False,
        "bias": False,
        "hidden_size": 4544,
        "layer_norm_epsilon": 1e-5,
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_attention_heads": 71,
        "num_hidden_layers": 32,
        "parallel_attn": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 11,
        "eos_token_id": 11,
        "vocab_size": 65024,
    },
}


def config_of(shape: str, **changes: Any) -> Config:
    """Return the content of config.json for a model shape, such as "8b". `changes` maps names of fields to other
    values."""
    return {**{**SHAPES, **FAMILIES, **MIXTURES}[shape], **changes}


def with_layers(config: Config, layers: int) -> Config:
    """Return the content of config.json for the same model with the first `layers` layers alone."""
    changed = {**config, "n_layer" if "n_layer" in config else "num_hidden_layers": layers}
    if "layer_types" in config:
        changed["layer_types"] = config["layer_types"][:layers]
    return changed


def tensor_shapes(config: Config) -> TensorShapes:
    """Return a mapping from name to shape of the tensors in a checkpoint with this config.json, in transformers' order.

    A weight that the checkpoint stores quantized has the name and shape of its floats.
    """
    import transformers

    kind = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = kind(type(transformers.AutoConfig.for_model(config["model_type"])).from_dict(dict(config)))
    model.tie_weights()
    # A tied head is the embedding's table, which comes first.
    found = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    return {
        stored: shape
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name in found.values()
        for stored, shape in stored_shapes(config, name, tuple(tensor.shape))
    }


def layer_shapes(config: Config) -> TensorShapes:
    """Return a mapping from name to shape of the tensors of one layer.

    Names are without the layer's prefix, such as "mlp.down_proj.weight".
    """
    layers = tensor_shapes({**config, "num_hidden_layers": 1})
    return {name.partition(".0.")[2]: shape for name, shape in layers.items() if ".0." in name}


def write_checkpoint(folder: Path, config: Config, *, seed: int = 0, format: str | None = None) -> Path:
    """Write a checkpoint with this config.json and random weights into `folder`. Return the folder.

    The folder must not exist yet. Matrices are normally distributed with standard deviation 1/sqrt(columns). Biases
    have standard deviation 0.02, and norms multiply by 1. So activations keep their size through any number of layers.
    Those of mixtures differ (mixtures.py, `deviation`). The same seed gives the same weights on the same kind of
    device. With a `format` of quantized_weights.py, matrices of linears are quantized then. Without it, the config.json
    decides.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder.mkdir(parents=True)
    if format is not None:
        config = {**config, "quantization_config": QUANTIZATION_CONFIGS[format]}
    shapes = tensor_shapes(config)
    order = {name: number for number, name in enumerate(shapes)}
    writers = _MIXTURE_WRITERS if is_mixture(config) else _WRITERS
    shards = list(_shards(shapes, _MIXTURE_SHARD_BYTES if is_mixture(config) else _SHARD_BYTES))
    where: dict[str, str] = {}
    sizes: list[int] = []
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]

    def write(file: str, names: list[str]) -> None:
        # One generator per tensor, so that the weights do not depend on the order of the files.
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            drawn = _draw(config, name, shapes[name], (seed << 20) + order[name], device)
            tensors |= {name: tensor.cpu().contiguous() for name, tensor in stored_tensors(config, name, drawn).items()}
        where.update(dict.fromkeys(tensors, file))
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        save_file(tensors, folder / file, metadata={"format": "pt"})

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(write, files, shards))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def stored_tensors(config: Config, name: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return the tensors by name in which a checkpoint with this config.json stores the `weight` of a name."""
    format = format_of(config)
    if format is not None and is_quantized(format, name, tuple(weight.shape)):
        return quantized(format, name, weight)
    return {name: weight}


def _bytes(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _ITEM_BYTES


def _shards(shapes: TensorShapes, most: int) -> Iterator[list[str]]:
    """Divide a checkpoint's tensors into files of at most `most` bytes in bfloat16. Yield the tensor names of each."""
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        if names and size + _bytes(shape) > most:
            yield names
            names, size = [], 0
        names.append(name)
        size += _bytes(shape)
    yield names


def _draw(config: Config, name: str, shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    if len(shape) == 1 and not name.endswith(("bias", "sinks")):
        norm = 0.0 if config["model_type"] == "gemma3_text" else 1.0  # Gemma's norms multiply by 1 + weight
        return torch.full(shape, norm, dtype=torch.bfloat16)
    wide = deviation(config, name, shape) if is_mixture(config) else 0.02 if len(shape) == 1 else shape[1] ** -0.5
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return drawn.normal_(0, wide, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=[*SHAPES, *FAMILIES, *MIXTURES])
    parser.add_argument("out", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--layers", type=int, help="number of layers instead of the shape's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=FORMATS, help="quantize linears, in this format")
    parser.add_argument("--tokenizer", action="store_true", help="write a tokenizer too")
    options = parser.parse_args()
    if options.out.exists():
        sys.exit(f"{options.out} already exists: choose a folder that does not exist")
    config = config_of(options.shape)
    if options.layers is not None:
        config = with_layers(config, options.layers)
    folder = write_checkpoint(options.out, config, seed=options.seed, format=options.format)
    if options.tokenizer:
        write_tokenizer(folder, config["vocab_size"])
    print(folder)


if __name__ == "__main__":
    main()
