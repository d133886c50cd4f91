"""The files that make a folder an artifact, and readers of its device and mesh that need no slow imports."""

import contextlib
import json
import os
from pathlib import Path

MANIFEST = "manifest.json"
# The file and the folder that make a folder a fat artifact, which holds an artifact for each of several targets.
VARIANTS = "variants.json"
VARIANTS_FOLDER = "variants"


def is_artifact(model: str | Path) -> bool:
    """Return whether `model` is the folder of an artifact, or of a fat one, and no checkpoint to compile."""
    return (Path(model) / MANIFEST).is_file() or (Path(model) / VARIANTS).is_file()


def shared_folder(folder: Path) -> Path:
    """Return the folder of the files that the artifact `folder` shares with others: the fat artifact that it is a
    variant of, or else the artifact itself."""
    folder = Path(os.path.realpath(folder))  # the variant itself may be given as "."
    outer = folder.parent.parent
    return outer if folder.parent.name == VARIANTS_FOLDER and (outer / VARIANTS).is_file() else folder


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder of the tokenizer of the artifact `folder`. A model without a tokenizer has none there."""
    return shared_folder(folder) / "tokenizer"


def target_of(folder: Path) -> str | None:
    """Return the name of the target in an artifact's manifest, unchecked; None if it cannot be read."""
    name = _field(folder, "target", "name")
    return name if isinstance(name, str) else None


def device_of(folder: Path) -> str | None:
    """Return the device ("cpu" or "cuda") in an artifact's manifest, unchecked; None if it cannot be read."""
    device = _field(folder, "target", "device")
    return device if isinstance(device, str) else None


def mesh_in(folder: Path) -> str:
    """Return the mesh in an artifact's manifest, unchecked, such as "tp=2"; "" for one device, or if it cannot be
    read."""
    mesh = _field(folder, "model", "mesh")
    return mesh if isinstance(mesh, str) else ""


def _field(folder: Path, part: str, name: str) -> object:
    """Return a field of a part of an artifact's manifest; None if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        manifest = json.loads((folder / MANIFEST).read_bytes())
        found = manifest.get(part) if isinstance(manifest, dict) else None
        return found.get(name) if isinstance(found, dict) else None
    return None
