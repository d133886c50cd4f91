"""The manifest by its name and its device alone: what can be asked before anything slow is imported."""

import contextlib
import json
from pathlib import Path

MANIFEST = "manifest.json"


def device_of(folder: Path) -> str | None:
    """The device that an artifact says it was compiled for, unchecked; None where it says nothing that can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        manifest = json.loads((folder / MANIFEST).read_bytes())
        target = manifest.get("target") if isinstance(manifest, dict) else None
        device = target.get("device") if isinstance(target, dict) else None
        return device if isinstance(device, str) else None
    return None
