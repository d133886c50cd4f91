"""The result of `ingot explain`: each call with its cost and the backends' claims, and the near misses of passes."""

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
    """A call of a lowered program, with its cost. For a call inside a region, `region` names the node that calls the
    region; otherwise it is empty.

    `op` is the printed target. `layer` is None outside layers. `claims` maps each backend that made or refused a claim
    to its cost or its refusal. `decision` says how the backend was chosen among several. `seconds` is the median over
    the steps of the golden run, None if it was not timed. `time` is the predicted and measured time on a GPU, and
    `work` is what the prediction is made from. Both are None for a call inside a region, and for an artifact that is
    not for a GPU.
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
    """The step that costs are for: `tokens` spread evenly over `sequences`, each with `context` cached positions after
    the step. `timed` are the token counts of the steps that the golden run timed."""

    tokens: int
    sequences: int
    context: int
    timed: tuple[int, ...] = ()

    def pages(self, page_size: int) -> int:
        """Return the KV cache pages of all sequences together; each sequence has whole pages of its own."""
        return self.sequences * math.ceil(self.context / page_size)


@dataclass(frozen=True)
class BucketCosts:
    """The calls of a bucket class in program order; the calls inside a region follow the call of the region. `time` is
    that of the whole step, None without a GPU."""

    entry: str
    bucket: str
    step: StepShape
    calls: tuple[Call, ...]
    time: StepTime | None = None

    def total(self) -> Cost:
        """Return the summed cost of all calls. A region counts as one call, since values inside it are not written to
        memory."""
        return sum((Cost(call.flops, call.bytes) for call in self.calls if not call.region), Cost())

    def seconds(self) -> float | None:
        timed = [call.seconds for call in self.calls if call.seconds is not None]
        return sum(timed) if timed else None


_COSTS = TypeAdapter(BucketCosts)


@dataclass(frozen=True)
class NearMisses:
    """Nodes at which a pass almost applied: how many were refused for one `reason`, and the first `node` of them."""

    count: int
    reason: str
    node: str


@dataclass(frozen=True)
class PassMisses:
    """One run of a pass: the number of its rewrites (`matches`) and the rewrites that it refused. `bucket` is None for
    a pass that runs once for all bucket classes."""

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
        """Return a copy that keeps only the calls for which `wanted` is true."""
        kept = (replace(one, calls=tuple(filter(wanted, one.calls))) for one in self.buckets)
        return replace(self, buckets=tuple(kept))

    def by(self, key: Callable[[Call], float]) -> "Explained":
        """Return a copy with the calls of each bucket class sorted by `key`, largest first."""
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
