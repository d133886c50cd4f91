"""Rendering of chat templates in a worker process, which is killed if it takes too long."""

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.ir.errors import ArtifactError, RequestError
from ingot.runtime.line_process import LineProcess

# A conversation renders in milliseconds. This is long enough for a slow machine under load, but ends an endless loop.
RENDER_SECONDS = 2.0
# A million tokens, the longest context that current models are trained for, are about four million characters.
TEXT_CHARACTERS = 4 << 20


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
        self._worker: LineProcess | None = None

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
            worker, self._worker = self._worker or _start(), None  # a worker that fails is not used again
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


def _start() -> LineProcess:
    return LineProcess("ingot.runtime.chat.worker", "the chat templates' process")


def _exceeded(name: str, what: str, cap: str) -> RequestError:
    return RequestError(
        f"the chat template {what}",
        where=name,
        expected=f"a template and a conversation within the cap on {cap}",
        hint="send a shorter conversation; if every one fails, the template is at fault",
    )
