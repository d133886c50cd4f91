"""The output of a batch: a file that appears when it is complete."""

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from ingot.ir.errors import OutputError


class OutputFile:
    """Writes to a hidden file in the folder of `path`, and renames it at the end of the block. After an error in the
    block, `path` is as it was. All methods raise OutputError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}")

    def __enter__(self) -> Self:
        try:
            self._file = self._partial.open("xb")
        except OSError as error:
            raise self._failure(error) from None
        return self

    def write(self, line: bytes) -> None:
        """Add a line, which has no newline at its end."""
        try:
            self._file.write(line + b"\n")
        except OSError as error:
            raise self._failure(error) from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            with self._file:
                if error is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if error is None:
                os.replace(self._partial, self._path)
        except OSError as problem:
            if error is None:
                raise self._failure(problem) from None
        finally:
            self._partial.unlink(missing_ok=True)

    def _failure(self, error: OSError) -> OutputError:
        return OutputError(f"{self._path} cannot be written: {error.strerror}", where="--output-file")
