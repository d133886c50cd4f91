"""Drives an engine through a workload by the clock, and notes when every token came."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ingot.bench.workload import BenchRequest

# A sleep before the next arrival ends this much early, and the rest is waited out: sleeping is as exact as the kernel's
# timer slack, 50 µs, and a busy machine's scheduler let it be (prctl(2), PR_SET_TIMERSLACK).
_WAKE_EARLY_SECONDS = 1e-3


class Progress(NamedTuple):  # quicker to make than a dataclass: a step makes one for each sequence
    """What an engine says of a request after a step: the tokens that it made so far, and whether that was all.

    `error` says why a request ended early; "" when it did not.
    """

    index: int
    tokens: int
    finished: bool
    error: str = ""


class DrivenEngine(Protocol):
    """An engine that one thread adds to and steps."""

    def add(self, index: int, request: BenchRequest) -> None:
        """Take on a request, known by its index."""
        ...

    def step(self) -> Iterable[Progress]:
        """Go on; the requests that have more tokens now. May wait for the device."""
        ...

    def has_unfinished(self) -> bool: ...


@dataclass
class Record:
    """What happened to a request; times are in seconds from the beginning.

    `started` is its arrival, or when one of `max_concurrency` ended and made room for it; vLLM's client counts from
    there too. A token that an engine tells of together with others has their time.
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
    """A workload's records in its order, as far as requests were begun, and the seconds that it took.

    `interrupted`: a KeyboardInterrupt ended it early.
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
    """Give the engine each request when it has arrived, and step until all have ended.

    `requests` are in the order of their arrivals. At most `max_concurrency` are with the engine at a time.
    `on_finished` is told how many have ended. An interrupt gives what was measured until then.
    """
    waiting = deque(enumerate(requests))
    records: dict[int, Record] = {}
    most = len(requests) if max_concurrency is None else max_concurrency
    running, ended = 0, 0
    freed = 0.0  # when there was no place for another one for the last time
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
                record = records[one.index]
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
    """Sleep until nearly `moment`, in seconds from `begin`."""
    left = moment - (clock() - begin)
    if left > _WAKE_EARLY_SECONDS:
        sleep(left - _WAKE_EARLY_SECONDS)
