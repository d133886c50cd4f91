"""Rendering of chat templates in a worker process, which is killed if it takes too long."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any

from ingot.ir.errors import ArtifactError, InternalError, RequestError

# A conversation renders in milliseconds. This is long enough for a slow machine under load, but ends an endless loop.
RENDER_SECONDS = 2.0
# Python and Jinja start in 0.2 s on an idle core.
START_SECONDS = 60.0
# A million tokens, the longest context that current models are trained for, are about four million characters.
TEXT_CHARACTERS = 4 << 20
_STDERR_TAIL = 2000


class TemplateObjection(RequestError):
    """Raised if a chat template refuses a conversation, or fails while it renders one. If it takes too much time or
    memory, or writes too much text, a plain RequestError is raised instead."""


class Renderer:
    """Renders chat templates in a worker process, which has limits on time, memory and text size. Several threads may
    call `render`; calls run one at a time. The first call starts the process.

    seconds      the most time for one call of `render`
    characters   the most characters of one rendered text
    """

    def __init__(self, seconds: float = RENDER_SECONDS, characters: int = TEXT_CHARACTERS) -> None:
        self.seconds, self.characters = seconds, characters
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def render(self, name: str, template: str, contexts: Sequence[Mapping[str, Any]]) -> list[str]:
        """Render the template once for each context, and return the texts in that order.

        name       where the template comes from, for error messages
        template   the template's text
        contexts   the template's variables for each text, variable -> JSON data

        Raises ArtifactError for an invalid template. Raises TemplateObjection if the template refuses the conversation
        or fails. Raises RequestError if it takes too much time, memory or text. Later calls work after an error.
        """
        request = {
            "template": template,
            "contexts": contexts,
            "seconds": self.seconds,
            "characters": self.characters,
        }
        line = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        with self._lock:
            worker, self._worker = self._worker or _Worker(), None  # a worker that fails is not used again
            try:
                reply = json.loads(worker.ask(line, self.seconds).decode("utf-8", "surrogatepass"))
            except TimeoutError:
                worker.close()
                raise _exceeded(name, f"took longer than {self.seconds:g} s", "time") from None
            except EOFError:
                raise _exceeded(name, f"ended its process with status {worker.close()}", "time or memory") from None
            except BaseException:
                worker.close()
                raise
            if reply.get("error") == "memory":
                worker.close()
            else:
                self._worker = worker
        if "texts" in reply:
            texts: list[str] = reply["texts"]
            return texts
        kind, message = reply["error"], reply["message"]
        if kind == "memory":
            raise _exceeded(name, "used more memory than its process may have", "memory")
        if kind == "size":
            raise _exceeded(name, f"wrote more than {self.characters} characters", "size")
        if kind == "syntax":
            raise ArtifactError(f"the chat template is no valid template: {message}", where=name)
        if kind == "refused":
            raise TemplateObjection(f"the chat template refuses the conversation: {message}", where=name)
        raise TemplateObjection(f"the chat template failed: {message}", where=name)

    def close(self) -> None:
        """End the worker process. A later call of `render` starts another."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()
                self._worker = None


def _exceeded(name: str, what: str, cap: str) -> RequestError:
    return RequestError(
        f"the chat template {what}",
        where=name,
        expected=f"a template and a conversation within the cap on {cap}",
        hint="send a shorter conversation; if every one fails, the template is at fault",
    )


class _Worker:
    """A worker process that runs `ingot.runtime.chat.worker`. It is killed when this object is garbage-collected."""

    def __init__(self) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ingot.runtime.chat.worker"],
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
            raise InternalError(
                f"the chat templates' process did not start, status {self.close()}", where=tail
            ) from None

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
