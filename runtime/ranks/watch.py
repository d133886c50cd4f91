"""The thread that watches the processes of a mesh, and ends all of them when one ends, stops or fails."""

import threading
from collections.abc import Callable, Mapping, Sequence

from ingot.ir.errors import RankError
from ingot.ir.mesh import Rank
from ingot.runtime.ranks.child import RankChild
from ingot.runtime.ranks.reports import BEAT_SECONDS, RankState, Reports
from ingot.runtime.ranks.seat import rank_text

_PERIOD_SECONDS = 0.1
# A process that is stopped this long counts as gone. A debugger, or a shell that stops all processes, is faster.
_STOPPED_SECONDS = 2.0
# A process that does not report for this long hangs. Loading a library holds Python's lock for a second or two.
_SILENT_SECONDS = 30.0
# How long the cause of a rank's broken connection may take to show.
_CAUSE_SECONDS = 2.5
_HINT = "start the engine again; the requests in flight are lost"


class RankWatch:
    """Watches the processes of the other ranks from the process of rank 0.

    area       the reports of all ranks
    ranks      all ranks of the mesh
    children   the processes, by the index of their rank
    fault      (attribute) the first fault; None while all is well
    on_fault   (attribute) called after a fault was recorded, often from the watching thread

    It counts its own periods instead of reading a clock: a machine that sleeps, or a shell that stops all processes
    and continues them, is no fault.
    """

    def __init__(self, area: Reports, ranks: Sequence[Rank], children: Mapping[int, RankChild]) -> None:
        self.fault: RankError | None = None
        self.on_fault: Callable[[], None] = lambda: None
        self._area, self._ranks, self._children = area, ranks, dict(children)
        self._stopped = dict.fromkeys(children, 0)
        self._silent = dict.fromkeys(children, 0)
        self._beats = dict.fromkeys(children, 0)
        self._lost = 0
        self._found, self._over = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="watch ranks", daemon=True).start()

    def stop(self) -> None:
        """Stop watching: the processes are about to end."""
        self._over.set()

    def wait(self, seconds: float) -> None:
        """Wait until a fault is found, at most this long."""
        self._found.wait(seconds)

    def end_all(self, fault: RankError) -> None:
        """Record the fault, unless there is an earlier one, and kill all processes."""
        with self._lock:
            if self.fault is None:
                self.fault = fault
        for child in self._children.values():
            child.kill()  # also ends a stopped process
        self._found.set()
        self._over.set()
        self.on_fault()

    def _run(self) -> None:
        while not self._over.wait(_PERIOD_SECONDS):
            if (fault := self._look()) is not None:
                self.end_all(fault)

    def _look(self) -> RankError | None:
        """Return the fault of a rank; None if there is none, or if its cause is not known yet."""
        lost: RankError | None = None
        for rank in self._ranks[1:]:
            ended = self._children[rank.index].ended()
            state = self._area.state(rank.index)
            if state is RankState.LOST:
                lost = self._failed(rank)
            elif state is RankState.FAILED:
                return self._failed(rank)
            elif (what := ended or self._hangs(rank.index)) is not None:
                return RankError(f"{self._name(rank)} {what}", hint=_HINT)
        # The connections of a rank broke, but the rank that is the cause may still look well.
        self._lost = self._lost + 1 if lost is not None else 0
        return lost if self._lost * _PERIOD_SECONDS > _CAUSE_SECONDS else None

    def _failed(self, rank: Rank) -> RankError:
        said = self._area.failure(rank.index)
        where, expected, hint = said["where"], said["expected"], said["hint"] or _HINT
        return RankError(f"{self._name(rank)} failed: {said['what']}", where=where, expected=expected, hint=hint)

    def _name(self, rank: Rank) -> str:
        return rank_text(rank) + self._children[rank.index].where

    def _hangs(self, rank: int) -> str | None:
        """Return what keeps a running process from its work; None if nothing does."""
        beats = self._area.beats(rank)
        self._silent[rank] = 0 if beats != self._beats[rank] else self._silent[rank] + 1
        self._beats[rank] = beats
        self._stopped[rank] = self._stopped[rank] + 1 if self._children[rank].stopped() else 0
        if self._stopped[rank] * _PERIOD_SECONDS >= _STOPPED_SECONDS:
            return f"is stopped (SIGSTOP) for {_STOPPED_SECONDS:.0f} seconds"
        if self._silent[rank] * _PERIOD_SECONDS >= max(_SILENT_SECONDS, 2 * BEAT_SECONDS):
            return f"does not respond for {_SILENT_SECONDS:.0f} seconds"
        return None
