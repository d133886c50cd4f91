"""Find the tensor files of a checkpoint folder: one file, or an index and its shards; never a pickle."""

from pathlib import Path

from ingot.frontend.checkpoint_files import CONVERT, INDEX, PICKLE_SUFFIXES, SINGLE, name_files, read_index
from ingot.frontend.safetensors_header import TensorInfo, read_header
from ingot.ir.errors import CheckpointError
from ingot.ir.listing import listed


def read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Return the dtype, shape and location of each tensor in a checkpoint folder, by name.

    Only the headers of files are read. Raises CheckpointError if files are missing or malformed, or if all tensor files
    are pickles.
    """
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
    """Return the dtype, shape and location of each tensor in the shard files of a checkpoint folder, by name.

    Raises CheckpointError if the index file and the shards disagree.
    """
    weight_map = read_index(folder / INDEX)
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
            hint="download the checkpoint again, or rewrite it with `save_pretrained`",
        )
    return tensors
