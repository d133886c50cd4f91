"""The manifest's file name, and a reader of its device that needs no slow imports."""

import contextlib
import json
from pathlib import Path

MANIFEST = "manifest.json"


def device_of(folder: Path) -> str | None:
    """Return the device ("cpu" or "cuda") in an artifact's manifest, unchecked; None if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        manifest = json.loads((folder / MANIFEST).read_bytes())
        target = manifest.get("target") if isinstance(manifest, dict) else None
        device = target.get("device") if isinstance(target, dict) else None
        return device if isinstance(device, str) else None
    return None
