"""Explain an artifact: the cost and the candidate backends of each call, and the calls that passes did not rewrite."""

import operator
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from torch import fx

from ingot.debug.explained import BucketCosts, Call, Explained, NearMisses, PassMisses, StepShape
from ingot.debug.requested_step import RequestedStep, limits_of, serving, step_sizes
from ingot.debug.step_time.clock import StepClock
from ingot.ir.artifact.backend_times import Decision
from ingot.ir.artifact.manifest import TIMINGS
from ingot.ir.artifact.record import Refusal
from ingot.ir.artifact.refusals import RefusalTable
from ingot.ir.artifact.trace import trace_name
from ingot.ir.artifact.tuning import Choice as TileChoice
from ingot.ir.cache.summary import CacheSummary
from ingot.ir.costs import call_cost
from ingot.ir.errors import ArtifactError, OptionError
from ingot.ir.json_text import dump_json
from ingot.ir.origin import in_later_layer, layer_of
from ingot.ir.parse import parse_programs
from ingot.ir.plugins import load_user_ops
from ingot.ir.program import Program, RegionCall, target_name
from ingot.runtime.loading.artifact import Artifact, open_artifact
from ingot.runtime.loading.plan_file import read_plan_file


def explain(
    path: str | Path, requested: RequestedStep | None = None, *, measure: bool = False, trace: Path | None = None
) -> Explained:
    """Report the costs of an artifact's calls, and the decisions of its passes.

    `requested` is the shape of the step that costs are computed for. By default, each bucket class (a range of step
    sizes) gets its largest step. Only a class with large prefill steps gets a step of 512 tokens instead. With
    `measure`, the step runs on this machine's GPU, or on all ranks of a mesh. `trace` is a file to write a profiler
    trace of that run to. Weights and machine code are only opened to measure.

    Raises ArtifactError for a malformed artifact. Raises OptionError for an impossible step. Raises TargetError if the
    step cannot run here. Raises RankError if a rank of a mesh ends or fails.
    """
    requested = requested or RequestedStep()
    artifact = open_artifact(path)
    limits = limits_of(artifact)
    requested.check(limits)
    load_user_ops()
    buckets = []
    choices = _read(artifact, "choices.json", _CHOICES)
    times = _instruction_times(artifact)
    mesh_clock = None
    if measure:
        from ingot.debug.mesh_time.clock import MeshClock

        mesh_clock = MeshClock.of(artifact, trace)
    clock = StepClock.of(artifact, measure=measure and mesh_clock is None, trace=trace)
    programs = list(parse_programs(artifact.read_text("program.ir")))
    for program in programs:
        assert program.bucket is not None
        name = trace_name(program.name, program.bucket.name)
        timed = times.get(name, _Times(tokens=(), seconds=()))
        step = requested.step(program.bucket, limits, timed.tokens) if requested.in_class(program.bucket) else None
        classes = [one.bucket for one in programs if one.name == program.name and one.bucket is not None]
        if step is not None and serving(step, classes) == program.bucket:
            choice = choices.get(name, _Choice())
            calls = tuple(_calls(program, artifact, step, choice, timed.seconds))
            costs = BucketCosts(program.name, program.bucket.name, step, calls)
            if clock is not None:
                costs = clock.timed(costs, program, choice.tiles)
            if mesh_clock is not None and program.name == "main":
                costs = mesh_clock.timed(costs, program)
            buckets.append(costs)
    if not buckets:
        raise OptionError(
            f"no bucket class has steps of {requested.tokens} tokens", where="--step", expected="T, a step's tokens"
        )
    caches = CacheSummary.of(read_plan_file(artifact).of(0))
    return Explained(artifact.folder, artifact.build_id, tuple(buckets), tuple(_passes(artifact)), caches)


# Schemas of the artifact's files.


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)  # fields that are not listed are ignored


class _Choice(_Record):
    candidates: dict[str, dict[str, float]] = {}
    contests: dict[str, Decision] = {}
    tiles: dict[str, tuple[TileChoice, ...]] = {}
    refusals: RefusalTable = RefusalTable()


class _Times(_Record):
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]


class _Timings(_Record):
    instructions: dict[str, _Times] = {}


_CHOICES = TypeAdapter(dict[str, _Choice])


