"""PEFT folders with random LoRA adapters, and checkpoints into which such an adapter is merged by hand."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# Families that store the weights of linears as [in, out].
TRANSPOSED = frozenset({"gpt2"})


def modules_of(checkpoint: Path, ends: Iterable[str] = ()) -> dict[str, tuple[int, int]]:
    """The linears of a checkpoint's layers by name, with [out, in]; with `ends`, only those whose names end so."""
    transposed = _transposed(checkpoint)
    found = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            module = name.removesuffix(".weight")
            inside = any(word.isdecimal() for word in module.split("."))
            inside = inside and "norm" not in module  # norms of each head
            if name != module and tensor.dim() == 2 and inside and module.endswith(tuple(ends) or ("",)):
                rows, columns = tensor.shape
                found[module] = (columns, rows) if transposed else (rows, columns)
    return found


def write_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, int]],
    *,
    rank: int = 4,
    seed: int = 0,
    size: float = 0.3,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write a PEFT folder with random factors for `modules`: names of linears with [out, in]."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (out, into) in modules.items():
        for side, shape in (("A", (rank, into)), ("B", (out, rank))):
            values = torch.randn(shape, generator=draw) * size / rank**0.5
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = values.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    given |= {"target_modules": sorted({module.rpartition(".")[2] for module in modules}), "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps({**given, **config}, indent=2))
    return folder


def adapter_for(checkpoint: Path, folder: Path, ends: Iterable[str] = (), **options: Any) -> Path:
    """Write a PEFT folder with random factors for the linears of a checkpoint's layers."""
    if _transposed(checkpoint):
        options.setdefault("fan_in_fan_out", True)
    return write_adapter(folder, modules_of(checkpoint, ends), **options)


def merged_by_hand(checkpoint: Path, adapter: Path, folder: Path, scale: float = 2.0) -> Path:
    """Write the checkpoint with `W + scale * B @ A` for each adapted weight, as PEFT's `merge_and_unload` does."""
    shutil.copytree(checkpoint, folder)
    factors = load_file(adapter / "adapter_model.safetensors")
    transposed = _transposed(checkpoint)
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for name, weight in tensors.items():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in factors:
                change = (
                    scale * factors[f"{module}.lora_B.weight"].double() @ factors[f"{module}.lora_A.weight"].double()
                )
                tensors[name] = (weight.double() + (change.T if transposed else change)).to(weight.dtype).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _transposed(checkpoint: Path) -> bool:
    return json.loads((checkpoint / "config.json").read_text())["model_type"] in TRANSPOSED
