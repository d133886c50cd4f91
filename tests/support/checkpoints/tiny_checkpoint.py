"""A tiny checkpoint in Hugging Face's form: its configuration, its files, and prompts for it."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_weights import like_llama

MAX_SEQ_LEN = 160
# Mixed on purpose: one token, both sides of a page of 16, several pages, and the end inside a page.
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 33, 64, 97)

# What the config.json of tiny checkpoints shares. Sizes are odd, and constants far from their defaults.
_EVERY: Mapping[str, Any] = {
    "vocab_size": 379,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
# Likewise, where the fields have Llama's names.
_LLAMA: Mapping[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 103,
    "max_position_embeddings": MAX_SEQ_LEN,
    "rope_theta": 811.0,
}

# Every tensor of a checkpoint with this configuration, drawn from the generator.
Weights = Callable[[Mapping[str, Any], torch.Generator], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Tiny:
    """A checkpoint to be written: its config.json, the seed of its weights and prompts, its number of files, the
    context to compile it for, which chooses some rotary tables, and what makes its weights."""

    name: str
    config: Mapping[str, Any] = field(repr=False)
    seed: int = 0
    shards: int = 1
    max_seq_len: int = MAX_SEQ_LEN
    weights: Weights = like_llama

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
        tensors = self.weights(config, torch.Generator().manual_seed(self.seed))
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


def tiny(name: str, architecture: str, seed: int, **fields: Any) -> Tiny:
    """A checkpoint with the shared fields and `fields`, which win. A field that is `...` is left out.

    The model type is the name up to its first "-", unless `fields` say another.
    """
    config = {"architectures": [architecture], "model_type": name.partition("-")[0], **_EVERY, **fields}
    return Tiny(name, {key: value for key, value in config.items() if value is not ...}, seed)


def tiny_like_llama(name: str, architecture: str, seed: int, **fields: Any) -> Tiny:
    """The same, with layers, heads and positions as well, under Llama's names."""
    return tiny(name, architecture, seed, **{**_LLAMA, **fields})
