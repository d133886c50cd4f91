"""OPT's first checkpoints, whose names begin with "decoder.": they are of the model without its head."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny import TINY

from ingot.compile.request import Request
from ingot.frontend.checkpoint import Checkpoint
from ingot.ir.numerics.harness import load_params

TENSORS = "model.safetensors"


def params(folder: Path) -> dict[str, torch.Tensor]:
    program = Request.read(folder, backend="reference").trace().entries["main"]
    return load_params(program.params, Checkpoint.open(folder).read)


def test_names_may_lack_their_first_part(tmp_path: Path) -> None:
    plain, bare = (TINY["opt-after"].write(tmp_path / name) for name in ("plain", "bare"))
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(bare / TENSORS).items()}
    assert all(name.startswith("decoder.") for name in tensors)
    save_file(tensors, bare / TENSORS, metadata={"format": "pt"})
    expected, found = params(plain), params(bare)
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)


def test_positions_begin_after_two_rows(tmp_path: Path) -> None:
    folder = TINY["opt-before"].write(tmp_path)
    stored = load_file(folder / TENSORS)["model.decoder.embed_positions.weight"]
    assert torch.equal(params(folder)["embed.positions"], stored[2:])
