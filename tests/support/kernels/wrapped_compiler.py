"""Compilers that add an option of their own, as wrappers around them do."""

from pathlib import Path

from ingot.backends.toolchain import compiler_path


def wrapper(path: Path, option: str) -> Path:
    """A compiler that puts an option in front of those that it is given."""
    path.write_text(f'#!/bin/sh\nexec {compiler_path()} {option} "$@"\n')
    path.chmod(0o755)
    return path
