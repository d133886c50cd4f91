"""Write the tensors of a checkpoint: one file, or several with an index, as transformers names them."""

from dataclasses import dataclass, field

import torch
from safetensors.torch import save_file

from ingot.compile.folder_writer import WritableFiles
from ingot.frontend.checkpoint_files import INDEX, SINGLE

# Tensors of a file are in memory until it is full. Transformers' files have up to 5 GB.
FILE_BYTES = 2 << 30


@dataclass
class TensorShards:
    """Writes tensors by name, a file at a time. Call `finish` at the end."""

    files: WritableFiles
    file_bytes: int = FILE_BYTES
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _places: dict[str, str] = field(default_factory=dict)
    _waiting: int = 0
    _total: int = 0

    def store(self, name: str, tensor: torch.Tensor) -> None:
        if self._tensors and self._waiting + tensor.nbytes > self.file_bytes:
            self._write(f"model-{len(set(self._places.values())) + 1:05d}.safetensors")
        self._tensors[name] = tensor.contiguous()
        self._waiting += tensor.nbytes
        self._total += tensor.nbytes

    def finish(self) -> None:
        """Write the last file and, of several, the index."""
        if not self._places:
            self._write(SINGLE)
            return
        self._write(f"model-{len(set(self._places.values())) + 1:05d}.safetensors")
        self.files.write_json(INDEX, {"metadata": {"total_size": self._total}, "weight_map": self._places})

    def _write(self, file: str) -> None:
        # A tensor may be a view of the source's mapped file, or share memory with another: safetensors refuses those.
        unshared = {name: tensor.clone() for name, tensor in self._tensors.items()}
        save_file(unshared, self.files.path(file), metadata={"format": "pt"})
        self._places |= dict.fromkeys(self._tensors, file)
        self._tensors, self._waiting = {}, 0