def _read(artifact: Artifact, relpath: str, schema: TypeAdapter[Any]) -> Any:
    return _validated(schema, artifact.read_text(relpath), relpath)


def _validated(schema: TypeAdapter[Any], text: str | bytes, relpath: str) -> Any:
    try:
        return schema.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part)[:80] for part in first["loc"]) or "the whole"
        raise ArtifactError(
            f"{relpath} is malformed: {place}: {first['msg']}", where=relpath, hint="compile the model again"
        ) from None


def _instruction_times(artifact: Artifact) -> Mapping[str, _Times]:
    """Return the times of all instructions in the golden run, by bucket class (a range of step sizes).

    The golden run is a short run at the end of the compile. The mapping is empty if it was not timed.
    """
    timings = artifact.read_timings()
    return {} if timings is None else dict(_validated(TypeAdapter(_Timings), dump_json(timings), TIMINGS).instructions)


# Calls.


def _calls(
    program: Program, artifact: Artifact, step: StepShape, choice: _Choice, seconds: tuple[float, ...]
) -> Iterator[Call]:
    sizes = step_sizes(step, program, limits_of(artifact).page_size)
    refused: dict[str, dict[str, str]] = {}
    for refusal in choice.refusals.refusals():
        backend, _, reason = refusal.reason.partition(": ")
        refused.setdefault(refusal.node, {})[backend] = reason
    # The plan has an instruction for each call, except those that only take one of several results.
    nodes = [node for node in program.calls() if node.target is not operator.getitem]
    if seconds and len(seconds) != len(nodes):
        raise ArtifactError(
            f"{TIMINGS} times {len(seconds)} instructions", where="instructions", expected=f"{len(nodes)}, the calls"
        )

    def call(node: fx.Node, one: Program, **more: Any) -> Call:
        cost, origin = call_cost(node, one, sizes), str(node.meta.get("origin", ""))
        claims: dict[str, float | str] = {**choice.candidates.get(node.name, {}), **refused.get(node.name, {})}
        facts = {"backend": node.meta.get("backend", ""), "layer": layer_of(origin), "origin": origin, **more}
        facts["decision"] = choice.contests.get(node.name)
        return Call(node.name, target_name(node.target), flops=cost.flops, bytes=cost.bytes, claims=claims, **facts)

    firsts: dict[str, int | None] = {}  # by region: the layer of its first call, whose origins its body has
    for index, node in enumerate(nodes):
        made = call(node, program, seconds=seconds[index] if seconds else None)
        yield made
        if isinstance(node.target, RegionCall):
            first = firsts.setdefault(node.target.name, made.layer)
            away = (made.layer or 0) - (first or 0)
            body = program.regions[node.target.name].body
            for inner in body.calls():
                if inner.target is not operator.getitem:
                    # Equal regions share one body, which has the origins of the first one.
                    origin = in_later_layer(str(inner.meta.get("origin", "")), away)
                    facts = {
                        "origin": origin,
                        "layer": layer_of(origin),
                        "backend": made.backend,
                        "region": node.name,
                    }
                    yield call(inner, body, **facts)


# Passes.


def _passes(artifact: Artifact) -> Iterator[PassMisses]:
    """Yield, for each run of a pass, how often it applied, and why it did not apply elsewhere.

    Equal reasons are grouped. Yields nothing if the artifact has no trace of its compile.
    """
    for run in artifact.trace if artifact.has_trace else ():
        groups: dict[str, list[Refusal]] = {}
        for refusal in run.refusals:
            groups.setdefault(_alike(refusal.reason), []).append(refusal)
        misses = [
            # A single refusal keeps its reason; a group has the reason that its members share.
            NearMisses(len(group), group[0].reason if len(group) == 1 else reason, group[0].node)
            for reason, group in groups.items()
        ]
        ordered = tuple(sorted(misses, key=lambda miss: -miss.count))
        yield PassMisses(run.name, run.entry, run.bucket, run.matches, ordered)


def _alike(reason: str) -> str:
    """Replace the numbers of layers and nodes in a reason by `*`. Equal reasons in several layers then form one
    group."""
    return re.sub(r"(%[A-Za-z]\w*?)_\d+\b", r"\1_*", re.sub(r"\blayers\.\d+", "layers.*", reason))
