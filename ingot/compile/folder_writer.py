"""Write a folder under a hidden name next to the output; one rename at the end publishes it."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from ingot.ir.artifact.manifest import path_problem
from ingot.ir.errors import InternalError, OutputError
from ingot.ir.json_text import dump_lines

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


class WritableFiles(ABC):
    """Writes the files of a folder by their relative paths."""

    @abstractmethod
    def path(self, relpath: str) -> Path:
        """Return the path at which to write the file `relpath`. Make its folders. Raises OSError or InternalError."""

    def write_bytes(self, relpath: str, data: bytes) -> None:
        """Write one file. Raises OSError, InternalError."""
        self.path(relpath).write_bytes(data)

    def write_text(self, relpath: str, text: str) -> None:
        """Write one file in UTF-8 and keep its newlines. Raises OSError, InternalError."""
        self.write_bytes(relpath, text.encode("utf-8"))

    def write_json(self, relpath: str, value: object) -> None:
        """Write `value` to one file as JSON. Raises OSError, InternalError, and the errors of `dump_lines`."""
        self.write_text(relpath, dump_lines(value))


class FolderWriter(WritableFiles):
    """A context manager that writes one folder. Nothing is visible at `output` before `publish_folder` returns.

        with FolderWriter(Path("pico-onnx")) as writer:
            writer.write_text("genai_config.json", text)
            writer.publish_folder()

    If the block ends without `publish_folder`, the written files are removed. The start of the block removes what
    killed writers of this output have left. Raises OutputError if the output exists or cannot be written. A full disk
    inside the block also ends in an OutputError.

    `what` names the folder in messages, and `example` is a path for it.
    """

    what: ClassVar[str] = "an export"
    example: ClassVar[str] = "NAME"

    def __init__(self, output: str | Path) -> None:
        # abspath, not resolve: an output that is a link counts as existing, wherever it points.
        self.output = Path(os.path.abspath(output))
        self._temporary: Path | None = None
        self._folder: Path | None = None
        self._lock = -1
        self._disk = ThreadPoolExecutor(1, "disk")  # its thread starts with the first file
        self._syncing: list[Future[None]] = []

    def __enter__(self) -> Self:
        parent, name = self.output.parent, self.output.name
        try:
            if not name:
                raise OutputError(
                    f"{self.output} cannot be {self.what}'s name", expected=f"a path such as {self.example}"
                )
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
            # The outer folder is private and locked. The inner folder has the modes of the user's umask and is renamed.
            self._folder = self._temporary / "folder"
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
                expected=f"room for {self.what}",
                hint="free some space or choose another output; nothing was left behind",
            ) from error

    def path(self, relpath: str) -> Path:
        """Return the path at which to write the file `relpath` of the folder. Make its folders.

        Raises OSError or InternalError.
        """
        if problem := path_problem(relpath):
            raise InternalError(f"the file name {relpath!r} of {self.what} is refused: {problem}")
        path = self.folder() / relpath
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def sync_soon(self, relpath: str) -> None:
        """Start to sync a written file to disk in the background. `publish` waits for this and raises its errors."""
        self._syncing.append(self._disk.submit(_sync, self.path(relpath)))

    def clear(self) -> None:
        """Remove all files that were written so far, to write others in their place. Raises OSError."""
        folder = self.folder()
        for begun in self._syncing:
            begun.exception()  # waits; the files go
        self._syncing = []
        shutil.rmtree(folder)
        folder.mkdir()

    def publish_folder(self) -> None:
        """Make the folder visible at `output`: sync all files to disk, and rename the temporary folder.

        Raises OutputError if `output` exists by now.
        """
        folder = self.folder()
        for begun in self._syncing:
            begun.result()
        for path in [*(folder / relpath for relpath in files_in(folder)), *_folders(folder)]:
            _sync(path)
        if os.path.lexists(self.output):  # the rename would silently replace an empty folder
            raise _exists(self.output, "by now")
        try:
            os.rename(folder, self.output)
        except OSError as error:
            if error.errno in _TAKEN:
                raise _exists(self.output, "by now") from None
            raise
        self._folder = None
        with contextlib.suppress(OSError):  # the folder is published; some file systems cannot sync a folder
            _sync(self.output.parent)

    def folder(self) -> Path:
        """Return the temporary folder. Raises InternalError outside the block, and after `publish_folder`."""
        if self._folder is None:
            raise InternalError(
                f"the writer of {self.what} is not open", hint="use it in a `with` block, before `publish`"
            )
        return self._folder

    def _discard(self) -> None:
        self._disk.shutdown(cancel_futures=True)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._temporary, self._folder, self._lock = None, None, -1


def _exists(output: Path, when: str = "already") -> OutputError:
    return OutputError(
        f"{output} exists {when}",
        expected="a path that does not exist",
        hint="remove it or choose another output; what exists was left as it is",
    )


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether a full disk caused `error`.

    Libraries wrap such errors, so the error's causes and their messages are searched too.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return True
        if any(os.strerror(number) in str(error) for number in _DISK_FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


# A temporary folder belongs to the process that holds its lock. The kernel drops the lock however the process dies. A
# process number alone would fail in containers: a compile in another container shares the disk but not the numbers, so
# it would count as dead; and a restarted container may give the next compile the number of the killed one.


def _make_temporary(parent: Path, name: str) -> tuple[Path, int]:
    while True:
        temporary = parent / f".{name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
        temporary.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
            # Between mkdir and lock another writer may have removed it as stale: then try again.
            if _try_lock(descriptor) is not False and temporary.exists():
                return temporary, descriptor
            os.close(descriptor)


def _remove_stale(parent: Path, name: str) -> None:
    pattern = re.compile(re.escape(f".{name}.tmp-") + r"(\d+)-[0-9a-f]{8}")
    for entry in parent.iterdir():
        match = pattern.fullmatch(entry.name)
        if match is None or entry.is_symlink() or not entry.is_dir():
            continue
        with contextlib.suppress(OSError):  # another user's, or just removed by another writer
            descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY)
            try:
                locked = _try_lock(descriptor)
                if locked or (locked is None and not _is_alive(int(match[1]))):
                    shutil.rmtree(entry)
            finally:
                os.close(descriptor)


def _try_lock(descriptor: int) -> bool | None:
    """Lock an open file without waiting. Return True if it is locked now, and False if another process holds it.

    Return None if the file system has no locks, as some network file systems.
    """
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


def files_in(folder: Path) -> list[str]:
    """Return the sorted relative paths of all files in a folder and its subfolders.

    Raises InternalError for a link or a special file.
    """
    relpaths = []
    for path in _walk(folder):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise InternalError(f"the folder holds a link or special file: {path.relative_to(folder)}")
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
