"""The cache folder of the user: executables by `exe_key`, and whole artifacts by `request_key`."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ingot.ir.errors import OutputError


def cache_root() -> Path:
    """Return the root folder of Ingot's cache: $INGOT_CACHE, or else `ingot` in the user's cache folder.

    The user's cache folder is $XDG_CACHE_HOME, or else ~/.cache.
    """
    if root := os.environ.get("INGOT_CACHE"):
        return Path(root).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ingot"


def cache_folder(kind: str) -> Path:
    """Return the folder `kind` of Ingot's cache, such as "exe" or "artifacts". Make it if it is missing.

    Its mode is 0700. Raises OutputError if it cannot be made.
    """
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
    """Hold a lock on the file `path` inside the block. Other processes wait for it.

    The lock also ends if this process dies. Raises OutputError if the file cannot be made.
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
