"""Time the backends of a model's calls during a compile, once for each machine and executable."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from ingot.compile.emitter import Emitter
from ingot.compile.executable_cache import explained, find_times, keep_times
from ingot.compile.timing.call_inputs import timed_steps
from ingot.ir.artifact.backend_times import BackendTime, BackendTimes, Candidate, fastest
from ingot.ir.backend import Compiler, LibraryBuilder
from ingot.ir.errors import BackendError
from ingot.ir.machine.target import Target
from ingot.ir.program import Program, Region
from ingot.passes.base import Contest

# The maximum of different calls that a compile times. A typical model has one or two, of some tenths of a second each.
MOST = 32

_TIMES = TypeAdapter(dict[str, tuple[BackendTime, ...]])
# Return the times of a call by backend, as `time_call` does. Raises BackendError if one does not run.
MeasureCall = Callable[[Program, Sequence[Candidate], Target], Mapping[str, tuple[BackendTime, ...]]]


@dataclass
class CallTimer:
    """Finds the times of calls that several backends can compute.

    They come from the cache, or from runs of the calls on this machine.

    - `untimed`: reason to time nothing; "" lets calls be timed
    - `on_done`: called with the number of timed calls and the total
    - `measure`: replaces the timing in a worker process
    - `most`: maximum number of different calls to time
    """

    emitter: Emitter
    target: Target
    untimed: str = ""
    on_done: Callable[[int, int], None] = lambda done, total: None
    measure: MeasureCall | None = None
    most: int = MOST
    _asked: dict[str, None] = field(default_factory=dict, init=False)

    def time(
        self, contests: Sequence[Contest], anyway: Callable[[], Sequence[Region]] = tuple
    ) -> list[BackendTimes | str]:
        """Return for each contest the times of its backends, or the reason why they are not timed.

        A contest is a call with the backends that can compute it. Contests must be distinct. `anyway` returns regions
        that the compile needs next. They are compiled in parallel with the code for the timing.
        """
        reasons = {one.key: self._refusal(one) for one in contests}
        self.emitter.tune([region for one in contests if not reasons[one.key] for region in _regions(one)])
        known = {one.key: self._known(one) for one in contests if not reasons[one.key]}
        missing = [one for one in contests if not reasons[one.key] and known[one.key] is None]
        if missing:
            candidates = self._built(missing, anyway())
            for done, one in enumerate(missing):
                self.on_done(done, len(missing))
                try:
                    known[one.key] = self._timed(one, candidates[one.key])
                except BackendError as error:
                    reasons[one.key] = f"timing failed: {error.what}"
        found: list[BackendTimes | str] = []
        for one in contests:
            times = known.get(one.key)
            if times is None:
                found.append(reasons[one.key])
            else:
                found.append(_decided(one, times))
        return found

    def _refusal(self, contest: Contest) -> str:
        if self.untimed:
            return self.untimed
        if missing := self.target.missing_here():
            return f"not timed: {missing}"
        if contest.key not in self._asked and len(self._asked) == self.most:
            return f"not timed: a compile times {self.most} different calls"
        self._asked[contest.key] = None
        return ""

    def _known(self, contest: Contest) -> dict[str, tuple[BackendTime, ...]] | None:
        """Return the cached times of a contest (a call that several backends can compute), by backend.

        Return None if the cache lacks the times of a backend.
        """
        found = {}
        for region in _regions(contest):
            times = find_times(self.emitter.key(region), self._measured(contest))
            if times is None:
                return None
            found[region.backend] = times
        return found

    def _built(self, contests: Sequence[Contest], anyway: Sequence[Region]) -> dict[str, list[Candidate]]:
        """Compile the code of contests (calls that several backends can compute), and return it.

        The result maps the key of a contest to its backends with their code. The regions `anyway`, which the compile
        needs next, are compiled in parallel.
        """
        regions = {
            f"{number}.{one.backend}": one for number, contest in enumerate(contests) for one in _regions(contest)
        }
        backends = self.emitter.backends
        compiled = [
            Region(name, one.body, one.backend)
            for name, one in regions.items()
            if isinstance(backends[one.backend], Compiler)
        ]
        libraries = {
            name: backend
            for name, one in regions.items()
            if isinstance(backend := backends[one.backend], LibraryBuilder)
        }
        # Libraries are built in this process, and the rest in worker processes.
        with ThreadPoolExecutor(1) as thread:
            emitting = thread.submit(self.emitter.emit, [*compiled, *anyway]) if compiled else None
            built = {name: self.emitter.emit_library(backend) for name, backend in libraries.items()}
            executables = built | (emitting.result() if emitting else {})
        return {
            contest.key: [
                Candidate(
                    backend=backend,
                    executable=built,
                    folder=None if built is None else str(self.emitter.folders[built.id]),
                )
                for backend in contest.backends
                for built in (executables.get(f"{number}.{backend}"),)
            ]
            for number, contest in enumerate(contests)
        }

    def _timed(self, contest: Contest, candidates: Sequence[Candidate]) -> dict[str, tuple[BackendTime, ...]]:
        if self.measure is not None:
            found = dict(self.measure(contest.body, candidates, self.target))
        else:
            found = _TIMES.validate_python(self.emitter.time(contest.body, candidates))
        for region in _regions(contest):
            try:
                keep_times(self.emitter.key(region), self._measured(contest), found[region.backend])
            except OSError as error:
                raise explained(error) from error
        return found

    def _measured(self, contest: Contest) -> dict[str, Any]:
        """Return the JSON that identifies a measurement in the cache.

        It has the call, the step sizes, the machine and its libraries.
        """
        steps = [[one.tokens, one.sequences, one.context] for one in timed_steps(contest.body)]
        machine = {"gpu": self.target.gpu, "cores": self.target.cores}
        identity = self.target.identity(self.target.versions)
        return {"call": list(contest.call), "steps": steps, "machine": {**machine, "identity": identity}}


def _regions(contest: Contest) -> list[Region]:
    """Return a region for each backend of the contest (a call that several backends can compute).

    All contain that call. Each is to be compiled by its backend.
    """
    return [contest.region(backend) for backend in contest.backends]


def _decided(contest: Contest, times: Mapping[str, tuple[BackendTime, ...]]) -> BackendTimes:
    ordered = {backend: times[backend] for backend in contest.backends}
    return BackendTimes(
        call=contest.call, bucket=contest.bucket, backend=fastest(ordered), times=ordered, source="measured"
    )
