"""The cache of executables by `exe_key`. An entry is complete or absent; two processes build it only once."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ingot.compile.cache import cache_folder, cache_root, locked
from ingot.compile.folder_writer import is_disk_full
from ingot.ir.artifact.backend_times import BackendTime
from ingot.ir.artifact.digest import digest_json
from ingot.ir.artifact.plan import Executable
from ingot.ir.backend import Compiler, LibraryBuilder
from ingot.ir.errors import BackendError, IngotError, OutputError
from ingot.ir.machine.target import Target
from ingot.ir.program import Program

_RECORD = "executable.json"
_TIMES = TypeAdapter(tuple[BackendTime, ...])


def executable_folder(key: str) -> Path:
    """Return the cache folder for the files of the executable `key`. It may be missing."""
    return cache_folder("exe") / key


def find_executable(key: str) -> Executable | None:
    """Return the executable (compiled code) `key` from the cache.

    Return None if it is missing, or if one of its files is damaged.
    """
    folder = executable_folder(key)
    try:
        record: dict[str, Any] = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        executable = Executable.model_validate_json(json.dumps(record["executable"]))
        whole = all(_digest(folder / name) == record["digests"][name] for name in executable.files)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return executable if whole else None


def build_executable(backend: Compiler, body: Program, key: str, target: Target) -> Executable:
    """Return the executable (compiled code) of the program `body` from the cache. If the cache lacks it, compile it.

    `key` is the executable's cache key. `backend` compiles it. Raises the compiler's errors.
    """
    return _built(key, lambda directory: backend.emit(body, key, target, directory))


def build_library(backend: LibraryBuilder, key: str, target: Target) -> Executable:
    """Return the kernel library of `backend` from the cache. If the cache lacks it, it is built first.

    `key` is its cache key.
    """
    return _built(key, lambda directory: backend.emit_library(key, target, directory))


def _built(key: str, emit: Callable[[Path], Executable]) -> Executable:
    """Return the executable (compiled code) `key` from the cache. If the cache lacks it, `emit` builds it first.

    `emit` receives an empty folder. Built libraries contain the path of that folder, so each key has one fixed path. A
    rename then moves the folder into the cache. This process holds a lock while it builds, so other processes do not
    use the folder. The lock outlives the death of the process's parent.
    """
    build = cache_folder("build")
    with locked(build / f"{key}.lock"):
        if (cached := find_executable(key)) is not None:
            return cached
        directory = build / key
        shutil.rmtree(directory, ignore_errors=True)  # leftovers of a killed process
        directory.mkdir(mode=0o700)
        try:
            executable = emit(directory)
            record: Mapping[str, Any] = {
                "executable": executable.model_dump(mode="json"),
                "digests": {name: _digest(directory / name) for name in executable.files},
            }
            (directory / _RECORD).write_text(json.dumps(record), encoding="utf-8")
            # An existing entry is damaged, or `find_executable` would have found it.
            shutil.rmtree(executable_folder(key), ignore_errors=True)
            os.rename(directory, executable_folder(key))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        (build / f"{key}.lock").unlink()
    return executable


def find_workspace(key: str, sizes: Mapping[str, int], threads: int) -> int | None:
    """Return the peak bytes that a call of the executable `key` allocates, as `measure_workspace` stored them.

    Return None if they were not measured. `sizes` maps dims, such as T (tokens) and B (sequences), to their sizes in
    this call. `threads` is the number of threads that run it.
    """
    try:
        found = json.loads(_workspace_file(key, sizes, threads).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, int) else None


def measure_workspace(backend: Compiler, body: Program, key: str, sizes: Mapping[str, int], threads: int) -> int:
    """Call the executable of the program `body` once, and return the peak bytes that the call allocates.

    They are also stored next to the executable in the cache. `key` is the executable's cache key. `sizes` maps dims,
    such as T (tokens), to sizes. `threads` is the number of threads. Raises BackendError if the executable is not in
    the cache.
    """
    executable = find_executable(key)
    if executable is None:
        raise BackendError(f"the executable {key} is no longer in the cache", where=str(cache_root()))
    measured = backend.workspace(body, executable, executable_folder(key), sizes, threads)
    _write(_workspace_file(key, sizes, threads), json.dumps(measured))
    return measured


def find_times(key: str, measured: Mapping[str, Any]) -> tuple[BackendTime, ...] | None:
    """Return the cached times of a call, one per step size in which it was timed. Return None if it was not timed.

    `key` is the cache key of the executable that computes the call. `measured` identifies the measurement: call,
    machine and step sizes.
    """
    try:
        return _TIMES.validate_json(_times_file(key, measured).read_bytes())
    except (OSError, ValidationError):
        return None


def keep_times(key: str, measured: Mapping[str, Any], times: tuple[BackendTime, ...]) -> None:
    """Store the times of a call, for `find_times`, in the cache folder of the executable `key`. Raises OSError.

    `measured` identifies the measurement: call, machine and step sizes. The folder is created if the call's backend
    builds nothing.
    """
    executable_folder(key).mkdir(mode=0o700, exist_ok=True)
    _write(_times_file(key, measured), _TIMES.dump_json(times).decode())


def _times_file(key: str, measured: Mapping[str, Any]) -> Path:
    return executable_folder(key) / f"time-{digest_json(dict(measured))[:32]}.json"


def _write(file: Path, text: str) -> None:
    """Write the file atomically, so that two processes can write it at the same time."""
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)


def _workspace_file(key: str, sizes: Mapping[str, int], threads: int) -> Path:
    text = "-".join(f"{name}{size}" for name, size in sorted(sizes.items()))
    return executable_folder(key) / f"workspace-{text}-{threads}.json"


def explained(error: IngotError | OSError) -> IngotError:
    """Return an OutputError that tells the user what to do about a full disk or an unwritable cache.

    Return any other error unchanged.
    """
    if is_disk_full(error):
        return OutputError(
            "the disk is full",
            where=f"the cache {cache_root()}, or the temporary folder {tempfile.gettempdir()}",
            expected="room for what the compiler writes",
            hint="free some space, or set INGOT_CACHE and TMPDIR to other folders",
        )
    if isinstance(error, OSError):
        return OutputError(
            f"the cache cannot be written: {error}", where=str(cache_root()), hint="set INGOT_CACHE to another folder"
        )
    return error


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
