"""The result of `ingot explain`: each call with its cost and the backends' claims, and the near misses of passes."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ingot.debug.mesh_time.times import Collective, MeshTime, RankCall
from ingot.debug.step_time.times import CallTime, StepTime
from ingot.debug.step_time.work import Work
from ingot.ir.artifact.backend_times import Decision
from ingot.ir.cache.summary import CacheSummary
from ingot.ir.ops.registry import Cost


@dataclass(frozen=True)
class Call:
    """A call of a lowered program with its cost.

    op         the name of the op or region that it calls
    layer      its decoder layer; None outside layers
    origin     its source line in the model definition
    backend    the backend that computes it
    claims     by backend: the cost that the backend offered for the call, or its reason to refuse the call
    decision   how the backend was chosen among several
    seconds    the median time in the golden run, a short run at the end of the compile; None if not timed
    region     the node of the region (a group of calls compiled together) around it; "" if none
    time       the predicted and measured times on a GPU
    work       the facts from which the time is predicted
    stages     on a mesh, the pipeline stages that run it
    ranks      on a mesh, the time on each rank that runs it
    collective on a mesh, what the ranks exchange in it; None if it needs no other rank

    `time` and `work` are None for a call inside a region. They are also None if the artifact is not for a GPU. The last
    three are empty or None if the step was not measured on a mesh. A call inside a region has only `stages` of them.
    """

    name: str
    op: str
    layer: int | None
    origin: str
    flops: int
    bytes: int
    backend: str
    claims: dict[str, float | str]
    decision: Decision | None = None
    seconds: float | None = None
    region: str = ""
    time: CallTime | None = None
    work: Work | None = None
    stages: tuple[int, ...] = ()
    ranks: tuple[RankCall, ...] = ()
    collective: Collective | None = None

    @property
    def slowest(self) -> RankCall | None:
        """The rank of a mesh on which the call takes longest; None if it was not measured."""
        return max(self.ranks, key=lambda one: one.seconds, default=None)


@dataclass(frozen=True)
class StepShape:
    """The shape of the step that costs are computed for.

    Its `tokens` are spread evenly over `sequences`. Each sequence has `context` cached positions after the step. The
    golden run, at the end of the compile, has timed some steps. `timed` has their numbers of tokens.
    """

    tokens: int
    sequences: int
    context: int
    timed: tuple[int, ...] = ()

    def pages(self, page_size: int) -> int:
        """Return the number of KV cache pages of all sequences together.

        Sequences share no pages, so the last page of each may be partly filled.
        """
        return self.sequences * math.ceil(self.context / page_size)


@dataclass(frozen=True)
class BucketCosts:
    """The costs of a step of one bucket class (a range of step sizes that share a lowering).

    `calls` are in program order. Calls inside a region (a group of calls compiled together) come after the region's
    call. `time` is the time of the whole step. It is None if the artifact is not for a GPU. `mesh` is the measured time
    on the ranks of a mesh. It is None if the step was not measured on a mesh.
    """

    entry: str
    bucket: str
    step: StepShape
    calls: tuple[Call, ...]
    time: StepTime | None = None
    mesh: MeshTime | None = None

    def total(self) -> Cost:
        """Return the sum of the costs of all calls.

        Calls inside a region are left out, since the region's call has their cost. Values that stay inside a region
        cost no memory traffic.
        """
        return sum((Cost(call.flops, call.bytes) for call in self.calls if not call.region), Cost())

    def by_stage(self) -> dict[int, tuple[Call, ...]]:
        """Return the calls of each pipeline stage. A call that several stages run has in each the times of its ranks.

        The step was measured on a mesh.
        """
        assert self.mesh is not None
        found: dict[int, tuple[Call, ...]] = {}
        for stage in sorted({one.stage for one in self.mesh.ranks}):
            own = {one.rank for one in self.mesh.ranks if one.stage == stage}
            found[stage] = tuple(
                replace(call, ranks=tuple(one for one in call.ranks if one.rank in own))
                for call in self.calls
                if stage in call.stages
            )
        return found

    def seconds(self) -> float | None:
        timed = [call.seconds for call in self.calls if call.seconds is not None]
        return sum(timed) if timed else None


_COSTS = TypeAdapter(BucketCosts)


@dataclass(frozen=True)
class NearMisses:
    """Nodes where a pass nearly applied, but did not for one `reason`.

    `count` is their number, and `node` the first of them.
    """

    count: int
    reason: str
    node: str


@dataclass(frozen=True)
class PassMisses:
    """One run of a pass on an entry (such as `main` or a draft model).

    `matches` is the number of rewrites that the pass made. `misses` are the nodes where it nearly applied. `bucket` is
    the bucket class (a range of step sizes). It is None for a pass that runs once for all classes.
    """

    name: str
    entry: str
    bucket: str | None
    matches: int
    misses: tuple[NearMisses, ...]


@dataclass(frozen=True)
class Explained:
    artifact: Path
    build_id: str
    buckets: tuple[BucketCosts, ...]
    passes: tuple[PassMisses, ...]
    caches: CacheSummary

    def of(self, wanted: Callable[[Call], bool]) -> "Explained":
        """Return a copy with only those calls for which `wanted` returns True."""
        kept = (replace(one, calls=tuple(filter(wanted, one.calls))) for one in self.buckets)
        return replace(self, buckets=tuple(kept))

    def by(self, key: Callable[[Call], float]) -> "Explained":
        """Return a copy in which the calls of each bucket class are sorted by `key`, largest value first."""
        ordered = (replace(one, calls=tuple(sorted(one.calls, key=key, reverse=True))) for one in self.buckets)
        return replace(self, buckets=tuple(ordered))

    def to_json(self) -> dict[str, Any]:
        return {
            "artifact": str(self.artifact),
            "build_id": self.build_id,
            "buckets": [
                {**_COSTS.dump_python(one, mode="json"), "total": asdict(one.total()), "seconds": one.seconds()}
                for one in self.buckets
            ],
            "passes": [asdict(one) for one in self.passes],
            "caches": self.caches.to_json(),
        }
