"""The cache folder: executables by `exe_key`, artifacts by `request_key`. Private to the user."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ingot.ir.errors import OutputError


def cache_root() -> Path:
    """Return `INGOT_CACHE`, or else `ingot` in the user's cache folder (XDG base directory specification)."""
    if root := os.environ.get("INGOT_CACHE"):
        return Path(root).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ingot"


def cache_folder(kind: str) -> Path:
    """Return the folder for one kind of entry, made with mode 0700. Raises OutputError if it cannot be made."""
    folder = cache_root() / kind
    try:
        cache_root().mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"the cache folder cannot be made: {error.strerror}", where=str(folder), hint="set INGOT_CACHE to another"
        ) from error
    return folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path` while the block runs; other processes wait. The kernel frees it if the holder dies.

    Raises OutputError if the file cannot be made.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OutputError(
            f"the cache cannot be written: {error.strerror}", where=str(path), hint="set INGOT_CACHE to another folder"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
