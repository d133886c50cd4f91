"""Checkpoints by their files, sound and damaged."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ingot.frontend.checkpoint import Checkpoint
from ingot.ir.errors import CheckpointError


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(3, 5),
        "b.weight": torch.randn(4, 2).bfloat16(),
        "c.flags": torch.tensor([True, False, True]),
        "d.scalar": torch.tensor(7, dtype=torch.int64),
        "e.empty": torch.empty(0, 4, dtype=torch.float16),
    }


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::shards]}
        save_file(part, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_raw(file: Path, header: object, data: bytes, *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def edit_index(folder: Path, **edits: Any) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    for name, shard in edits.items():
        index["weight_map"][name.replace("__", ".")] = shard
    file.write_text(json.dumps({**index, "weight_map": {k: v for k, v in index["weight_map"].items() if v != "drop"}}))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return str(caught.value)
