"""Write PEFT folders with random LoRA adapters for all linears of an artifact but its head, as PEFT's all-linear."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from ingot.ir.artifact.adapters import ADAPTERS_FILE, AdapterSites


def write_random_adapter(artifact: Path, folder: Path, rank: int, seed: int) -> Path:
    """Write a PEFT folder with random factors in bfloat16 for each linear of an artifact's layers, and return it."""
    sites = AdapterSites.model_validate_json((artifact / ADAPTERS_FILE).read_text(encoding="utf-8"))
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for part in (part for linear in sites.linears for part in linear.segments):
        out, into = part.shape[:2]
        if ".layers." not in part.tensor:
            continue
        prefix = f"base_model.model.{part.tensor.removesuffix('.weight')}"
        for side, shape in (("A", (rank, into)), ("B", (out, rank))):
            values = torch.randn(shape, generator=draw) * 0.02
            tensors[f"{prefix}.lora_{side}.weight"] = values.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
