"""GPT-2's first checkpoints: names without a prefix, and masks as tensors."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TINY

from ingot.compile.request import Request
from ingot.frontend.checkpoint import Checkpoint
from ingot.ir.errors import CheckpointError
from ingot.ir.numerics.harness import load_params

TENSORS, PREFIX = "model.safetensors", "transformer."


def params(folder: Path) -> dict[str, torch.Tensor]:
    program = Request.read(folder, backend="reference").trace().entries["main"]
    return load_params(program.params, Checkpoint.open(folder).read)


def without_prefix(folder: Path, **more: torch.Tensor) -> Path:
    tensors = load_file(TINY["gpt2-tied"].write(folder) / TENSORS)
    bare = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    save_file({**bare, **more}, folder / TENSORS, metadata={"format": "pt"})
    return folder


def test_a_checkpoint_without_the_prefix_is_the_same_model(tmp_path: Path) -> None:
    masks = {f"h.{index}.attn.bias": torch.ones(1, 1, 160, 160).tril() for index in range(2)}
    plain, bare = (
        params(TINY["gpt2-tied"].write(tmp_path / "plain")),
        params(without_prefix(tmp_path / "bare", **masks)),
    )
    assert plain.keys() == bare.keys() and all(torch.equal(plain[name], bare[name]) for name in plain)


def test_names_are_all_of_one_kind(tmp_path: Path) -> None:
    folder = without_prefix(tmp_path, **{f"{PREFIX}ln_f.weight": torch.ones(60)})
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint(.|\n)*transformer\.h\.\{0-1\}\.ln_1"):
        Request.read(folder, backend="reference").trace()
