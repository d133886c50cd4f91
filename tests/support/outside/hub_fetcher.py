"""Fetches checkpoints from a hub, each in a new process that is forked from one with most modules imported.

The client of the hub reads its environment when it is imported, so the forked process imports it. What the client
itself imports does not, and takes most of the time of a start. Requests and answers are JSON, one a line.
"""

import json
import os
import subprocess
import sys
import traceback
import types
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

# Of the modules that a fetch imports, those that huggingface_hub brings in and that know nothing of a hub.
_AHEAD = (
    "asyncio",
    "concurrent.futures",
    "filelock",
    "httpx2",
    "importlib.metadata",
    "ingot.ir.errors",
    "tqdm.auto",
    "yaml",
)


def fetch_in_new_process(folder: Path, environment: Mapping[str, str], name: str, revision: str | None) -> Any:
    """What `find_source` and `fetch` give in this environment: "folder", "origin" and "progress", or "error"."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    request = {"folder": str(folder), "environment": dict(environment), "name": name, "revision": revision}
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = json.loads(server.stdout.readline())
    assert "crash" not in answer, answer["crash"]
    return answer


@lru_cache(maxsize=1)
def _server() -> subprocess.Popen[str]:
    """The process that forks. It ends when its stdin does: with this process."""
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _fetch(request: Mapping[str, Any]) -> dict[str, Any]:
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    import huggingface_hub.file_download as client

    # The client waits for a second before it tries again, five times.
    client.time = types.SimpleNamespace(sleep=lambda seconds: None)
    from ingot.hub.source import find_source
    from ingot.ir.errors import IngotError

    phases: list[list[Any]] = []

    def progress(phase: str, done: float, total: float) -> None:
        phases.append([phase, int(done), int(total), str(done)])

    answer: dict[str, Any]
    try:
        source = find_source(request["name"], request["revision"], progress)
        answer = {"folder": str(source.fetch(progress)), "origin": source.origin}
    except IngotError as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    assert "torch" not in sys.modules
    return {**answer, "progress": phases}


def _serve() -> None:
    import importlib

    for module in _AHEAD:
        importlib.import_module(module)
    assert "huggingface_hub" not in sys.modules
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        try:
            answer = _fetch(json.loads(line))
        except BaseException:
            answer = {"crash": traceback.format_exc()}
        os.write(answers, (json.dumps(answer) + "\n").encode())
        os._exit(0)


if __name__ == "__main__":
    _serve()
