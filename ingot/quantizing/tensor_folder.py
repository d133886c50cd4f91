"""The folder with the tensors of a calibration: written file by file, and read like a checkpoint."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.safetensors_header import TensorInfo, read_header

# Tensors wait in memory until a file of this size is full.
FILE_BYTES = 256 << 20


@dataclass
class TensorWriter:
    """Writes tensors into the files 00000.safetensors, 00001.safetensors, … of a folder. Call `flush` at the end."""

    folder: Path
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _bytes: int = 0
    _files: int = 0

    def store(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name] = tensor.clone(memory_format=torch.contiguous_format)  # it may be a view of another
        self._bytes += tensor.nbytes
        if self._bytes >= FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._tensors:
            save_file(self._tensors, self.folder / f"{self._files:05d}.safetensors")
            self._files += 1
            self._tensors, self._bytes = {}, 0


def open_tensors(folder: Path) -> Checkpoint:
    """Return the tensors of a folder that `TensorWriter` wrote, for `Checkpoint.with_others`."""
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= read_header(file)
    return Checkpoint(folder, {}, tensors, {})
