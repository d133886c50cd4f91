"""Drive an engine through a workload in real time, and record when each token was reported."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ingot.bench.workload import BenchRequest

# A sleep before the next arrival ends this much early; `drive` polls the clock for the rest. Sleeping is only as exact
# as the kernel's timer slack, 50 µs, and the scheduler of a busy machine (prctl(2), PR_SET_TIMERSLACK).
_WAKE_EARLY_SECONDS = 1e-3


class Progress(NamedTuple):  # cheaper than a dataclass: a step makes one per sequence
    """The state of a request after a step. `request` is the index of the request.

    `tokens` is the number of tokens generated so far. `error` says why the request ended early, or is "".
    """

    request: int
    tokens: int
    finished: bool
    error: str = ""


class DrivenEngine(Protocol):
    """An engine that `drive` can benchmark. One thread adds requests to it and runs its steps."""

    def add(self, index: int, request: BenchRequest) -> None:
        """Queue a request. `index` identifies the request in the results of `step`."""
        ...

    def step(self) -> Iterable[Progress]:
        """Run a step, and return the state of each request that has new tokens. It may wait for the device."""
        ...

    def has_unfinished(self) -> bool: ...


@dataclass
class Record:
    """The history of one request in a benchmark run. Times are in seconds from the beginning of the run.

    `started` is the request's arrival. If `max_concurrency` requests were running then, it is the moment when one of
    them ended, as in vLLM's benchmark client. `token_times` has one time per generated token. Tokens of one step have
    equal times. `error` says why the request failed, or is "".
    """

    request: BenchRequest
    started: float
    token_times: list[float] = field(default_factory=list)
    finished: bool = False
    error: str = ""

    @property
    def completed(self) -> bool:
        return self.finished and not self.error


@dataclass(frozen=True)
class Run:
    """The result of `drive`: the records of the started requests in order of arrival, and the seconds of the run.

    `interrupted` is True if a KeyboardInterrupt ended the run early.
    """

    records: tuple[Record, ...]
    duration: float
    interrupted: bool = False

    @property
    def completed(self) -> list[Record]:
        return [one for one in self.records if one.completed]


def drive(
    engine: DrivenEngine,
    requests: Sequence[BenchRequest],
    *,
    max_concurrency: int | None = None,
    on_finished: Callable[[int], None] = lambda count: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Run:
    """Serve `requests` with the engine, each from its arrival on, and return their records.

    `requests` are in order of arrival. The engine has at most `max_concurrency` of them at a time; None sets no limit.
    Whenever requests end, `on_finished` is called with the number that have ended so far. `clock` and `sleep` can
    replace the functions of `time`. A KeyboardInterrupt ends the run, and the records so far are returned.
    """
    waiting = deque(enumerate(requests))
    records: dict[int, Record] = {}
    most = len(requests) if max_concurrency is None else max_concurrency
    running, ended = 0, 0
    freed = 0.0  # the last time that a request ended while the engine was full
    begin = clock()
    try:
        while waiting or engine.has_unfinished():
            now = clock() - begin
            while waiting and running < most and waiting[0][1].arrival <= now:
                index, request = waiting.popleft()
                records[index] = Record(request, max(request.arrival, freed))
                engine.add(index, request)
                running += 1
            if not engine.has_unfinished():
                wait_until(waiting[0][1].arrival, begin, clock, sleep)
                continue
            changed = list(engine.step())
            now = clock() - begin
            for one in changed:
                record = records[one.request]
                record.token_times += [now] * (one.tokens - len(record.token_times))
                if one.finished:
                    record.finished, record.error = True, one.error
                    freed = now if running == most else freed
                    running, ended = running - 1, ended + 1
            if any(one.finished for one in changed):
                on_finished(ended)
    except KeyboardInterrupt:
        return Run(tuple(records.values()), clock() - begin, interrupted=True)
    return Run(tuple(records.values()), clock() - begin)


def wait_until(moment: float, begin: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
    """Sleep until 1 ms before `moment`. The caller polls the clock for the rest.

    `moment` is in seconds after `begin`, an earlier value of `clock()`.
    """
    left = moment - (clock() - begin)
    if left > _WAKE_EARLY_SECONDS:
        sleep(left - _WAKE_EARLY_SECONDS)
