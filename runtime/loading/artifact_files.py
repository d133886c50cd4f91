"""Read small files of an artifact folder that is not checked yet."""

import shlex
from pathlib import Path

from ingot.ir.artifact.manifest import TIMINGS
from ingot.ir.errors import ArtifactError
from ingot.ir.json_text import parse_json

_MAX_MANIFEST_BYTES = 64 << 20  # one digest per 64 MiB: a terabyte of weights takes about 1 MiB


def recorded_checkpoint(folder: Path) -> str:
    """Return the path or hub name of an artifact's checkpoint, quoted for a shell. It comes from timings.json. Return
    "CHECKPOINT" if that file does not name it."""
    path = folder / TIMINGS
    try:
        value = parse_json(read_capped(path)) if path.is_file() else None
    except (OSError, ValueError, ArtifactError):
        value = None
    found = value.get("hub", value.get("checkpoint")) if isinstance(value, dict) else None
    return shlex.quote(found) if isinstance(found, str) and found and found.isprintable() else "CHECKPOINT"


def read_capped(path: Path) -> bytes:
    """Return the content of a manifest or another small file. Raises OSError, or ArtifactError if it is too large."""
    with path.open("rb") as file:
        data = file.read(_MAX_MANIFEST_BYTES + 1)
    if len(data) > _MAX_MANIFEST_BYTES:
        raise ArtifactError(
            f"{path.name} is too large", where=str(path), expected=f"at most {_MAX_MANIFEST_BYTES} bytes"
        )
    return data
