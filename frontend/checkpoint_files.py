"""The names of a checkpoint's files, and the reader of the index of its tensor files."""

import re
from collections.abc import Iterable
from pathlib import Path

from ingot.ir.errors import CheckpointError
from ingot.ir.json_text import parse_json
from ingot.ir.listing import LISTED

CONFIG = "config.json"
QUANT_CONFIG = "hf_quant_config.json"  # written by NVIDIA's ModelOpt
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
CONVERT = (
    "convert it to safetensors: load it with transformers in a place you trust and call "
    "`model.save_pretrained(folder, safe_serialization=True)`; Ingot opens no pickle, which could run any code"
)

_MAX_INDEX_BYTES = 256 << 20  # about 100 bytes a tensor


def read_index(file: Path) -> dict[str, str]:
    """Read a safetensors index file. Return for each tensor name the name of the shard file that holds it.

    Raises CheckpointError if the index is malformed, and OSError if it cannot be read.
    """
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
    """Return file names as one line for an error message.

    At most LISTED names are given, then the number of the remaining ones.
    """
    texts = sorted(name.name if isinstance(name, Path) else name for name in names)
    more = f" and {len(texts) - LISTED} more" if len(texts) > LISTED else ""
    return (", ".join(texts[:LISTED]) or "nothing") + more
