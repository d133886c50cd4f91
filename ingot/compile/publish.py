"""Writing an artifact: into a hidden folder beside the output, which one rename turns into the output at the end."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ingot.ir.artifact.digest import digest_files
from ingot.ir.artifact.manifest import (
    CHECKSUMS,
    OUTSIDE_IDENTITY,
    UNLISTED,
    FileEntry,
    Manifest,
    checksum_text,
    path_problem,
)
from ingot.ir.artifact.manifest_file import MANIFEST
from ingot.ir.errors import InternalError, OutputError
from ingot.ir.json_text import dump_json

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


@dataclass(frozen=True)
class Sealed:
    """An artifact whose manifest is written and that is not published yet: where it lies, and its `build_id`."""

    folder: Path
    manifest: Manifest
    build_id: str


class ArtifactWriter:
    """A context manager that writes one artifact; nothing is visible at `output` before `publish` returns.

        with ArtifactWriter(Path("pico.ingot")) as writer:
            writer.write_text("program.ir", text)
            build_id = writer.publish(manifest)

    Leaving the block without `publish`, by an exception or not, removes what was written. Entering it also removes what
    earlier writers of the same output left when they were killed. Raises OutputError when the output exists, cannot be
    written, or the disk is full, also for a full disk met by other code inside the block.
    """

    def __init__(self, output: str | Path) -> None:
        # abspath and not resolve: an output that is a link exists, whatever it points to.
        self.output = Path(os.path.abspath(output))
        self._temporary: Path | None = None
        self._folder: Path | None = None
        self._sealed: Sealed | None = None
        self._lock = -1
        self._disk = ThreadPoolExecutor(1, "disk")  # its thread begins with the first file
        self._syncing: list[Future[None]] = []

    def __enter__(self) -> Self:
        parent, name = self.output.parent, self.output.name
        try:
            if not name:
                raise OutputError(f"{self.output} cannot be an artifact's name", expected="a path such as NAME.ingot")
            if os.path.lexists(self.output):
                raise _exists(self.output)
            if not parent.is_dir():
                raise OutputError(
                    f"there is no folder {parent}",
                    where=str(self.output),
                    hint="make the folder, or choose another output",
                )
            if not os.access(parent, os.W_OK | os.X_OK):
                raise OutputError(f"the folder {parent} is not writable", where=str(self.output))
            _remove_stale(parent, name)
            self._temporary, self._lock = _make_temporary(parent, name)
            # The outer folder is private and locked; the inner one gets the modes that the user's umask gives, and is
            # the one that is renamed.
            self._folder = self._temporary / "artifact"
            self._folder.mkdir()
        except OSError as error:
            self._discard()
            raise OutputError(
                f"{self.output} cannot be written: {error.strerror}", where=str(error.filename or parent)
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._discard()
        if isinstance(error, Exception) and not isinstance(error, OutputError) and is_disk_full(error):
            raise OutputError(
                "the disk is full",
                where=str(self.output.parent),
                expected="room for the artifact",
                hint="free some space or choose another output; nothing was left behind",
            ) from error

    def path(self, relpath: str) -> Path:
        """Returns where to write the file `relpath`; its folders exist then. Raises OSError, InternalError."""
        if problem := path_problem(relpath):
            raise InternalError(f"the artifact's file name {relpath!r} is refused: {problem}")
        if relpath in (MANIFEST, CHECKSUMS):
            raise InternalError(f"{relpath} is written by publish alone")
        if self._folder is None:
            raise InternalError("the artifact writer is not open", hint="use it in a `with` block, before `publish`")
        path = self._folder / relpath
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write_bytes(self, relpath: str, data: bytes) -> None:
        """Writes one file. Raises OSError, InternalError."""
        self.path(relpath).write_bytes(data)

    def write_text(self, relpath: str, text: str) -> None:
        """Writes one file in UTF-8, newlines as they are. Raises OSError, InternalError."""
        self.write_bytes(relpath, text.encode("utf-8"))

    def write_json(self, relpath: str, value: object) -> None:
        """Writes one file of canonical JSON. Raises OSError, InternalError, and what `dump_json` raises."""
        self.write_text(relpath, dump_json(value))

    def sync_soon(self, relpath: str) -> None:
        """The file is complete: bring it to the disk beside what the caller does. `publish` raises what that meets."""
        self._syncing.append(self._disk.submit(_sync, self.path(relpath)))

    def seal(self, manifest: Manifest, threads: int | None = None) -> Sealed:
        """Lists and digests all files and writes the manifest: from here on only files outside identities may follow.

        `manifest.files` must be empty: it is filled here.
        """
        if self._folder is None or self._sealed is not None:
            raise InternalError("the artifact writer is not open", hint="use it in a `with` block, and seal once")
        if manifest.files:
            raise InternalError("the manifest of a new artifact lists files already")
        folder = self._folder
        listed = self._listed()
        paths = [folder / relpath for relpath in listed]
        entries = tuple(
            FileEntry(path=relpath, size=path.stat().st_size, chunks=chunks)
            for relpath, path, chunks in zip(listed, paths, digest_files(paths, threads), strict=True)
        )
        complete = Manifest.model_validate({**dict(manifest), "files": entries})
        text = complete.dump().encode()
        (folder / MANIFEST).write_bytes(text)
        self._sealed = Sealed(folder, complete, checksum_text(text, {})[1])
        return self._sealed

    def publish(self, manifest: Manifest | None = None, threads: int | None = None) -> str:
        """Writes the checksums, syncs to disk and renames, sealed before or now by `manifest`. Returns the `build_id`.

        Raises OutputError when something else took the output's place meanwhile.
        """
        sealed = self._sealed if manifest is None else self.seal(manifest, threads)
        if self._folder is None or sealed is None:
            raise InternalError("the artifact writer is not open", hint="use it in a `with` block, and publish once")
        folder = self._folder
        if late := set(self._listed()) ^ {entry.path for entry in sealed.manifest.files}:
            raise InternalError(f"{min(late)} came or went after the manifest was written")
        outside = {name: (folder / name).read_bytes() for name in OUTSIDE_IDENTITY if (folder / name).exists()}
        checksums, build_id = checksum_text((folder / MANIFEST).read_bytes(), outside)
        (folder / CHECKSUMS).write_text(checksums)

        for begun in self._syncing:
            begun.result()
        for path in [*(folder / relpath for relpath in _files(folder)), *_folders(folder)]:
            _sync(path)
        if os.path.lexists(self.output):  # an empty folder would be replaced by the rename without a word
            raise _exists(self.output, "meanwhile")
        try:
            os.rename(folder, self.output)
        except OSError as error:
            if error.errno in _TAKEN:
                raise _exists(self.output, "meanwhile") from None
            raise
        self._folder = None
        with contextlib.suppress(OSError):  # it is published; some file systems cannot sync a folder
            _sync(self.output.parent)
        return build_id

    def _listed(self) -> list[str]:
        """The relative paths that belong into the manifest, sorted."""
        assert self._folder is not None
        return [relpath for relpath in _files(self._folder) if relpath not in UNLISTED]

    def _discard(self) -> None:
        self._disk.shutdown(cancel_futures=True)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._temporary, self._folder, self._sealed, self._lock = None, None, None, -1


def _exists(output: Path, when: str = "already") -> OutputError:
    return OutputError(
        f"{output} exists {when}",
        expected="a path where nothing is",
        hint="remove it or choose another output; what exists was left as it is",
    )


def is_disk_full(error: BaseException | None) -> bool:
    """Looks at causes and messages too: libraries and compilers report a full disk in exceptions of their own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return True
        if any(os.strerror(number) in str(error) for number in _DISK_FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


# A temporary folder belongs to whoever holds a lock on it. The kernel drops the lock when the process dies, however it
# dies; a process number alone would mistake a compile in another container, which shares the disk but not the numbers,
# for dead, and the next compile in a restarted container, which gets the same number, for the one that was killed.


def _make_temporary(parent: Path, name: str) -> tuple[Path, int]:
    while True:
        temporary = parent / f".{name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
        temporary.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
            # Between mkdir and lock another writer may have taken it for stale: then it is gone, and we try again.
            if _try_lock(descriptor) is not False and temporary.exists():
                return temporary, descriptor
            os.close(descriptor)


def _remove_stale(parent: Path, name: str) -> None:
    pattern = re.compile(re.escape(f".{name}.tmp-") + r"(\d+)-[0-9a-f]{8}")
    for entry in parent.iterdir():
        match = pattern.fullmatch(entry.name)
        if match is None or entry.is_symlink() or not entry.is_dir():
            continue
        with contextlib.suppress(OSError):  # another user's, or removed by another writer this moment
            descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY)
            try:
                locked = _try_lock(descriptor)
                if locked or (locked is None and not _is_alive(int(match[1]))):
                    shutil.rmtree(entry)
            finally:
                os.close(descriptor)


def _try_lock(descriptor: int) -> bool | None:
    """Returns whether the lock was taken; None where the file system has no locks (some network file systems)."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _files(folder: Path) -> list[str]:
    """Returns the sorted relative paths of all files. Raises InternalError for what is neither file nor folder."""
    relpaths = []
    for path in _walk(folder):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise InternalError(f"the compile made a link or special file: {path.relative_to(folder)}")
        if path.is_file():
            relpaths.append(path.relative_to(folder).as_posix())
    return sorted(relpaths)


def _folders(folder: Path) -> list[Path]:
    return [folder, *(path for path in _walk(folder) if path.is_dir())]


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        yield from (Path(root, name) for name in (*folders, *files))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
