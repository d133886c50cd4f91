"""A tiny checkpoint that brings the scales of its KV caches."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import Tiny

# Of keys and values, by layer. One scale makes nothing saturate, one some of it.
SCALES: Mapping[int, tuple[float, float]] = {0: (0.02, 0.05), 1: (0.004, 0.3), 2: (1.5, 0.0007)}


def write_scaled(tiny: Tiny, folder: Path, scales: Mapping[int, tuple[float, float]] = SCALES) -> Path:
    tiny.write(folder)
    tensors = load_file(folder / "model.safetensors")
    for layer, (k, v) in scales.items():
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor([k])
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(v)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
