"""Read the report's data from an artifact: passes with their programs, times, memory, and the backend of each node.

Only this module of the package opens files of the artifact. Data that a compile did not record is None or empty.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.cli.views.plan import read_plans
from ingot.debug.explain import explain
from ingot.debug.explained import BucketCosts, Explained
from ingot.ir.artifact.manifest import TIMINGS
from ingot.ir.cache.summary import CacheSummary
from ingot.ir.errors import ArtifactError
from ingot.report.memory import Resident, StepMemory, resident, step_memories
from ingot.report.step_times import DrawnStep, drawn_steps
from ingot.runtime.artifact import Artifact


@dataclass(frozen=True)
class Step:
    """One pass and its resulting program. `before` is the number of the step with its input program.

    The first step of an entry is the traced program, which no pass made: its `stage` is TRACED, its `before` None.
    `rewrites` are pairs of an anchor value and its replacements; `refusals` are pairs of a node and a reason.
    `seconds`, and `peak_bytes`, the process's peak memory, are None if they were not recorded.
    """

    name: str
    entry: str
    bucket: str | None
    stage: str
    text: str
    before: int | None = None
    options: Mapping[str, Any] | None = None
    numerics: str | None = None
    matches: int = 0
    rewrites: tuple[tuple[str, tuple[str, ...]], ...] = ()
    refusals: tuple[tuple[str, str], ...] = ()
    op_count_diff: Mapping[str, int] | None = None
    seconds: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Times:
    """Seconds of the compile's phases, and of each executable by id; `cached` are those from the cache. Empty if none
    were recorded."""

    phases: Mapping[str, float]
    executables: Mapping[str, float]
    cached: tuple[str, ...]


@dataclass(frozen=True)
class NodeRow:
    """The data of one call. `flops`, `bytes` and `seconds` are per step, None if unknown.

    `key` is its name on the page: a call in a region has the region's name first, as in `r1/linear_3`. `region` is the
    node of the region's call. `candidates` are the backends that would compute it, with costs; `refusals` are the
    backends that would not, with reasons.
    """

    key: str
    name: str
    op: str
    layer: int | None
    backend: str
    region: str = ""
    flops: int | None = None
    bytes: int | None = None
    seconds: float | None = None
    candidates: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeTable:
    """The calls of one bucket class after the step with the number `step`. `basis` describes the model step that the
    costs are for; "" if there are none."""

    step: int
    basis: str
    rows: tuple[NodeRow, ...]


@dataclass(frozen=True)
class Report:
    """The data of the page. `start_up` holds seconds by part, empty if not measured; `step_times` exist only for a
    GPU."""

    title: str
    build_id: str
    target: str
    model: Mapping[str, Any]
    steps: tuple[Step, ...]
    times: Times
    resident: Resident
    caches: CacheSummary
    memories: tuple[StepMemory, ...]
    nodes: tuple[NodeTable, ...]
    start_up: Mapping[str, float]
    step_times: tuple[DrawnStep, ...] = ()


def read_report(artifact: Artifact, start_up: Mapping[str, float] | None = None) -> Report:
    """Return the page's data from an open artifact. Raises ArtifactError."""
    manifest, plans = artifact.manifest, read_plans(artifact)
    steps, explained = read_steps(artifact), explain(artifact.folder)
    nodes = node_tables(explained, steps)
    return Report(
        title=manifest.name,
        build_id=artifact.build_id,
        target=str(manifest.target.get("name")),
        model=manifest.model,
        steps=steps,
        times=_times(artifact),
        resident=resident(plans),
        caches=explained.caches,
        memories=step_memories(plans),
        nodes=nodes,
        start_up=start_up or {},
        step_times=drawn_steps(explained.buckets, [table.step for table in nodes], [table.basis for table in nodes]),
    )


def read_steps(artifact: Artifact) -> tuple[Step, ...]:
    """Return the traced program of every entry, and each pass in running order. Raises ArtifactError."""
    trace = artifact.trace
    runs = [
        Step(
            name=one.name,
            entry=one.entry,
            bucket=one.bucket,
            stage=one.stage,
            text=one.after_text,
            options=one.options,
            numerics=one.numerics.value,
            matches=one.matches,
            rewrites=tuple((rewrite.anchor, rewrite.made) for rewrite in one.rewrites),
            refusals=tuple((refusal.node, refusal.reason) for refusal in one.refusals),
            op_count_diff=one.op_count_diff,
            seconds=one.seconds,
            peak_bytes=one.peak_bytes,
        )
        for one in trace
    ]
    return linked({run.entry: trace.traced_text(run.entry) for run in runs}, runs)


def linked(traced: Mapping[str, str], runs: Iterable[Step]) -> tuple[Step, ...]:
    """Return the passes after the traced programs of their entries. Each pass refers to the step with its input
    program: the last one on its bucket class, or on all classes."""
    made: list[Step] = []
    latest: dict[tuple[str, str | None], int] = {}
    for run in runs:
        if (run.entry, None) not in latest:
            latest[run.entry, None] = len(made)
            made.append(Step("traced", run.entry, None, "TRACED", traced[run.entry]))
        before = latest.get((run.entry, run.bucket), latest[run.entry, None])
        latest[run.entry, run.bucket] = len(made)
        made.append(replace(run, before=before))
    return tuple(made)


def _times(artifact: Artifact) -> Times:
    """Return the times in timings.json other than those of passes. Raises ArtifactError."""
    timings: Any = artifact.read_timings() or {}
    try:
        return Times(
            phases={name: float(value) for name, value in timings.get("phases", {}).items()},
            executables={name: float(value) for name, value in timings.get("executables", {}).items()},
            cached=tuple(timings.get("cached", ())),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise ArtifactError(f"{TIMINGS} is malformed: {error}", where=str(artifact.folder)) from error


def node_tables(explained: Explained, steps: Sequence[Step]) -> tuple[NodeTable, ...]:
    """Return the calls of each bucket class's last program, a region's calls after it: costs, candidates, refusals."""
    return tuple(_node_table(one, steps) for one in explained.buckets)


def _node_table(costs: BucketCosts, steps: Sequence[Step]) -> NodeTable:
    last = max(at for at, step in enumerate(steps) if (step.entry, step.bucket) == (costs.entry, costs.bucket))
    bodies = {call.name: call.op.removeprefix("region.") for call in costs.calls}
    step = costs.step
    sequences = "one sequence" if step.sequences == 1 else f"{step.sequences} sequences"
    # The steps of the golden run are smaller than the steps that the costs are for.
    timed = f"; seconds are of {', '.join(map(str, sorted(set(step.timed))))} tokens" if step.timed else ""
    return NodeTable(
        last,
        f"a step of {step.tokens} tokens, {sequences} of {step.context} positions{timed}",
        tuple(
            NodeRow(
                key=f"{bodies[call.region]}/{call.name}" if call.region else call.name,
                name=call.name,
                op=call.op,
                layer=call.layer,
                backend=call.backend,
                region=call.region,
                flops=call.flops,
                bytes=call.bytes,
                seconds=call.seconds,
                candidates=tuple(
                    f"{name}: {cost:.4g}" for name, cost in call.claims.items() if not isinstance(cost, str)
                ),
                refusals=tuple(f"{name}: {reason}" for name, reason in call.claims.items() if isinstance(reason, str)),
            )
            for call in costs.calls
        ),
    )
