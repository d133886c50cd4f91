"""The measured times of a step on a mesh: of each rank, of its calls, and of what ranks exchange. All are seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RankCall:
    """The time of a call on one rank.

    rank      the index of the rank
    seconds   the time from its begin to its end there
    waits     the part of it in which the rank waits for other ranks. Only collectives wait
    """

    rank: int
    seconds: float
    waits: float = 0.0


@dataclass(frozen=True)
class Collective:
    """The exchange of the ranks of a mesh axis in a call.

    what    the names of its collectives
    axis    the mesh axis
    sent    the bytes that each rank must send at least
    floor   the time of these bytes at the bandwidth of the link; None if that is not known
    """

    what: str
    axis: str
    sent: int
    floor: float | None = None


@dataclass(frozen=True)
class RankStep:
    """The time of a step on one rank. The four parts add up to `seconds`.

    rank        the index of the rank, and its name, such as "rank 1 (tp=1)"
    stage       its pipeline stage
    seconds     the time from the begin of its first call, or of the first value that it receives, to the end of its
                last one
    computes    its time in calls that need no other rank
    moves       its time in collectives, and in transfers between stages, without waiting
    waits       its time of waiting for other ranks
    between     the rest: the host's time between calls
    waits_for   the index of another rank -> the part of `waits` in which that rank was the last to come
    """

    rank: int
    name: str
    stage: int
    seconds: float
    computes: float
    moves: float
    waits: float
    between: float
    waits_for: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Exchange:
    """Equal collectives of some ranks, or equal transfers from one stage to another. Times are means of a call.

    what    the names of the collectives, or "stage 0 to 1"
    axis    the mesh axis
    ranks   the ranks that take part
    calls   the number of calls in a step; of transfers, those to one rank
    sent    the bytes that a rank must send at least in a call, and `floor`, the time that these take; None if the
            bandwidth of the link is not known
    moves   the time of the rank that came last, which waits for no other
    waits   the longest wait of a rank
    last    the index of a rank -> the share of the calls to which it came last
    """

    what: str
    axis: str
    ranks: tuple[int, ...]
    calls: int
    sent: int
    floor: float | None
    moves: float
    waits: float
    last: Mapping[int, float]


@dataclass(frozen=True)
class MeshTime:
    """The measured time of a step on a mesh.

    mesh        the mesh, such as "pp=2 tp=2"
    measured    the time of a step as it is served: from its post until its tokens are read
    recorded    the time of a step whose calls are recorded, from the first begin to the last end on any rank
    steps       the number of recorded steps. The times are means of these steps
    link        the bandwidth between two devices in bytes a second; None if it is not known
    ranks       the time of each rank
    exchanges   what the ranks exchange
    """

    mesh: str
    measured: float
    recorded: float
    steps: int
    link: int | None
    ranks: tuple[RankStep, ...]
    exchanges: tuple[Exchange, ...]
