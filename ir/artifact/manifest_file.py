"""The manifest's file name, and readers of its device and mesh that need no slow imports."""

import contextlib
import json
from pathlib import Path

MANIFEST = "manifest.json"


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
