"""All that the report takes from an artifact: passes with their programs, times, the memory of a step, and nodes.

Nothing else in this package opens a file of the artifact. What a compile did not record is None or empty, never made up.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ingot.ir.artifact import TIMINGS, trace_file, trace_name
from ingot.ir.errors import ArtifactError
from ingot.ir.json_text import parse_json
from ingot.ir.parse import parse_type
from ingot.ir.plan import Argument, BucketPlan, Instruction, Plan, Plans, Ref
from ingot.report.lines import program_lines
from ingot.runtime.artifact import Artifact

_RECORD = {"name", "entry", "bucket", "stage", "options", "numerics", "matches", "refusals", "op_count_diff"}
_CHOOSES = "choose-providers"  # the pass whose program still has every node apart, each with its provider


@dataclass(frozen=True)
class Step:
    """One pass and the program that it left. `before` is the number of the step whose program it was given.

    The first step of an entry is the traced program, which no pass made: its `stage` is TRACED, `before` is None.
    `refusals` are pairs of a node's name and a reason; `seconds` is None where no times were recorded.
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
    refusals: tuple[tuple[str, str], ...] = ()
    op_count_diff: Mapping[str, int] | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Times:
    """Seconds of the compile's phases and of each executable by id, those from the cache being `cached`; empty where
    none were recorded."""

    phases: Mapping[str, float]
    executables: Mapping[str, float]
    cached: tuple[str, ...]


@dataclass(frozen=True)
class Storage:
    """The memory of a value and its views in bytes: made by the instruction `first`, given back after `last`."""

    name: str
    size: int
    first: int
    last: int


@dataclass(frozen=True)
class StepMemory:
    """The memory of one bucket class's largest step, in bytes.

    Per instruction: what it calls, and what it takes itself beside its results while it runs. That is known of regions,
    and of the instruction `peak`, where the planned `activations` are reached, and of calls that equal it but for names.
    Of other ops the plan keeps no figure, and 0 stands there.
    """

    entry: str
    bucket: str
    sizes: Mapping[str, int]
    calls: tuple[str, ...]
    scratch: tuple[int, ...]
    storages: tuple[Storage, ...]
    activations: int
    peak: int


@dataclass(frozen=True)
class Resident:
    """What stays between steps, in bytes; `sequence` is the KV cache of one sequence at full length."""

    weights: int
    states: int
    inputs: int
    outputs: int
    page: int
    sequence: int


@dataclass(frozen=True)
class NodeCost:
    """What is known of one node of a bucket class. `flops` and `bytes` are of one step, None where not known.

    `step` is the number of the step whose program holds the node; `refusals` say who declined it and why, and
    `candidates` who would have taken it, at which cost.
    """

    step: int
    node: str
    provider: str
    refusals: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    flops: int | None = None
    bytes: int | None = None


def steps(artifact: Artifact) -> tuple[Step, ...]:
    """The traced program of every entry, and each pass in the order in which they ran. Raises ArtifactError."""
    records: Any = artifact.read_json("trace/passes.json")
    if not isinstance(records, list) or not all(isinstance(one, dict) and _RECORD <= one.keys() for one in records):
        raise ArtifactError("trace/passes.json is malformed", where=str(artifact.folder))
    seconds = _pass_seconds(artifact, [one["name"] for one in records])
    made: list[Step] = []
    latest: dict[tuple[str, str | None], int] = {}
    for number, record in enumerate(records, 1):
        entry, bucket = record["entry"], record["bucket"]
        if (entry, None) not in latest:
            latest[entry, None] = len(made)
            made.append(Step("traced", entry, None, "TRACED", _traced(artifact, entry)))
        before = latest.get((entry, bucket), latest[entry, None])
        latest[entry, bucket] = len(made)
        try:
            refusals = tuple((str(one["node"]), str(one["reason"])) for one in record["refusals"])
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"trace/passes.json, pass {number}: {error!r}", where=str(artifact.folder)) from error
        made.append(
            Step(
                record["name"],
                entry,
                bucket,
                record["stage"],
                artifact.read_text(trace_file(number, record["name"], entry, bucket)),
                before,
                record["options"],
                record["numerics"],
                record["matches"],
                refusals,
                record["op_count_diff"],
                seconds[number - 1],
            )
        )
    return tuple(made)


def _traced(artifact: Artifact, entry: str) -> str:
    """The program of one entry as the frontend gave it: the file holds those of all, one behind the other."""
    for text in re.split(r"^(?=program )", artifact.read_text(trace_file(0, "traced", "main", None)), flags=re.M):
        if text.startswith(f"program {entry} "):
            return text
    raise ArtifactError(f"the trace has no program '{entry}' as traced", where=str(artifact.folder))


def _pass_seconds(artifact: Artifact, names: list[str]) -> list[float | None]:
    """Seconds of each pass, in order; None for all where the times are not those of these passes."""
    timed = _timings(artifact).get("passes", [])
    if [one["name"] for one in timed] != names:
        return [None] * len(names)
    return [float(one["seconds"]) for one in timed]


