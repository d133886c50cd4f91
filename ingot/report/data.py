"""Read the data of `ingot report` from an artifact: passes and programs, times, memory, and the backend of each node.

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
    """A program of the compile as the report shows it, with the pass that made it. `before` is the number of the step
    with the pass's input program.

    The first step of an entry is the traced program, which no pass made: its `stage` is TRACED, its `before` None.
    `rewrites` are pairs of the value at which a rewrite happened and the values that it made. `refusals` are pairs of a
    node and a reason. `seconds` is the time of the pass, and `peak_bytes` the process's peak memory; None if not
    recorded.
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
    """Seconds of the compile's phases, and of each executable by id. `cached` are the ids of executables that came from
    the cache. All are empty if no times were recorded."""

    phases: Mapping[str, float]
    executables: Mapping[str, float]
    cached: tuple[str, ...]


@dataclass(frozen=True)
class NodeRow:
    """One call in the report's table of nodes. `flops`, `bytes` and `seconds` are per step, None if unknown.

    `key` is its name on the page: a call in a region has the region's name first, as in `r1/linear_3`. `region` is the
    node that calls the region, empty outside regions. `candidates` are the backends that claim the call, with costs;
    `refusals` are the other backends, with reasons.
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
    """The calls of one bucket class, as rows. `step` is the number of the report's step that made their program.
    `basis` describes the model step that the costs are for."""

    step: int
    basis: str
    rows: tuple[NodeRow, ...]


@dataclass(frozen=True)
class Report:
    """All data of the report's page. `start_up` has the seconds of each part of a start, empty if not measured.
    `step_times` is empty unless the artifact is for a GPU."""

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
    """Read the report's data from an open artifact. `start_up` has the measured seconds of each part of a start. Raises
    ArtifactError if a file is malformed."""
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
    """Return the traced program of every entry and the program after each pass, in running order. Raises ArtifactError
    for a malformed trace."""
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
    """Return the steps `runs`, with a step for the traced program before the first run of each entry. `traced` has the
    programs' texts by entry. Each run refers by number to the step with its input program: the last one for its bucket
    class, or for all classes."""
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
    """Return the times of phases and executables in timings.json. Raises ArtifactError if they are malformed."""
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
    """Return a table for each bucket class with the calls of its last program: costs, candidates, refusals. The calls
    inside a region follow the region's call. `steps` are the report's steps."""
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
