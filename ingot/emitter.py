"""Emitting executables side by side in worker processes, with a cache by `exe_key`."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.error_text import raised
from ingot.executable_cache import build_executable, executable_folder, explained, find_executable, find_workspace
from ingot.identity import Document, exe_document
from ingot.ir.backend import Backend
from ingot.ir.digest import digest_json
from ingot.ir.errors import BackendError, IngotError
from ingot.ir.plan import Executable
from ingot.ir.program import Region
from ingot.ir.target import Target
from ingot.ir.text import print_program

# A compiler's last words: enough for a traceback's end, not for its whole log.
_STDERR_TAIL = 2000


@dataclass
class Emitter:
    """Compiles regions for one target with up to `jobs` worker processes.

    `folders` maps each executable's id to the folder that holds its files (in the cache), `documents` to what its id is
    the key of; `seconds` says how long each took, and `hits` which were in the cache.
    """

    backends: Mapping[str, Backend]
    target: Target
    jobs: int
    on_done: Callable[[int, int], None] = lambda done, total: None
    folders: dict[str, Path] = field(default_factory=dict)
    documents: dict[str, Document] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    hits: set[str] = field(default_factory=set)
    _workers: list["_Worker"] = field(default_factory=list)

    def __enter__(self) -> "Emitter":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()

    def warm_up(self) -> None:
        """Start the workers now, so that they import their compilers while the caller traces."""
        compilers = [backend.name for backend in self.backends.values() if backend.compiles_regions]
        # Half of them: tracing needs its share of the machine, and perhaps the cache has everything.
        while compilers and len(self._workers) < max(1, self.jobs // 2):
            self._workers.append(_Worker(compilers[0]))

    def emit_library(self, backend: Backend) -> Executable:
        """The kernels of an op provider. Built here: they take a second, and the workers are busy importing."""
        key = self._key(None, backend)
        executable = find_executable(key)
        if executable is None:
            begin = time.perf_counter()
            try:
                executable = build_executable(backend, None, key, self.target)
            except (IngotError, OSError) as error:
                raise explained(error) from error
            self.seconds[key] = time.perf_counter() - begin
        else:
            self.hits.add(key)
            self.seconds[key] = 0.0
        self.folders[key] = executable_folder(key)
        return executable

    def emit(self, regions: Sequence[Region]) -> dict[str, Executable]:
        """The executable of each region, by the region's name. Raises BackendError with the compiler's reason."""
        results: dict[str, Executable] = {}
        keys = {region.name: self._key(region, self.backends[region.backend]) for region in regions}
        missing: list[Region] = []
        for region in regions:
            cached = find_executable(keys[region.name])
            if cached is None:
                missing.append(region)
            else:
                results[region.name], self.folders[cached.id] = cached, executable_folder(cached.id)
                self.hits.add(cached.id)
                self.seconds[cached.id] = 0.0
        self.on_done(len(results), len(regions))
        if missing:
            self._emit_all(missing, keys, results, len(regions))
        return results

    def measure(self, regions: Sequence[Region], sizes: Mapping[str, int]) -> dict[str, int]:
        """Bytes that a call of each region allocates at its peak, by the region's name. It runs each of them once."""
        results: dict[str, int] = {}
        keys = {region.name: self._key(region, self.backends[region.backend]) for region in regions}
        sized = {region.name: {name: sizes[name] for name in region.body.dims} for region in regions}

        def ask(worker: _Worker, region: Region) -> None:
            results[region.name] = self._ask(worker, region, keys[region.name], sized[region.name])["workspace"]

        for region in regions:
            found = find_workspace(keys[region.name], sized[region.name], self.target.cores)
            if found is not None:
                results[region.name] = found
        self._share([region for region in regions if region.name not in results], ask)
        return results

    def _key(self, region: Region | None, backend: Backend) -> str:
        document = exe_document(region, backend, self.target)
        key = digest_json(document)
        self.documents[key] = document
        return key

    def _emit_all(
        self, regions: list[Region], keys: Mapping[str, str], results: dict[str, Executable], total: int
    ) -> None:
        lock = threading.Lock()

        def ask(worker: _Worker, region: Region) -> None:
            begin = time.perf_counter()
            answer = self._ask(worker, region, keys[region.name])
            executable = Executable.model_validate_json(json.dumps(answer["executable"]))
            with lock:
                self.seconds[executable.id] = time.perf_counter() - begin
                self.folders[executable.id] = executable_folder(executable.id)
                results[region.name] = executable
                self.on_done(len(results), total)

        self._share(regions, ask)

    def _share(self, regions: Sequence[Region], ask: Callable[["_Worker", Region], None]) -> None:
        """Let the workers take regions one after the other, side by side."""
        # Long bodies first: the last one to finish then is a short one.
        tasks: queue.SimpleQueue[Region] = queue.SimpleQueue()
        for region in sorted(regions, key=lambda region: -len(list(region.body.calls()))):
            tasks.put(region)
        while len(self._workers) < min(self.jobs, len(regions)):
            self._workers.append(_Worker(regions[0].backend))
        errors: list[BaseException] = []

        def serve(worker: _Worker) -> None:
            while not errors:
                try:
                    ask(worker, tasks.get_nowait())
                except queue.Empty:
                    return
                except BaseException as error:
                    errors.append(error)

        threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in self._workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _ask(
        self, worker: "_Worker", region: Region, key: str, sizes: Mapping[str, int] | None = None
    ) -> dict[str, Any]:
        """The worker's answer about a region: its executable, or, given sizes, the workspace of a call."""
        answer = worker.ask(
            {
                "backend": region.backend,
                "program": print_program(region.body),
                "key": key,
                "target": self.target.model_dump(mode="json"),
                "sizes": sizes,
            }
        )
        if "error" in answer:
            raise raised(answer["error"])
        return answer


class _Worker:
    """One worker process; `ask` is a call over its pipes."""

    def __init__(self, backend: str) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ingot.emit_worker"],
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
        with contextlib.suppress(BrokenPipeError):  # `ask` finds the process dead and says why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._send(request)
        self._waiting += 1
        answer: dict[str, Any] = {}
        for line in self._answers():
            answer = json.loads(line)
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
        """End the process, and what it started: its C++ compiler is in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
