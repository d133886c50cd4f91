"""Tiny checkpoints, and their artifacts for meshes, each compiled once per session and worker."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny import TINY

from ingot import compile_model
from ingot.ir.mesh import parse_mesh

# Odd sizes where the mesh allows it: two ranks share heads, features of the MLP and rows of the vocabulary.
MODELS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama-scaled", {"num_hidden_layers": 3, "intermediate_size": 106, "vocab_size": 366}, {}),
    "llama-4-layers": ("llama-scaled", {"num_hidden_layers": 4, "intermediate_size": 106, "vocab_size": 366}, {}),
    "gemma3": ("gemma3_text-old", {"intermediate_size": 102, "vocab_size": 382}, {}),
    "qwen3_moe": ("qwen3_moe-plain", {"moe_intermediate_size": 34, "vocab_size": 381}, {}),
    "deepseek_v2": (
        "deepseek_v2-groups",
        {"num_hidden_layers": 2, "intermediate_size": 106, "moe_intermediate_size": 34, "vocab_size": 378},
        {},
    ),
    "llama_mla": ("llama_mla-parts", {"intermediate_size": 106, "vocab_size": 378}, {}),
    "qwen3_mla": ("qwen3_mla-parts", {"intermediate_size": 106, "vocab_size": 378}, {}),
    "qwen3-int8": ("qwen3-scaled", {"num_hidden_layers": 3, "intermediate_size": 110}, {"quantize": "int8"}),
}
MESHES = ("tp=2", "pp=2", "pp=2 tp=2")
LIMITS = {"max_batch": 5, "max_tokens": 37, "max_seq_len": 80, "backend": "reference", "jobs": 1, "trace": "none"}


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`artifact(model, mesh)`: the path of an artifact; the mesh "" is one process. `artifact(model, mesh, passes)` has
    other passes."""
    folder = tmp_path_factory.mktemp("ranks")

    def made(model: str, mesh: str, passes: str = "default") -> Path:
        name, changes, options = MODELS[model]
        path = folder / f"{model}-{mesh.replace(' ', '-')}-{'edited' * (passes != 'default')}.ingot"
        if not path.exists():
            checkpoint = folder / model
            if not checkpoint.exists():
                TINY[name].write(checkpoint, **changes)
            compile_model(checkpoint, path, mesh=parse_mesh(mesh), passes=passes, **LIMITS, **options)
        return path

    return made