def times(artifact: Artifact) -> Times:
    """What timings.json holds beside the passes. Raises ArtifactError."""
    timings = _timings(artifact)
    try:
        return Times(
            *({name: float(value) for name, value in timings.get(key, {}).items()} for key in ("phases", "executables")),
            cached=tuple(timings.get("cached", ())),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise ArtifactError(f"{TIMINGS} is malformed: {error}", where=str(artifact.folder)) from error


def _timings(artifact: Artifact) -> dict[str, Any]:
    """timings.json, which opening the artifact has compared with its checksum; empty where it was removed."""
    path = artifact.folder / TIMINGS
    if not path.exists():
        return {}
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{TIMINGS} is malformed: {error}", where=str(artifact.folder)) from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{TIMINGS} is malformed: no object", where=str(artifact.folder))
    return value


def plans(artifact: Artifact) -> Plans:
    """plan.json. Raises ArtifactError."""
    try:
        return Plans.model_validate_json(artifact.read_text("plan.json"))
    except ValidationError as error:
        first = error.errors()[0]
        raise ArtifactError(
            f"plan.json, field {'.'.join(map(str, first['loc']))}: {first['msg']}", where=str(artifact.folder)
        ) from error


def step_memories(found: Plans) -> tuple[StepMemory, ...]:
    """The memory of the largest step of each bucket class of each entry."""
    return tuple(_step_memory(plan, bucket) for plan in found.plans.values() for bucket in plan.buckets)


def _step_memory(plan: Plan, bucket: BucketPlan) -> StepMemory:
    sizes = bucket.memory.sizes
    first: dict[str, int] = {}  # of each storage, the instruction that makes it
    last: dict[str, int] = {}
    alive: dict[str, int] = {}  # of each storage, the values that lie in it
    held: dict[str, int] = {}
    scratch: list[int] = []
    for number, instruction in enumerate(bucket.instructions):
        taken = 0
        for name in filter(None, instruction.results):
            value = bucket.values[name]
            holder = value.of or name
            alive[holder] = alive.get(holder, 0) + 1
            if value.of is None:
                first[name] = number
                held[name] = _bytes(value.storage or value.type, sizes)
                taken += held[name]
        for name in instruction.frees:
            holder = bucket.values[name].of or name
            alive[holder] -= 1
            if not alive[holder]:
                last[holder] = number
        executable = plan.executables.get(instruction.target.removeprefix("exe."))
        scratch.append(max(0, executable.workspace - taken) if executable else 0)
    end = len(bucket.instructions) - 1
    storages = tuple(Storage(name, held[name], begin, last.get(name, end)) for name, begin in first.items())
    peak = bucket.memory.peak
    at_peak = bucket.memory.activations - sum(one.size for one in storages if one.first <= peak <= one.last)
    types = {**plan.inputs, **plan.params, **{name: state.type for name, state in plan.states.items()}}
    types |= {name: value.type for name, value in bucket.values.items()}
    calls = [_unnamed(instruction, types) for instruction in bucket.instructions]
    return StepMemory(
        entry=plan.entry,
        bucket=bucket.bucket.name,
        sizes=sizes,
        calls=tuple(
            f"region {one.target[4:16]}" if one.target.startswith("exe.") else one.target for one in bucket.instructions
        ),
        scratch=tuple(at_peak if call == calls[peak] else own for call, own in zip(calls, scratch, strict=True)),
        storages=storages,
        activations=bucket.memory.activations,
        peak=peak,
    )


def _unnamed(instruction: Instruction, types: Mapping[str, str]) -> tuple[object, ...]:
    """All of a call that its memory depends on: names replaced by types."""

    def typed(argument: Argument) -> object:
        return types[argument.ref] if isinstance(argument, Ref) else argument

    kwargs = {name: typed(value) for name, value in instruction.kwargs.items()}
    return (instruction.target, instruction.provider, *map(typed, instruction.args), str(kwargs))


def _bytes(type_text: str, sizes: Mapping[str, int]) -> int:
    value_type = parse_type(type_text)
    return math.prod(value_type.bind(sizes)) * value_type.dtype.itemsize


def resident(found: Plans) -> Resident:
    """Entries share weights and states, and one step of one of them runs at a time: the most of each."""
    memories = [plan.memory for plan in found.plans.values()]
    return Resident(
        *(
            max(getattr(memory, name) for memory in memories)
            for name in ("weights", "states", "inputs", "outputs", "page")
        ),
        sequence=max(memory.page * memory.pages_per_sequence for memory in memories),
    )


def node_costs(artifact: Artifact, made: tuple[Step, ...]) -> tuple[NodeCost, ...]:
    """Who computes each node of each bucket class, and who declined it. Raises ArtifactError.

    The one place to add flops, bytes and candidates: no file of the artifact holds them yet.
    """
    choices: Any = artifact.read_json("choices.json")
    found: list[NodeCost] = []
    for number, step in enumerate(made):
        if step.name != _CHOOSES:
            continue
        refusals: dict[str, list[str]] = {}
        try:
            for one in choices[trace_name(step.entry, step.bucket)]["refusals"]:
                refusals.setdefault(one["node"], []).append(str(one["reason"]))
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"choices.json is malformed: {error!r}", where=str(artifact.folder)) from error
        found += [
            NodeCost(number, line.name, line.provider, tuple(refusals.get(line.name, ())))
            for line in program_lines(step.text)
            if line.provider
        ]
    return tuple(found)
