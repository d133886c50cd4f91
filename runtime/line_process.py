"""A child process that answers each line on its stdin with a line on its stdout, and is killed if it takes too long."""

import contextlib
import os
import select
import subprocess
import tempfile
import time
import weakref
from typing import IO

from ingot.ir.errors import InternalError
from ingot.runtime.module_command import module_command

# Python and a library start in 0.2 s on an idle core.
START_SECONDS = 60.0
_STDERR_TAIL = 2000


class LineProcess:
    """A process that runs a Python module for work that may take too long, or crash. It is killed when this object is
    garbage-collected.

    module   the module, which writes one line when it is ready, and then one for each line that it reads
    what     names the process in errors

    Raises InternalError if the process does not start.
    """

    def __init__(self, module: str, what: str) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            module_command(module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C reaches only the parent
        )
        self._end = weakref.finalize(self, _end, self._process, self._stderr)
        try:
            self._read_line(time.monotonic() + START_SECONDS)
        except (TimeoutError, EOFError):
            self._stderr.seek(0)
            tail = self._stderr.read().decode(errors="replace")[-_STDERR_TAIL:].strip()
            raise InternalError(f"{what} did not start, status {self.close()}", where=tail) from None

    def ask(self, line: bytes, seconds: float) -> bytes:
        """Send a request to the process and return its answer. Both are one line of JSON. Raises TimeoutError if the
        answer takes longer than `seconds`, and EOFError if the process ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        return self._read_line(time.monotonic() + seconds)

    def _read_line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        pieces: list[bytes] = []
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise TimeoutError
            piece = os.read(pipe, 1 << 16)
            if not piece:
                raise EOFError
            pieces.append(piece)
            if piece.endswith(b"\n"):
                return b"".join(pieces)

    def close(self) -> int:
        """Kill the process and return its exit status."""
        self._end()
        return self._process.wait()


def _end(process: "subprocess.Popen[bytes]", stderr: IO[bytes]) -> None:
    process.kill()  # no effect if it has ended
    process.wait()
    for stream in (process.stdin, process.stdout, stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
