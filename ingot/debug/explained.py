"""The result of `explain`: each call with its cost and the backends' claims, and where passes nearly applied."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ingot.debug.step_time.times import CallTime, StepTime
from ingot.debug.step_time.work import Work
from ingot.ir.artifact.backend_times import Decision
from ingot.ir.cache.summary import CacheSummary
from ingot.ir.ops.registry import Cost


@dataclass(frozen=True)
class Call:
    """A call of a lowered program; a call inside a region names the node of the region's call in `region`.

    `op` is the printed target. `layer` is None outside layers. `claims` maps each backend that was asked to the cost of
    its claim, or to its refusal; `decision` says how one of several was chosen. `seconds` is the median over the steps
    of the golden run, None if it was not timed. `time`, and the `work` that it is predicted from, are None for a call
    inside a region, and if the artifact is not for a GPU.
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


@dataclass(frozen=True)
class StepShape:
    """The step that costs are for: `tokens`, spread evenly over `sequences`, each with `context` cached positions at
    the end. `timed` are the tokens of the steps that were timed."""

    tokens: int
    sequences: int
    context: int
    timed: tuple[int, ...] = ()

    def pages(self, page_size: int) -> int:
        """Return the pages of all sequences together, each with whole pages of its own."""
        return self.sequences * math.ceil(self.context / page_size)


@dataclass(frozen=True)
class BucketCosts:
    """The calls of a bucket class in order, a region's calls after it; `time` is that of the whole step."""

    entry: str
    bucket: str
    step: StepShape
    calls: tuple[Call, ...]
    time: StepTime | None = None

    def total(self) -> Cost:
        """Return the cost of all calls. Regions count as they run: values inside one move no bytes."""
        return sum((Cost(call.flops, call.bytes) for call in self.calls if not call.region), Cost())

    def seconds(self) -> float | None:
        timed = [call.seconds for call in self.calls if call.seconds is not None]
        return sum(timed) if timed else None


_COSTS = TypeAdapter(BucketCosts)


@dataclass(frozen=True)
class NearMisses:
    """Places where a pass nearly applied, with one reason; `node` is the first."""

    count: int
    reason: str
    node: str


@dataclass(frozen=True)
class PassMisses:
    """The near misses of one run of a pass; `bucket` None for a pass that runs once for all classes."""

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
        """Return the explanation with only the calls that `wanted` selects."""
        kept = (replace(one, calls=tuple(filter(wanted, one.calls))) for one in self.buckets)
        return replace(self, buckets=tuple(kept))

    def by(self, key: Callable[[Call], float]) -> "Explained":
        """Return the explanation with the largest calls of each bucket class first; region calls sort separately."""
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
