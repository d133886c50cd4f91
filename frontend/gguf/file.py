"""Read the metadata and the tensor table of a GGUF file, with the package `gguf`."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.frontend.safetensors_header import TensorInfo
from ingot.ir.errors import CheckpointError, ConfigError
from ingot.ir.stored.gguf_blocks import BLOCK_TYPES

SUFFIX = ".gguf"
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass(frozen=True)
class GgufFile:
    """An open GGUF file.

    metadata   key -> value
    tensors    name -> dtype, shape and location. A quantized tensor is u8[rows, bytes of a row].
    types      name of a quantized tensor -> its type, such as "Q4_K"
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    types: Mapping[str, str]

    def error(self, problem: str, expected: str, hint: str = "") -> ConfigError:
        return ConfigError(problem, where=str(self.path), expected=expected, hint=hint)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor when it is dequantized."""
        shape = self.tensors[name].shape
        if name not in self.types:
            return shape
        kind = BLOCK_TYPES[self.types[name]]
        return (*shape[:-1], shape[-1] // kind.bytes * kind.count)


def find_gguf(path: str | Path) -> Path | None:
    """Return the GGUF file that `path` names: itself, or the only one of a folder without config.json. Else None."""
    found = Path(path)
    try:
        if found.suffix == SUFFIX and found.is_file():
            return found
        if found.is_dir() and not (found / "config.json").is_file():
            files = [one for one in found.iterdir() if one.suffix == SUFFIX]
            return files[0] if len(files) == 1 else None
    except (OSError, ValueError):  # what opens the folder says what is wrong with it
        return None
    return None


def read_gguf(path: Path) -> GgufFile:
    """Open a GGUF file. Raises CheckpointError if it is damaged or has tensors of an unknown type, and ConfigError if
    the package `gguf` is missing."""
    status = path.stat()
    return _read(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _read(path: Path, size: int, changed: int) -> GgufFile:
    try:
        import gguf
    except ImportError:
        raise ConfigError(
            f"{path.name} is a GGUF file", where=str(path), hint="pip install 'ingot[gguf]' to read it"
        ) from None
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OSError, TypeError, OverflowError, MemoryError) as error:
        raise CheckpointError(
            f"{path.name} is not a valid GGUF file: {str(error)[:200]}", where=str(path), hint="download it again"
        ) from None
    if int(metadata.get("split.count") or 0) > 1:
        raise CheckpointError(
            f"{path.name} is one of {metadata['split.count']} parts",
            where=str(path),
            expected="one file",
            hint="merge the parts with llama.cpp's `llama-gguf-split --merge`",
        )
    tensors, types = {}, {}
    for one in reader.tensors:
        kind, shape = one.tensor_type.name, tuple(int(number) for number in reversed(one.shape))
        begin, length = int(one.data_offset), int(one.n_bytes)
        if kind in _PLAIN:
            dtype = _PLAIN[kind]
        elif kind in BLOCK_TYPES and len(shape) == 2 and shape[1] % BLOCK_TYPES[kind].count == 0:
            dtype, types[one.name] = torch.uint8, kind
            shape = (shape[0], shape[1] // BLOCK_TYPES[kind].count * BLOCK_TYPES[kind].bytes)
        else:
            raise CheckpointError(
                f"the tensor {one.name} has the type {kind} {list(shape)}, which cannot be read",
                where=str(path),
                expected=", ".join((*_PLAIN, *BLOCK_TYPES)),
                hint="use a file of the same model in one of these types",
            )
        if length != math.prod(shape) * dtype.itemsize or begin + length > size:
            raise CheckpointError(f"the tensor {one.name} has {length} bytes at {begin}", where=str(path))
        tensors[one.name] = TensorInfo(one.name, dtype, shape, path, begin, begin + length)
    return GgufFile(path, metadata, tensors, types)
