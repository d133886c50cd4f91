"""Compile executables in parallel worker processes. The cache keeps them by `exe_key`."""

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.compile.executable_cache import build_library, executable_folder, explained, find_executable, find_workspace
from ingot.compile.identity import Document, choices_of, exe_document
from ingot.compile.outside_backend import OutsideBackend
from ingot.compile.timing.tuner import Tuner
from ingot.compile.worker import Worker
from ingot.ir.artifact.backend_times import Candidate
from ingot.ir.artifact.digest import digest_json
from ingot.ir.artifact.plan import Executable
from ingot.ir.artifact.tuning import Choice
from ingot.ir.backend import Backend, LibraryBuilder, RegionCompiler
from ingot.ir.errors import BackendError, IngotError
from ingot.ir.machine.target import Target
from ingot.ir.program import Program, Region
from ingot.ir.text import print_program


@dataclass
class Emitter:
    """Compiles regions (calls that one compiler compiles together) in up to `jobs` worker processes.

    Executables that the cache holds are not compiled again. `backends` maps names to backends. With a `tuner`, they use
    timed tile sizes. `on_done` is called with the number of finished regions and the total.

    The other fields describe the executables so far, by id:

    - `folders`: the cache folder with the executable's files
    - `documents`: the JSON document whose digest is the id
    - `choices`: the tile sizes of its kernels
    - `seconds`: the time of compiling it
    - `hits`: the ids of executables that the cache held
    """

    backends: Mapping[str, Backend]
    target: Target
    jobs: int
    tuner: Tuner | None = None
    on_done: Callable[[int, int], None] = lambda done, total: None
    folders: dict[str, Path] = field(default_factory=dict)
    documents: dict[str, Document] = field(default_factory=dict)
    choices: dict[str, tuple[Choice, ...]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    hits: set[str] = field(default_factory=set)
    _workers: list["Worker"] = field(default_factory=list)

    def __enter__(self) -> "Emitter":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()

    def warm_up(self) -> None:
        """Start half of the worker processes now. They import their compilers while the caller traces the model."""
        compilers = [backend.name for backend in self.backends.values() if isinstance(backend, RegionCompiler)]
        # Half of them: tracing needs its share of the machine, and the cache may already hold everything.
        while compilers and len(self._workers) < max(1, self.jobs // 2):
            self._workers.append(Worker(compilers[0]))

    def emit_library(self, backend: LibraryBuilder) -> Executable:
        """Return a backend's kernel library as an Executable. If the cache lacks it, build it in this process.

        Building takes about a second, and the worker processes are busy. Raises IngotError.
        """
        key = self._key(None, backend)
        executable = find_executable(key)
        if executable is None:
            begin = time.perf_counter()
            try:
                executable = build_library(backend, key, self.target)
            except (IngotError, OSError) as error:
                raise explained(error) from error
            self.seconds[key] = time.perf_counter() - begin
        else:
            self._found(key)
        self.folders[key] = executable_folder(key)
        return executable

    def tune(self, regions: Sequence[Region]) -> None:
        """Time tile sizes for the kernels of these regions (calls compiled together), if there is a `tuner`.

        `backends` are then replaced by backends that use the fastest tile sizes.
        """
        if self.tuner is not None:
            self.backends = self.tuner.tuned(self.backends, regions)

    def emit(self, regions: Sequence[Region]) -> dict[str, Executable]:
        """Return the executable (compiled code) of each region, by the region's name.

        A region is calls that one compiler compiles together. If the cache lacks some executables, they are compiled in
        parallel. Raises BackendError with the compiler's reason.
        """
        self.tune(regions)
        results: dict[str, Executable] = {}
        keys = {region.name: self._key(region, self.backends[region.backend]) for region in regions}
        missing: list[Region] = []
        for region in regions:
            cached = find_executable(keys[region.name])
            if cached is None:
                missing.append(region)
            else:
                results[region.name], self.folders[cached.id] = cached, executable_folder(cached.id)
                self._found(cached.id)
        self.on_done(len(results), len(regions))
        if missing:
            self._emit_all(missing, keys, results, len(regions))
        return results

    def measure(self, regions: Sequence[Region], sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the peak bytes that a call of each region's compiled code allocates, by the region's name.

        A region is calls that one compiler compiles together. `sizes` maps dims, such as T (tokens) and B (sequences),
        to their sizes in this call. If the cache has no result, a worker process calls the code once.
        """
        results: dict[str, int] = {}
        keys = {region.name: self._key(region, self.backends[region.backend]) for region in regions}
        sized = {region.name: {name: sizes[name] for name in region.body.dims} for region in regions}

        def ask(worker: Worker, region: Region) -> None:
            results[region.name] = self._ask(worker, region, keys[region.name], sized[region.name])["workspace"]

        for region in regions:
            found = find_workspace(keys[region.name], sized[region.name], self.target.cores)
            if found is not None:
                results[region.name] = found
        self._share([region for region in regions if region.name not in results], ask)
        return results

    def key(self, region: Region) -> str:
        """Return the cache key for code and times of the one call in `region`.

        It is the id of the call's compiled code, or of its backend's kernel library. If the backend builds nothing, it
        is a digest of the call and the backend.
        """
        backend = self.backends[region.backend]
        return digest_json(exe_document(None if isinstance(backend, LibraryBuilder) else region, backend, self.target))

    def time(self, body: Program, candidates: Sequence[Candidate]) -> dict[str, Any]:
        """Time the only call in `body` with each backend in `candidates`, in a worker process.

        Return the times as JSON, by backend. Raises BackendError if a backend fails.
        """
        if not self._workers:
            self._workers.append(Worker(candidates[0].backend))
        answer = self._workers[0].ask(
            {
                "backend": candidates[0].backend,
                "program": print_program(body),
                "candidates": [one.model_dump(mode="json") for one in candidates],
                "target": self.target.model_dump(mode="json"),
            }
        )
        times: dict[str, Any] = answer["times"]
        return times

    def _key(self, region: Region | None, backend: Backend) -> str:
        document = exe_document(region, backend, self.target)
        key = digest_json(document)
        self.documents[key] = document
        self.choices[key] = choices_of(region, backend, self.target)
        return key

    def _found(self, key: str) -> None:
        """Record that the cache held the executable (compiled code) `key`, unless this compile built it."""
        if self.seconds.setdefault(key, 0.0) == 0.0:
            self.hits.add(key)

    def _emit_all(
        self, regions: list[Region], keys: Mapping[str, str], results: dict[str, Executable], total: int
    ) -> None:
        lock = threading.Lock()

        def ask(worker: Worker, region: Region) -> None:
            begin = time.perf_counter()
            answer = self._ask(worker, region, keys[region.name])
            executable = Executable.model_validate_json(json.dumps(answer["executable"]))
            with lock:
                self.seconds[executable.id] = time.perf_counter() - begin
                self.folders[executable.id] = executable_folder(executable.id)
                results[region.name] = executable
                self.on_done(len(results), total)

        self._share(regions, ask)

    def _share(self, regions: Sequence[Region], ask: Callable[["Worker", Region], None]) -> None:
        """Call `ask(worker, region)` once for each region (calls compiled together), in parallel.

        A worker process that is free takes the next region.
        """
        # Long bodies first, so that the last one to finish is short.
        tasks: queue.SimpleQueue[Region] = queue.SimpleQueue()
        for region in sorted(regions, key=lambda region: -len(list(region.body.calls()))):
            tasks.put(region)
        while len(self._workers) < min(self.jobs, len(regions)):
            self._workers.append(Worker(regions[0].backend))
        errors: list[BaseException] = []

        def serve(worker: Worker) -> None:
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
        self, worker: "Worker", region: Region, key: str, sizes: Mapping[str, int] | None = None
    ) -> dict[str, Any]:
        """Send a region (calls compiled together) to a worker process, and return its JSON answer.

        The answer has the executable (compiled code). If `sizes` are passed, it has the peak bytes that a call of the
        executable allocates.
        """
        request = {
            "backend": region.backend,
            "program": print_program(region.body),
            "key": key,
            "choices": [choice.model_dump(mode="json") for choice in self.choices[key]],
            "target": self.target.model_dump(mode="json"),
            "sizes": sizes,
        }
        try:
            return worker.ask(request)
        except BackendError as error:  # the process died
            backend = self.backends[region.backend]
            raise backend.blamed(error) if isinstance(backend, OutsideBackend) else error from None
