"""Compute the times of a step on a mesh from the spans that its ranks have recorded.

A rank's time in a collective includes its waiting for ranks that come later. The rank that comes last waits for none,
so the smallest time of a rank is the time of moving. The rest of each other time is waiting. A value that a stage
receives is waited for until the other stage begins to send it.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ingot.debug.mesh_time.run import MeshRun
from ingot.debug.mesh_time.times import Collective, Exchange, MeshTime, RankCall, RankStep
from ingot.ir.errors import InternalError
from ingot.ir.mesh import STAGES, Mesh, Rank, groups, mesh_text, ranks
from ingot.runtime.ranks.measuring.recorder import CALL, RECEIVE, SEND, CallSpan
from ingot.runtime.ranks.seat import rank_text


@dataclass(frozen=True)
class MeshCalls:
    """The calls of a step.

    stages        the names of the calls that the ranks of each pipeline stage run, by instruction
    collectives   what the ranks exchange in a call, by its name
    link          the bandwidth between two devices in bytes a second; None if it is not known
    """

    stages: Sequence[Sequence[str]]
    collectives: Mapping[str, Collective]
    link: int | None = None


def evaluate(run: MeshRun, mesh: Mesh, calls: MeshCalls) -> tuple[MeshTime, dict[str, tuple[RankCall, ...]]]:
    """Return the time of a step, and that of each call on the ranks that run it, by its name.

    The faster half of the recorded steps counts, so that other work of the machine does not. All times are means of
    these steps. Raises InternalError if a rank has not recorded each of its calls and transfers once in every step.
    """
    steps = _faster_half(run.spans)
    sums = _Sums(mesh, calls)
    for step in steps:
        sums.add(step)
    count = len(steps)
    of_ranks = tuple(sums.rank_step(rank, count) for rank in ranks(mesh))
    of_calls: dict[str, list[RankCall]] = {}
    for (rank, name), seconds in sums.seconds.items():
        of_calls.setdefault(name, []).append(RankCall(rank, seconds / count, sums.waits[rank, name] / count))
    exchanges = tuple(one.exchange(count, calls.link) for one in sums.exchanges.values())
    whole = statistics.fmean(_length(step) for step in steps)
    measured = statistics.median(run.seconds)
    time = MeshTime(mesh_text(mesh), measured, whole, count, calls.link, of_ranks, exchanges)
    return time, {name: tuple(sorted(found, key=lambda one: one.rank)) for name, found in of_calls.items()}


_PARTS = ("computes", "moves", "waits")
# The spans of one step, by the index of the rank.
_Step = Mapping[int, Sequence[CallSpan]]


def _faster_half(spans: Mapping[int, Sequence[Sequence[CallSpan]]]) -> list[_Step]:
    if len(counts := {len(steps) for steps in spans.values()}) != 1:
        raise InternalError(
            f"ranks have recorded {' and '.join(map(str, sorted(counts)))} steps", expected="equally many on all ranks"
        )
    steps: list[_Step] = [dict(zip(spans, step, strict=True)) for step in zip(*spans.values(), strict=True)]
    return sorted(steps, key=_length)[: -(-len(steps) // 2)]


def _length(step: _Step) -> float:
    """Return the seconds from the first begin to the last end on any rank."""
    found = [span for spans in step.values() for span in spans]
    return (max(span.end for span in found) - min(span.begin for span in found)) * 1e-9


@dataclass
class _Exchanged:
    """The sums of equal collectives, or of equal transfers from one stage to another, over all steps.

    ranks    the ranks that take part
    groups   the number of groups of ranks that each make these calls
    calls    the number of calls of all groups in all steps
    """

    what: str
    axis: str
    sent: int
    ranks: tuple[int, ...]
    groups: int
    calls: int = 0
    moves: float = 0.0
    waits: float = 0.0
    last: Counter[int] = field(default_factory=Counter)

    def add(self, moves: float, waits: float, last: int) -> None:
        self.calls, self.moves, self.waits = self.calls + 1, self.moves + moves, self.waits + waits
        self.last[last] += 1

    def exchange(self, steps: int, link: int | None) -> Exchange:
        return Exchange(
            self.what,
            self.axis,
            self.ranks,
            self.calls // steps // self.groups,
            self.sent,
            None if link is None else self.sent / link,
            self.moves / self.calls,
            self.waits / self.calls,
            {rank: count / self.calls for rank, count in sorted(self.last.items())},
        )


class _Sums:
    """Sums over the steps of a mesh.

    seconds     (rank, call) -> its seconds, and `waits` those of waiting
    parts       rank -> the parts of its time
    waits_for   rank -> another rank -> the seconds for which that one is waited for
    exchanges   what ranks exchange, by kind
    """

    def __init__(self, mesh: Mesh, calls: MeshCalls) -> None:
        self._mesh, self._calls, self._ranks = mesh, calls, ranks(mesh)
        self.seconds: defaultdict[tuple[int, str], float] = defaultdict(float)
        self.waits: defaultdict[tuple[int, str], float] = defaultdict(float)
        self.parts = {rank.index: dict.fromkeys(("seconds", *_PARTS), 0.0) for rank in self._ranks}
        self.waits_for: dict[int, dict[int, float]] = {rank.index: defaultdict(float) for rank in self._ranks}
        self.exchanges: dict[tuple[object, ...], _Exchanged] = {}

    def add(self, step: _Step) -> None:
        """Add the spans of a step."""
        for rank in self._ranks:
            self._add_own(rank, step[rank.index])
        for name, one in self._calls.collectives.items():
            for members in groups(self._mesh, one.axis):
                if name in self._calls.stages[self._ranks[members[0]].stage]:
                    self._add_collective(name, one, members, step)
        for members in groups(self._mesh, STAGES) if STAGES in self._mesh else ():
            for place, source in enumerate(members):
                for receiver in members:
                    self._add_transfers(place, source, receiver, step)

    def rank_step(self, rank: Rank, steps: int) -> RankStep:
        """Return the time of a rank: the mean of so many steps."""
        mean = {name: seconds / steps for name, seconds in self.parts[rank.index].items()}
        waits_for = {other: seconds / steps for other, seconds in sorted(self.waits_for[rank.index].items())}
        between = mean["seconds"] - sum(mean[name] for name in _PARTS)
        return RankStep(rank.index, rank_text(rank), rank.stage, **mean, between=between, waits_for=waits_for)

    def _add_own(self, rank: Rank, spans: Sequence[CallSpan]) -> None:
        """Add what a rank does without others."""
        names, parts = self._calls.stages[rank.stage], self.parts[rank.index]
        if sorted(span.number for span in spans if span.kind == CALL) != list(range(len(names))):
            raise InternalError(
                f"{rank_text(rank)} has recorded {sum(span.kind == CALL for span in spans)} calls of a step",
                expected=f"each of its {len(names)} calls once",
            )
        parts["seconds"] += (max(span.end for span in spans) - min(span.begin for span in spans)) * 1e-9
        for span in spans:
            if span.kind == CALL:
                self.seconds[rank.index, names[span.number]] += span.seconds
            if span.kind == SEND:
                parts["moves"] += span.seconds
            elif span.kind == CALL and names[span.number] not in self._calls.collectives:
                parts["computes"] += span.seconds

    def _add_collective(self, name: str, one: Collective, members: Sequence[int], step: _Step) -> None:
        number = self._calls.stages[self._ranks[members[0]].stage].index(name)
        taken = {
            rank: next(span.seconds for span in step[rank] if span.kind == CALL and span.number == number)
            for rank in members
        }
        last = min(taken, key=lambda rank: taken[rank])
        moves = taken[last]
        for rank, seconds in taken.items():
            self._wait(rank, last, seconds - moves, moves)
            self.waits[rank, name] += seconds - moves
        made = _Exchanged(one.what, one.axis, one.sent, tuple(members), 1)
        key = (one.what, one.sent, members)
        self.exchanges.setdefault(key, made).add(moves, max(taken.values()) - moves, last)

    def _add_transfers(self, place: int, source: int, rank: int, step: _Step) -> None:
        """Add the values that a rank receives from the rank `source` of the stage `place`.

        The n-th value that it receives is the n-th that the other one sends.
        """
        stage = self._ranks[rank].stage
        received = [span for span in step[rank] if span.kind == RECEIVE and span.number == place]
        sent = [span for span in step[source] if span.kind == SEND and span.number == stage]
        if len(received) != len(sent):
            raise InternalError(
                f"rank {rank} has received {len(received)} values of a step, and rank {source} has sent {len(sent)}",
                expected="each value sent and received once",
            )
        for into, out in zip(received, sent, strict=True):
            waits = min(max(0, out.begin - into.begin), into.end - into.begin) * 1e-9
            moves = into.seconds - waits
            self._wait(rank, source, waits, moves)
            both = tuple(one.index for one in self._ranks if one.stage in (place, stage))
            what = f"stage {place} to {stage}"
            made = _Exchanged(what, STAGES, into.size, both, len(both) // 2)
            last = source if out.begin > into.begin else rank
            self.exchanges.setdefault((what, into.size), made).add(moves, waits, last)

    def _wait(self, rank: int, other: int, waits: float, moves: float) -> None:
        """Add the time in which a rank waits for another one, and the time of moving after that."""
        self.parts[rank]["waits"] += waits
        self.parts[rank]["moves"] += moves
        if waits:
            self.waits_for[rank][other] += waits
