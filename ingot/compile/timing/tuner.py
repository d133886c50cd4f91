"""Time tile sizes of kernels for --tune, once for each kind of GPU, compiler and method of timing."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from ingot.compile.cache import cache_folder
from ingot.compile.executable_cache import explained
from ingot.compile.worker import Worker
from ingot.ir.artifact.digest import digest_json
from ingot.ir.artifact.tuning import Choice, read_choices
from ingot.ir.backend import Backend, Tunable
from ingot.ir.errors import TargetError
from ingot.ir.machine.target import Target
from ingot.ir.program import Region

# For each choice, including the compile of its candidates: fifty of them on a dozen cores take about as long.
SECONDS = 3.0
_NAMED = 3  # choices that an error names

# Return the fastest tile sizes for a choice: the named backend tries sizes for the seconds passed.
MeasureTiles = Callable[[str, Choice, float], Choice]


@dataclass
class Tuner:
    """Finds the fastest tile sizes of kernels for a target: in the cache, or by timing on this machine's GPU.

    Tile sizes from a tuning log are not timed again. `seconds` is the time to spend on each problem (kernel, sizes and
    dtypes of a call). `on_done` is called with the number of timed problems and the total. `measure` replaces the
    timing in a worker process.
    """

    target: Target
    seconds: float = SECONDS
    on_done: Callable[[int, int], None] = lambda done, total: None
    measure: MeasureTiles | None = None
    _worker: Worker | None = field(default=None, init=False)

    def __enter__(self) -> "Tuner":
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the worker process. It holds some GPU memory as long as it runs."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def tuned(self, backends: Mapping[str, Backend], regions: Sequence[Region]) -> dict[str, Backend]:
        """Return the backends by name, with the fastest tile sizes for the kernels of `regions`.

        Backends without tile sizes are unchanged. Raises TargetError if tile sizes must be timed and this machine lacks
        the target's GPU.
        """
        result = dict(backends)
        for name, backend in backends.items():
            if not isinstance(backend, Tunable):
                continue
            bodies = [region.body for region in regions if region.backend == name]
            chosen = {choice.key: choice for body in bodies for choice in backend.choices(body, self.target)}
            known = {key: one for key, one in chosen.items() if one.source in ("given", "measured")}
            asked = [one for key, one in chosen.items() if key not in known and backend.measures(one)]
            if asked:
                found = self._find(backend, asked)
                result[name] = backend.with_choices(found)
        return result

    def _find(self, backend: Tunable, asked: Sequence[Choice]) -> list[Choice]:
        compiler = {
            "gpu": self.target.gpu,
            "target": self.target.code_identity(),
            "toolchain": backend.toolchain(),
            "sources": [path.read_text(encoding="utf-8") for path in backend.sources()],
            # A change of what is timed, or how, makes other sizes the fastest.
            "tuning": [path.read_text(encoding="utf-8") for path in backend.tuning_sources()],
        }
        files = {choice.key: _file(choice, digest_json(compiler)) for choice in asked}
        found = {choice.key: _cached(files[choice.key], choice) for choice in asked}
        missing = [choice for choice in asked if found[choice.key] is None]
        if missing and self.measure is None:
            self._want_gpu(missing)
        for done, choice in enumerate(missing):
            self.on_done(done, len(missing))
            timed = (self.measure or self._ask)(backend.name, choice, self.seconds)
            found[choice.key] = timed
            _keep(files[choice.key], timed)
        return [one for one in found.values() if one is not None]

    def _want_gpu(self, missing: Sequence[Choice]) -> None:
        if reason := self.target.missing_here():
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise TargetError(
                f"tile sizes for {self.target.name} cannot be timed: {reason}",
                where=f"{'; '.join(map(str, missing[:_NAMED]))}{more}",
                expected=f"a machine with a GPU of the capability that is compiled for, {self.target.name}",
                hint="compile without --tune, or give the tuning log of a machine that has it: --tuning-log NAME.ingot",
            )

    def _ask(self, backend: str, choice: Choice, seconds: float) -> Choice:
        self._worker = self._worker or Worker(backend)
        request = {"backend": backend, "choices": [choice.model_dump(mode="json")], "measure": seconds}
        answer = self._worker.ask({**request, "target": self.target.model_dump(mode="json")})
        (timed,) = read_choices([answer["choice"]])
        return timed


def _file(choice: Choice, compiler: str) -> Path:
    """Return the path in the cache for the tile sizes of a kernel for one problem (sizes and dtypes of a call).

    `choice` names both. `compiler` is a digest of GPU, compiler, and sources of kernels and of their timing.
    """
    key = digest_json({"kernel": choice.kernel, "problem": choice.problem, "compiler": compiler})
    return cache_folder("tuning") / f"{key}.json"


def _cached(file: Path, choice: Choice) -> Choice | None:
    try:
        found = Choice.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None
    return found if found.key == choice.key and found.source == "measured" else None


def _keep(file: Path, choice: Choice) -> None:
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        partial.write_text(choice.model_dump_json() + "\n", encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise explained(error) from error
