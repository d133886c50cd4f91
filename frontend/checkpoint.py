"""A Hugging Face checkpoint folder, opened without loading a weight, importing its code or touching the network."""

import mmap
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ingot.frontend.checkpoint_files import CONFIG, CONVERT, PICKLE_SUFFIXES, TOKENIZER_FILES, name_files
from ingot.frontend.quantized_checkpoints import find_reader
from ingot.frontend.safetensors_header import TensorInfo
from ingot.frontend.tensor_files import read_tensors
from ingot.ir.digest import digest_files
from ingot.ir.errors import CheckpointError, ConfigError
from ingot.ir.json_text import parse_json
from ingot.ir.listing import listed

__all__ = ["Checkpoint", "TensorInfo", "check_totality", "read_config"]

FLOAT_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})

_MAX_CONFIG_BYTES = 16 << 20  # the largest configurations seen (label maps of vision models) are under 1 MiB
# Weights are mapped copy-on-write, so that a stray in-place write can never reach the user's file; without NORESERVE
# the kernel would count the whole map against memory and refuse a file larger than it. The name is new in Python 3.13.
_MAP_FLAGS = mmap.MAP_PRIVATE | (getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An open checkpoint: its parsed config.json, where each tensor lies, and which tokenizer files there are.

    `others` are checkpoints beside it, by alias: their tensors are known as "alias:tensor".

    `auto_map` in the configuration, which names Python code in the folder, stays data: nothing here imports it.
    """

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    tokenizer_files: Mapping[str, Path]
    others: Mapping[str, "Checkpoint"] = field(default_factory=dict)
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict, repr=False)

    @staticmethod
    def open(path: str | Path) -> "Checkpoint":
        """Reads config.json and the tensor headers of a folder.

        Raises ConfigError when the folder or its config.json is missing or malformed, or says that the weights are
        quantized in a way that no reader knows; CheckpointError when the tensor files are malformed.
        """
        folder = _folder(path)
        config = read_config(folder)
        tokenizer_files = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
        return Checkpoint(folder, config, MappingProxyType(read_tensors(folder)), MappingProxyType(tokenizer_files))

    def beside(self, others: Mapping[str, "Checkpoint"]) -> "Checkpoint":
        """This checkpoint with others beside it, by alias."""
        theirs = {f"{alias}:{name}": info for alias, one in others.items() for name, info in one.tensors.items()}
        return replace(self, tensors=MappingProxyType({**self.tensors, **theirs}), others=MappingProxyType({**others}))

    def read(self, name: str) -> torch.Tensor:
        """Returns one tensor, of the dtype and shape of `tensors[name]`, backed by the file's pages: for reading only.

        Nothing is copied, except a tensor whose bytes are not aligned to its dtype (the format does not promise it).
        Raises CheckpointError for an unknown name, or when the file shrank since it was opened.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}", where=str(self.folder))
        if info.begin == info.end:
            return torch.empty(info.shape, dtype=info.dtype)
        buffer = self._map(info)
        if info.begin % info.dtype.itemsize:  # a map begins at a page, so an offset in it is an alignment
            flat = torch.frombuffer(buffer, dtype=torch.uint8, count=info.end - info.begin, offset=info.begin)
            return flat.clone().view(info.dtype).reshape(info.shape)
        count = (info.end - info.begin) // info.dtype.itemsize
        return torch.frombuffer(buffer, dtype=info.dtype, count=count, offset=info.begin).reshape(info.shape)

    def digests(self, threads: int | None = None) -> dict[str, tuple[str, ...]]:
        """Returns the SHA-256, in hex, of each 64 MiB chunk of each tensor file, by the file's name in the folder.

        The files hold the tensors' names, dtypes, shapes and values; those of a checkpoint beside it are "alias:file".
        Raises CheckpointError when one cannot be read.
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


def check_totality(
    checkpoint: Checkpoint,
    consumed: Collection[str],
    ignored_rules: Sequence[str],
    expected: Mapping[str, tuple[int, ...]],
    floating: Collection[str] | None = None,
    *,
    spelled: Callable[[str], Iterable[str]] = lambda name: (name,),
    nearest: str = "",
) -> None:
    """Checks that a weight map and a checkpoint account for each other completely.

    `consumed` names the tensors that the model's recipes read, `ignored_rules` are regular expressions that match the
    whole name of a tensor to leave aside, `expected` gives the shape of each tensor, and `floating` names those that
    must hold plain floating point values (by default all of `expected`). Eight-bit floats are not plain: without their
    scales they are other numbers. `spelled` gives the names that rules know a tensor by, and `nearest` says which other
    spelling of the names would fit better.

    Raises one CheckpointError that lists every missing, extra, mis-shaped and wrongly typed tensor.
    """
    tensors = checkpoint.tensors
    needed = set(consumed) | expected.keys()
    rules = [re.compile(rule) for rule in ignored_rules]
    missing = [
        name + (f" {list(expected[name])}" if name in expected else "") for name in sorted(needed - tensors.keys())
    ]
    unclaimed = sorted(tensors.keys() - set(consumed))
    extra = [
        f"{name} {list(tensors[name].shape)}"
        for name in unclaimed
        if not any(rule.fullmatch(spelling) for rule in rules for spelling in spelled(name))
    ]
    shapes = [
        f"{name}: expected {list(shape)}, found {list(tensors[name].shape)}"
        for name, shape in sorted(expected.items())
        if name in tensors and tensors[name].shape != tuple(shape)
    ]
    types = [
        f"{name}: found {str(tensors[name].dtype).removeprefix('torch.')}"
        for name in sorted(expected if floating is None else floating)
        if name in tensors and tensors[name].dtype not in FLOAT_DTYPES
    ]
    problems = [
        f"{len(names)} {kind}:\n{listed(names)}"
        for kind, names in (
            ("missing from the checkpoint", missing),
            ("extra, neither used nor ignored by a rule", extra),
            ("of another shape than the configuration says", shapes),
            ("not floating point (float16, bfloat16, float32, float64)", types),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            "the checkpoint's tensors do not fit the model that its config.json describes\n" + "\n".join(problems),
            where=str(checkpoint.folder),
            expected="every tensor used or ignored by a rule, every weight of the model present",
            hint="check that config.json and the tensor files are from the same model and complete"
            + (f"; {nearest}" if nearest else ""),
        )


def read_config(path: str | Path) -> dict[str, Any]:
    """The config.json of a folder, whose weights need not be there yet. Raises ConfigError, as `Checkpoint.open`."""
    folder = _folder(path)
    config = _read_config(folder / CONFIG)
    find_reader(config, str(folder / CONFIG))
    return config


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


def _read_config(file: Path) -> dict[str, Any]:
    try:
        if not file.is_file():
            raise ConfigError(
                f"there is no {CONFIG} in the folder",
                where=str(file.parent),
                expected="a Hugging Face checkpoint folder",
                hint="this is an artifact: it is compiled already"
                if (file.parent / "manifest.json").is_file()
                else f"found there: {name_files(file.parent.iterdir())}",
            )
        with file.open("rb") as stream:
            data = stream.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{CONFIG} cannot be read: {error.strerror}", where=str(file)) from error
    if len(data) > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{CONFIG} is too large", where=str(file), expected=f"at most {_MAX_CONFIG_BYTES} bytes")
    try:
        config = parse_json(data, strict=False)
    except ValueError as error:
        raise ConfigError(
            f"{CONFIG} is not JSON: {str(error)[:300]}", where=str(file), expected="a JSON object"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"{CONFIG} holds a value of type {type(config).__name__}", where=str(file), expected="a JSON object"
        )
    return config
