"""Read a PEFT folder with a LoRA adapter: adapter_config.json and adapter_model.safetensors.

Nothing else of the folder is read. Links are refused, so that a folder cannot name files elsewhere.
"""

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.ir.adapters.config import CONFIG, LoraConfig, read_lora_config
from ingot.ir.adapters.tensors import tensors_in
from ingot.ir.errors import AdapterError

TENSORS = "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_MAX_CONFIG_BYTES = 1 << 20  # configurations have some kilobytes; patterns for each layer add some more
# Rank 256 for all linears of a 70B model has 13 GB in float32. Larger files are not adapters.
_MAX_TENSOR_BYTES = 16 << 30
# PEFT writes "base_model.model.NAME.lora_A.weight". Old versions wrote the adapter's name too: "lora_A.default.weight".
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")


@dataclass(frozen=True, eq=False)
class Factors:
    """The low-rank factors of one linear: its weight [out, in] changes by `scale * b @ a`.

    a, b           [rank, in] and [out, rank], in float32, bfloat16 or float16
    scale          alpha / rank, or alpha / sqrt(rank)
    a_name, b_name the names of these tensors in the file
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    a_name: str
    b_name: str

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter that was read from a PEFT folder.

    folder       the folder
    modules      name of a linear in the base model, such as "model.layers.0.self_attn.q_proj" -> its factors
    transposed   whether the base weights are stored as [in, out]
    digest       the SHA-256, in hex, of both files
    """

    folder: Path
    modules: Mapping[str, Factors]
    transposed: bool
    digest: str

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max(one.rank for one in self.modules.values())


def read_adapter(folder: str | Path) -> Adapter:
    """Read a PEFT folder with a LoRA adapter. The tensors are in memory afterwards.

    Raises AdapterError if a file is missing, damaged or a link, if the adapter is no plain LoRA, or if its ranks differ
    from its configuration.
    """
    path = Path(folder)
    _check_folder(path)
    config_data = _read(path, CONFIG, _MAX_CONFIG_BYTES)
    config = read_lora_config(bytes(config_data), str(path / CONFIG))
    data = _read(path, TENSORS, _MAX_TENSOR_BYTES)
    try:
        tensors = tensors_in(data)
    except ValueError as error:
        raise AdapterError(
            f"{TENSORS} is not a valid safetensors file: {str(error)[:200]}", where=str(path / TENSORS)
        ) from None
    digest = hashlib.sha256(hashlib.sha256(config_data).digest() + hashlib.sha256(data).digest()).hexdigest()
    return Adapter(path, _modules(tensors, config, str(path / TENSORS)), config.transposed, digest)


def _check_folder(path: Path) -> None:
    try:
        if path.is_dir():
            return
    except (OSError, ValueError):  # a name too long, a NUL in it, no permission
        pass
    raise AdapterError(
        "there is no folder of the adapter",
        where=str(path)[:200],
        expected=f"a PEFT folder with {CONFIG} and {TENSORS}",
    )


def _read(folder: Path, name: str, most: int) -> memoryview:
    """Return the content of a file in the folder.

    Raises AdapterError if it is a link, missing, or longer than `most`.
    """
    path = folder / name
    try:
        # O_NOFOLLOW refuses a link, and O_NONBLOCK does not wait for the writer of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _missing(folder, name) from None
    except OSError as error:
        linked = path.is_symlink()
        what = "is a link" if linked else f"cannot be read: {error.strerror}"
        hint = "copy the file into the folder" if linked else ""
        raise AdapterError(f"{name} {what}", where=str(path), expected="a regular file", hint=hint) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > most:
        os.close(descriptor)
        found = f"has {status.st_size} bytes" if stat.S_ISREG(status.st_mode) else "is no regular file"
        raise AdapterError(f"{name} {found}", where=str(path), expected=f"a file of at most {most} bytes")
    # A bytearray would be filled with zeros while this thread holds Python's lock: 40 ms for 84 MB on an H200 machine,
    # in which an engine launches no step.
    data = torch.empty(status.st_size, dtype=torch.uint8).numpy().data
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        done = 0
        while done < len(data) and (count := stream.readinto(data[done:])):
            done += count
    if done < len(data):
        raise AdapterError(f"{name} shrank while it was read, to {done} bytes", where=str(path))
    return data


def _missing(folder: Path, name: str) -> AdapterError:
    pickled = [other for other in _PICKLES if (folder / other).exists()]
    if name == TENSORS and pickled:
        return AdapterError(
            f"the adapter's weights are a pickle file: {pickled[0]}",
            where=str(folder),
            expected=TENSORS,
            hint="load it with PEFT and save it again with safe_serialization=True",
        )
    return AdapterError(f"there is no {name}", where=str(folder), expected=f"a PEFT folder with {CONFIG} and {TENSORS}")


def _modules(tensors: Mapping[str, torch.Tensor], config: LoraConfig, where: str) -> dict[str, Factors]:
    sides: dict[str, dict[str, str]] = {}
    for name, tensor in tensors.items():
        found = _NAME.fullmatch(name)
        if found is None:
            raise AdapterError(f"{_what_is(name)}: {name:.120}", where=where, expected="lora_A and lora_B of linears")
        if tensor.dim() != 2:
            raise AdapterError(
                f"the tensor {name:.120} has the shape {list(tensor.shape)}", where=where, expected="a matrix"
            )
        sides.setdefault(found["module"], {}).setdefault(found["side"], name)
    if not sides:
        raise AdapterError("the adapter has no tensors", where=where, expected="lora_A and lora_B of linears")
    return {module: _factors(module, named, tensors, config, where) for module, named in sorted(sides.items())}


def _factors(
    module: str, named: Mapping[str, str], tensors: Mapping[str, torch.Tensor], config: LoraConfig, where: str
) -> Factors:
    if len(named) < 2:
        raise AdapterError(
            f"{module:.120} has no lora_{'B' if 'A' in named else 'A'}", where=where, expected="both factors"
        )
    if reason := config.why_not(module):
        raise AdapterError(f"{module:.120} has factors, but {reason}", where=where, expected=f"factors as in {CONFIG}")
    a, b, rank = tensors[named["A"]], tensors[named["B"]], config.rank_of(module)
    if (a.shape[0], b.shape[1]) != (rank, rank):
        raise AdapterError(
            f"the ranks of lora_A and lora_B of {module:.120} are {a.shape[0]} and {b.shape[1]}",
            where=where,
            expected=f"{rank}, from {CONFIG}",
        )
    if not (a.isfinite().all() and b.isfinite().all()):
        raise AdapterError(f"the factors of {module:.120} are not finite", where=where, expected="finite numbers")
    return Factors(a, b, config.scale_of(module), named["A"], named["B"])


def _what_is(name: str) -> str:
    """Return what a tensor that is no factor of a linear is, for an error."""
    for part, what in (
        ("lora_magnitude_vector", "a magnitude of DoRA, which is not supported"),
        ("lora_embedding_", "a factor of an embedding, which is not supported"),
        ("modules_to_save", "a module of modules_to_save, which is not supported"),
        (".bias", "a bias, which is not supported"),
    ):
        if part in name:
            return what
    return "a tensor that is no factor of a linear"
