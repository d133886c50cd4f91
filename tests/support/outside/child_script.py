"""Scripts for benchmarks to run as children."""

from __future__ import annotations

from pathlib import Path


def script_of(folder: Path, text: str) -> Path:
    """A script of these lines, which may use what it imports; its last argument is where the answer goes."""
    path = folder / "script.py"
    path.write_text(f"import json, os, subprocess, sys, time\n{text}\n")
    return path
