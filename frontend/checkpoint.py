"""Open a Hugging Face checkpoint folder without loading weights, importing its code or using the network."""

import mmap
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ingot.frontend.checkpoint_files import (
    CONFIG,
    CONVERT,
    PICKLE_SUFFIXES,
    QUANT_CONFIG,
    TOKENIZER_FILES,
    name_files,
)
from ingot.frontend.gguf.config import config_of
from ingot.frontend.gguf.file import SUFFIX, find_gguf, read_gguf
from ingot.frontend.gguf.tokenizer import write_tokenizer
from ingot.frontend.gguf.weights import read_weights
from ingot.frontend.quantized.readers import FIELDS, find_reader
from ingot.frontend.quantized.stored import Logical, Stored
from ingot.frontend.safetensors_header import TensorInfo
from ingot.frontend.tensor_files import read_tensors
from ingot.ir.artifact.digest import digest_files
from ingot.ir.errors import CheckpointError, ConfigError
from ingot.ir.json_text import parse_json

__all__ = ["Checkpoint", "TensorInfo", "read_config"]

_MAX_CONFIG_BYTES = 16 << 20  # the largest configurations seen (label maps of vision models) are under 1 MiB
# Weights are mapped copy-on-write, so that a stray in-place write never reaches the user's file. Without NORESERVE, the
# operating system would count the whole map and refuse a file larger than memory. The name is new in Python 3.13.
_MAP_FLAGS = mmap.MAP_PRIVATE | (getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An open checkpoint folder: its parsed config.json, the locations of its tensors, and its tokenizer files.

    tensors           tensor name -> location. Tensors of the checkpoints in `others` are named "ALIAS:NAME".
    tokenizer_files   file name -> path
    others            alias -> further checkpoint, such as "draft" -> the checkpoint of a draft model
    quantized         for a checkpoint with quantized weights: its weights by name, and how they are made; None: the
                      weights are `tensors`

    Python code of the checkpoint is never imported.
    """

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    tokenizer_files: Mapping[str, Path]
    others: Mapping[str, "Checkpoint"] = field(default_factory=dict)
    quantized: Logical | None = None
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict, repr=False)
    _kept: object = field(default=None, repr=False)  # a temporary folder of tokenizer files

    @staticmethod
    def open(path: str | Path) -> "Checkpoint":
        """Open a checkpoint folder, or a GGUF file: read its config.json and the headers of its tensor files.

        Raises ConfigError if the folder or the config.json is missing or malformed, or if the quantization is not
        supported. Raises CheckpointError if tensor files are missing or malformed.
        """
        if (file := find_gguf(path)) is not None:
            return _open_gguf(file)
        folder = _folder(path)
        config = read_config(folder)
        tokenizer_files = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
        tensors = MappingProxyType(read_tensors(folder))
        made = Checkpoint(folder, config, tensors, MappingProxyType(tokenizer_files))
        reader = find_reader(config, str(folder / CONFIG))
        if reader is None:
            return made
        return replace(made, quantized=reader(Stored(tensors, made.read, str(folder))))

    def with_others(self, others: Mapping[str, "Checkpoint"]) -> "Checkpoint":
        """Return a copy of this checkpoint with the tensors of further checkpoints, such as a draft model's.

        `others` maps aliases, such as "draft", to checkpoints. Their tensors are named "ALIAS:NAME".
        """
        theirs = {f"{alias}:{name}": info for alias, one in others.items() for name, info in one.tensors.items()}
        logical = None
        if any(one.quantized is not None for one in (self, *others.values())):
            logical = self.logical.with_others({alias: one.logical for alias, one in others.items()})
        return replace(
            self,
            tensors=MappingProxyType({**self.tensors, **theirs}),
            others=MappingProxyType({**others}),
            quantized=logical,
        )

    @property
    def logical(self) -> Logical:
        """Return the weights of the checkpoint by name, as if none were quantized, and how those that are are made."""
        return self.quantized or Logical(self.tensors)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor as a view of the mapped file. Do not write to it.

        If its bytes are not aligned for its dtype, the result is a copy. Raises CheckpointError for an unknown name, or
        if the file shrank since it was opened.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}", where=str(self.folder))
        if info.begin == info.end:
            return torch.empty(info.shape, dtype=info.dtype)
        buffer = self._map(info)
        if info.begin % info.dtype.itemsize:  # a map begins at a page, so the offset decides the alignment
            flat = torch.frombuffer(buffer, dtype=torch.uint8, count=info.end - info.begin, offset=info.begin)
            return flat.clone().view(info.dtype).reshape(info.shape)
        count = (info.end - info.begin) // info.dtype.itemsize
        return torch.frombuffer(buffer, dtype=info.dtype, count=count, offset=info.begin).reshape(info.shape)

    def release_pages(self) -> None:
        """Let go of the pages of tensor files that were read. Tensors stay valid: a read maps the page again.

        The memory of a process that reads a large checkpoint once then does not grow with it.
        """
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def digests(self, threads: int | None = None) -> dict[str, tuple[str, ...]]:
        """Return the digests of all tensor files, by file name: the SHA-256 of each 64 MiB chunk, in hex.

        Files of the checkpoints in `others` are named "ALIAS:FILE". `threads` is the most threads that read files;
        None: a default. Raises CheckpointError if a file cannot be read.
        """
        own = {name: info for name, info in self.tensors.items() if name.partition(":")[0] not in self.others}
        files = sorted({info.file for info in own.values()})
        theirs = {
            f"{alias}:{file}": digests
            for alias, one in self.others.items()
            for file, digests in one.digests(threads).items()
        }
        try:
            chunks = digest_files(files, threads)
        except OSError as error:
            raise CheckpointError(
                f"a tensor file cannot be read: {error.strerror}", where=str(error.filename)
            ) from error
        return {**{file.name: digests for file, digests in zip(files, chunks, strict=True)}, **theirs}

    def _map(self, info: TensorInfo) -> mmap.mmap:
        if (known := self._maps.get(info.file)) is not None:
            return known
        last = max(other.end for other in self.tensors.values() if other.file == info.file)
        try:
            with info.file.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                if size < last:  # touching a page past the end would kill the process
                    raise CheckpointError(
                        f"{info.file.name} shrank since it was opened, to {size} bytes",
                        where=str(info.file),
                        expected=f"{last} bytes",
                    )
                new = mmap.mmap(stream.fileno(), size, flags=_MAP_FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise CheckpointError(f"a tensor file cannot be mapped: {error.strerror}", where=str(info.file)) from error
        return self._maps.setdefault(info.file, new)


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the parsed config.json of a checkpoint folder. The folder need not have weights yet.

    A description of quantized weights in hf_quant_config.json is added to it.

    Raises ConfigError if the file is missing or malformed, or if its quantization method is not supported.
    """
    if (file := find_gguf(path)) is not None:
        return config_of(read_gguf(file))
    folder = _folder(path)
    config = _read_config(folder / CONFIG)
    if (folder / QUANT_CONFIG).is_file() and not any(config.get(name) is not None for name in FIELDS):
        config["quantization_config"] = {"quant_method": "modelopt", **_read_config(folder / QUANT_CONFIG)}
    find_reader(config, str(folder / CONFIG))
    return config


def _open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file. Its tokenizer is written into a temporary folder, which the checkpoint keeps."""
    file = read_gguf(path)
    config, kept = config_of(file), tempfile.TemporaryDirectory(prefix="ingot-gguf-")
    made = Checkpoint(path, config, file.tensors, write_tokenizer(file, Path(kept.name)), _kept=kept)
    stored = Stored(file.tensors, made.read, str(path))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return replace(made, quantized=read_weights(file, stored, heads, kv_heads))


def _folder(path: str | Path) -> Path:
    folder = Path(path)
    try:
        if folder.is_dir():
            return folder
        exists = folder.exists()
    except (OSError, ValueError) as error:  # a name too long, a NUL in it, no permission
        raise ConfigError(f"the checkpoint folder {str(path)[:200]!r} cannot be opened: {error}") from None
    if exists:
        if folder.suffix in PICKLE_SUFFIXES:
            raise CheckpointError(
                f"{folder} is a pickle file", expected="a folder with config.json and safetensors", hint=CONVERT
            )
        raise ConfigError(
            f"{folder} is not a folder",
            expected="a folder with config.json",
            hint="give the folder that holds the file",
        )
    raise ConfigError(
        f"there is no folder {str(path)!r}",
        expected="a folder with config.json, or the name of a repository on the hub, as in org/name",
        hint="check the path",
    )


def _no_config_hint(folder: Path) -> str:
    """Return a hint for the error about a folder without a config.json: what the folder is, or what it holds."""
    if (folder / "manifest.json").is_file():
        return "this is an artifact: it is compiled already"
    if (folder / "adapter_config.json").is_file():
        return "this is an adapter: compile its base model with --adapter and this folder"
    if gguf := [one for one in folder.iterdir() if one.suffix == SUFFIX]:
        return f"name one of the GGUF files: {name_files(gguf)}"
    return f"found there: {name_files(folder.iterdir())}"


def _read_config(file: Path) -> dict[str, Any]:
    try:
        if not file.is_file():
            raise ConfigError(
                f"there is no {CONFIG} in the folder",
                where=str(file.parent),
                expected="a Hugging Face checkpoint folder",
                hint=_no_config_hint(file.parent),
            )
        with file.open("rb") as stream:
            data = stream.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file.name} cannot be read: {error.strerror}", where=str(file)) from error
    if len(data) > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{file.name} is too large", where=str(file), expected=f"at most {_MAX_CONFIG_BYTES} bytes")
    try:
        config = parse_json(data, strict=False)
    except ValueError as error:
        raise ConfigError(
            f"{file.name} is not JSON: {str(error)[:300]}", where=str(file), expected="a JSON object"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"{file.name} holds a value of type {type(config).__name__}", where=str(file), expected="a JSON object"
        )
    return config
