"""Start and call worker processes, which run `ingot.compile.emit_worker`. Requests and answers are JSON over pipes."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from ingot.error_text import decode_error
from ingot.ir.errors import BackendError
from ingot.runtime.module_command import module_command

# The end of a dead compiler's stderr: enough for the end of a traceback, not its whole log.
_STDERR_TAIL = 2000


class Worker:
    """A worker process of a compile. It imports the compiler of `backend`, and then answers the requests of `ask`."""

    def __init__(self, backend: str) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            module_command("ingot.compile.emit_worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            # A Ctrl-C goes to the parent, which closes its workers.
            start_new_session=True,
        )
        self._waiting = 1
        self._send({"backend": backend, "warm": True})

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `ask` finds that the process died, and reports why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the process, wait, and return its answer.

        Raises the IngotError that the process reports. Raises BackendError if the process died.
        """
        self._send(request)
        self._waiting += 1
        answer: dict[str, Any] = {}
        for line in self._answers():
            answer = json.loads(line)
            if "error" in answer:
                raise decode_error(answer["error"])
            if "ready" not in answer:
                return answer
        self._stderr.seek(0)
        tail = self._stderr.read().decode(errors="replace")[-_STDERR_TAIL:]
        raise BackendError(
            f"the {request['backend']} compiler's process died with status {self._process.wait()}", where=tail.strip()
        )

    def _answers(self) -> Iterator[str]:
        assert self._process.stdout is not None
        while self._waiting and (line := self._process.stdout.readline()):
            self._waiting -= 1
            yield line

    def close(self) -> None:
        """Kill the process and the processes that it started, such as a C++ compiler."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
