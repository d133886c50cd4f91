"""Changing an artifact so that its digests fit again: what a wrong compile or a careful hand could leave."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.ir.artifact.digest import digest_chunks
from ingot.ir.artifact.manifest import CHECKSUMS, OUTSIDE_IDENTITY, checksum_text
from ingot.ir.artifact.manifest_file import MANIFEST

Edit = Callable[[Any], None]


def edit_json(artifact: Path, relpath: str, edit: Edit) -> None:
    """Change the JSON value of one file in place, and sign the artifact again."""
    file = artifact / relpath
    value = json.loads(file.read_text())
    edit(value)
    file.write_text(json.dumps(value))
    sign(artifact, relpath)


def sign(artifact: Path, *relpaths: str) -> None:
    """Make manifest and checksums fit the files `relpaths`, which were changed."""
    manifest = json.loads((artifact / MANIFEST).read_text())
    for entry in manifest["files"]:
        if entry["path"] in relpaths:
            file = artifact / entry["path"]
            entry.update(size=file.stat().st_size, chunks=list(digest_chunks(file)))
    data = json.dumps(manifest).encode()
    (artifact / MANIFEST).write_bytes(data)
    outside = {name: (artifact / name).read_bytes() for name in OUTSIDE_IDENTITY if (artifact / name).exists()}
    (artifact / CHECKSUMS).write_text(checksum_text(data, outside)[0])
