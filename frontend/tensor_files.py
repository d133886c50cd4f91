"""Which files of a checkpoint folder hold the tensors: one file, or an index and its shards; never a pickle."""

import re
from collections.abc import Iterable
from pathlib import Path

from ingot.frontend.safetensors_header import TensorInfo, read_header
from ingot.ir.errors import CheckpointError
from ingot.ir.json_text import parse_json
from ingot.ir.listing import LISTED, listed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
CONVERT = (
    "convert it to safetensors: load it with transformers in a place you trust and call "
    "`model.save_pretrained(folder, safe_serialization=True)`; Ingot opens no pickle, which could run any code"
)

_MAX_INDEX_BYTES = 256 << 20  # about 100 bytes a tensor


def read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Returns all tensors of a checkpoint folder by name, from the headers alone. Raises CheckpointError."""
    try:
        if (folder / INDEX).is_file():
            return _read_shards(folder)
        if (folder / SINGLE).is_file():
            return read_header(folder / SINGLE)
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"the folder cannot be read: {error.strerror}", where=str(folder)) from error
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise CheckpointError(
            f"the checkpoint's weights are pickle files: {name_files(pickles)}",
            where=str(folder),
            expected=f"{SINGLE}, or {INDEX} and its shards",
            hint=CONVERT,
        )
    raise CheckpointError(
        "the folder holds no weights",
        where=str(folder),
        expected=f"{SINGLE}, or {INDEX} and its shards",
        hint=f"found there: {name_files(names)}",
    )


def _read_shards(folder: Path) -> dict[str, TensorInfo]:
    """Reads the headers of all shards. Index and shards must say the same: neither is believed over the other."""
    weight_map = _read_index(folder / INDEX)
    shards = sorted(set(weight_map.values()))
    if (folder / SINGLE).is_file() and SINGLE not in shards:
        raise CheckpointError(
            f"the folder holds both {SINGLE} and an index of other files",
            where=str(folder),
            expected="one of the two",
            hint=f"remove {SINGLE}, or {INDEX} and its shards",
        )
    if absent := [name for name in shards if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{len(absent)} of {len(shards)} shards are missing: {name_files(absent)}",
            where=str(folder / INDEX),
            expected="every shard that the index names",
            hint="download the checkpoint again",
        )
    tensors: dict[str, TensorInfo] = {}
    unlisted: list[str] = []
    for shard in shards:
        for name, info in read_header(folder / shard).items():
            if weight_map.get(name) == shard:
                tensors[name] = info
            else:
                unlisted.append(f"{name} in {shard}, in the index: {weight_map.get(name, 'absent')}")
    lost = [f"{name} not in {shard}" for name, shard in sorted(weight_map.items()) if name not in tensors]
    if unlisted or lost:
        raise CheckpointError(
            f"{INDEX} and the shards disagree in {len(unlisted) + len(lost)} places:\n"
            f"{listed(lost + sorted(unlisted))}",
            where=str(folder / INDEX),
            expected="each tensor in the shard that the index names, and nowhere else",
            hint="download the checkpoint again, or write it anew with `save_pretrained`",
        )
    return tensors


def _read_index(file: Path) -> dict[str, str]:
    with file.open("rb") as stream:
        data = stream.read(_MAX_INDEX_BYTES + 1)
    if len(data) > _MAX_INDEX_BYTES:
        raise CheckpointError(f"{INDEX} is too large", where=str(file), expected=f"at most {_MAX_INDEX_BYTES} bytes")
    try:
        index = parse_json(data)
    except ValueError as error:
        raise CheckpointError(
            f"{INDEX} is not JSON: {str(error)[:300]}", where=str(file), expected="a JSON object"
        ) from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{INDEX} has no weight_map", where=str(file), expected="an object: tensor -> shard")
    for name, shard in weight_map.items():
        if isinstance(shard, str) and shard.endswith(PICKLE_SUFFIXES):
            raise CheckpointError(f"{INDEX} names a pickle file: {shard[:200]!r}", where=str(file), hint=CONVERT)
        # Only a plain name: a slash, a backslash or a drive could lead out of the folder.
        if not isinstance(shard, str) or not re.fullmatch(r"[\w.+-]{1,240}\.safetensors", shard):
            raise CheckpointError(
                f"{INDEX} names the shard {str(shard)[:200]!r}",
                where=f"{file}, tensor {name[:200]}",
                expected="the plain name of a .safetensors file in the same folder",
            )
    return weight_map


def name_files(names: Iterable[str | Path]) -> str:
    """Returns file names in one line for a message, cut at LISTED."""
    texts = sorted(name.name if isinstance(name, Path) else name for name in names)
    more = f" and {len(texts) - LISTED} more" if len(texts) > LISTED else ""
    return (", ".join(texts[:LISTED]) or "nothing") + more
