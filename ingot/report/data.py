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
from ingot.runtime.loading.artifact import Artifact


@dataclass(frozen=True)
class Step:
    """A program of the compile as the report shows it, and the pass that made it. The report numbers these steps.

    The first step of an entry (a program of the model) is its traced program, which no pass made. Its `stage` is
    TRACED.

    - `before`: the number of the step with the program that the pass received; None for a traced program
    - `rewrites`: pairs for each rewrite of the pass: the value at which it happened, and the new values
    - `refusals`: pairs of a node and the reason why the pass did not apply there
    - `seconds`: the time of the pass; None if not recorded
    - `peak_bytes`: the peak memory of the process; None if not recorded
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
    """The seconds of each phase of the compile by name, and of compiling each executable by id.

    `cached` are the ids of executables that came from the compile cache. All fields are empty if no times were
    recorded.
    """

    phases: Mapping[str, float]
    executables: Mapping[str, float]
    cached: tuple[str, ...]


@dataclass(frozen=True)
class NodeRow:
    """A call in the report's table of nodes. `flops`, `bytes` and `seconds` are for one step, or None if unknown.

    `key` identifies the call on the page. In a region (calls compiled together), it begins with the region's name, as
    in "r1/linear_3". `region` is the node that calls the region, or "" outside regions. `candidates` are texts
    "BACKEND: COST" for backends that can compute the call. `refusals` are texts "BACKEND: REASON" for backends that
    cannot.
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
    """The calls of the last program of one bucket class (a range of step sizes).

    `step` is the number of the report's step with this program. `basis` describes the model step that costs are
    computed for, such as "a step of 512 tokens".
    """

    step: int
    basis: str
    rows: tuple[NodeRow, ...]


@dataclass(frozen=True)
class Report:
    """All data of the report's page.

    `start_up` has the seconds of each part of a start of serving. It is empty if not measured. `step_times` is empty
    unless the artifact is for a GPU.
    """

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
    """Read the data of the report from an open artifact.

    `start_up` has the measured seconds of each part of a start of serving, or is None if not measured. Raises
    ArtifactError if a file is malformed.
    """
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
    """Return the programs of a compile in the order in which they were made.

    They are the traced program of each entry (a program of the model), and the program after each pass. Raises
    ArtifactError if the artifact's trace is malformed.
    """
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
    """Add the traced programs to the runs of passes, set the field `before` of each run, and return all steps in order.

    `runs` are the runs of passes in order. `traced` maps an entry (a program of the model) to the text of its traced
    program. This program becomes a step before the first run of the entry.

    `before` is the number of the last step for this bucket class (a range of step sizes). If the class has no step yet,
    it is the last step for all classes.
    """
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
    """Return the times of the compile's phases and executables, from timings.json.

    Raises ArtifactError if that file is malformed.
    """
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
    """Return a table of calls for each bucket class (a range of step sizes).

    A table lists the calls of the class's last program, with their costs and the backends that can or cannot compute
    them. Calls inside a region follow the region's call. `steps` are the report's steps.
    """
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
