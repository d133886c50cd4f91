"""Write an artifact's files except weights and executables: programs, plans, choices, trace, times, golden run,
manifest.
"""

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import fx

from ingot.backends.table import find_entry
from ingot.compile.emitter import Emitter
from ingot.compile.folder_writer import WritableFiles
from ingot.compile.golden import InstructionSeconds, record
from ingot.compile.merged_plans import resident_params
from ingot.compile.publish import Sealed
from ingot.ir.artifact.backend_times import BackendTimes
from ingot.ir.artifact.manifest import GOLDEN, SCHEMA_VERSION, Manifest
from ingot.ir.artifact.plan import PLAN_FILE, PlanFile, Plans
from ingot.ir.artifact.record import PassRecord, encode_refusals
from ingot.ir.artifact.trace import Level, encode_trace, trace_name
from ingot.ir.artifact.tuning import Choice
from ingot.ir.errors import OptionError
from ingot.ir.machine.extras import installed_versions
from ingot.ir.machine.target import VERSIONS
from ingot.ir.mesh import mesh_text
from ingot.ir.parse import parse_type
from ingot.ir.program import Model, Program, RegionCall
from ingot.ir.text import print_program
from ingot.ir.types import DTYPE_NAMES
from ingot.passes.choose_layouts import second_copies
from ingot.passes.manager import Lowered
from ingot.runtime.cpu.threads import on_threads
from ingot.runtime.loading.artifact import Artifact
from ingot.runtime.loading.load_context import mesh_of
from ingot.runtime.loading.loader import bind
from ingot.runtime.ranks.in_process import THREADS, bind_ranks

if TYPE_CHECKING:
    from ingot.compile.request import Request


def write_program(
    writer: WritableFiles,
    model: Model,
    lowered: Mapping[str, Lowered],
    plan_file: PlanFile,
    choices: Mapping[str, tuple[Choice, ...]],
) -> None:
    """Write program.ir, plan.json and choices.json.

    `lowered` maps an entry (a program of the model, such as "main") to the result of its passes. `choices` maps the id
    of an executable to the tile sizes of its kernels.
    """
    programs = [program for one in lowered.values() for program in one.programs.values()]
    writer.write_text("program.ir", "".join(map(print_program, programs)))
    writer.write_json(PLAN_FILE, plan_file.to_json())
    writer.write_json("choices.json", _choices(lowered, choices))


def write_trace(writer: WritableFiles, level: Level, model: Model, lowered: Mapping[str, Lowered]) -> float:
    """Write the record of every pass, and return the seconds that this took.

    `level` is "full", "summary" or "none". `lowered` maps an entry (a program of the model, such as "main") to the
    result of its passes.
    """
    begin = time.perf_counter()
    traced = {entry: print_program(program) for entry, program in model.entries.items()} if level == "full" else {}
    for file, value in encode_trace(level, traced, _records(lowered)).items():
        if isinstance(value, str):
            writer.write_text(file, value)
        else:
            writer.write_json(file, value)
    return time.perf_counter() - begin


def _records(lowered: Mapping[str, Lowered]) -> list[PassRecord]:
    """Return the records of the passes of all entries (programs of the model), one entry after another."""
    return [record for one in lowered.values() for record in one.records]


def _choices(lowered: Mapping[str, Lowered], tiles: Mapping[str, tuple[Choice, ...]]) -> dict[str, Any]:
    """Return the value of choices.json: for each call, which backend was chosen and why.

    A key is the title of a lowered program, such as "decode" or "draft@decode". A value has the backend of each node,
    the candidates with their costs, and the refusals with their reasons. It also has the tile sizes, and the weights
    that are stored twice. `tiles` maps the id of an executable to the tile sizes of its kernels.
    """
    choices: dict[str, Any] = {}
    copies = {copy.first: copy.second for copy in second_copies(resident_params(lowered))}
    for one in lowered.values():
        for bucket, program in one.programs.items():
            choices[trace_name(program.name, bucket)] = {
                "second_copies": copies,
                "backends": {node.name: node.meta["backend"] for node in program.calls() if "backend" in node.meta},
                "candidates": _candidates(program),
                "contests": {
                    node.name: node.meta["decision"].model_dump(mode="json") for node, _ in _contests(program)
                },
                "tiles": _tiles(program, tiles),
                "refusals": encode_refusals(
                    refusal
                    for record in one.records
                    if record.name == "choose-backends" and record.bucket == bucket
                    for refusal in record.refusals
                ),
            }
    return choices


def _candidates(program: Program) -> dict[str, dict[str, float]]:
    """Return the costs of the backends that can compute each call, as {node of the call: {backend: cost}}.

    A call inside a region is one key, even if the program calls the region several times.
    """
    return {node.name: node.meta["candidates"] for node in _calls(program) if "candidates" in node.meta}


def _calls(program: Program) -> Iterator[fx.Node]:
    """Yield the calls of a program, then the calls inside its regions (groups of calls compiled together)."""
    bodies = (region.body for region in program.regions.values())
    return (node for one in (program, *bodies) for node in one.calls())


def _contests(program: Program) -> Iterator[tuple[fx.Node, BackendTimes | str]]:
    """Yield each call that several backends can compute on its own, without other calls.

    The second value is the backends' times, or the reason why they were not timed.
    """
    return ((node, node.meta["contest"]) for node in _calls(program) if "contest" in node.meta)


def backend_times(lowered: Mapping[str, Lowered]) -> list[BackendTimes]:
    """Return the times by which backends of calls were chosen, in all programs.

    This compile measured them, or they come from a tuning log (the times of an earlier compile). Calls whose backends
    were not timed are left out.
    """
    programs = [program for one in lowered.values() for program in one.programs.values()]
    return [times for program in programs for _, times in _contests(program) if isinstance(times, BackendTimes)]


def _tiles(program: Program, tiles: Mapping[str, tuple[Choice, ...]]) -> dict[str, list[dict[str, Any]]]:
    """Return the tile sizes of a program's kernels, by the name of a region. Outside regions, the key is a call's node.

    `tiles` maps the id of an executable to the tile sizes of its kernels.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for node in program.calls():
        if isinstance(node.target, RegionCall):
            name, region = node.target.name, program.regions[node.target.name]
        elif "compiled" in node.meta:
            name, region = node.name, program.compiled[node.meta["compiled"]]
        else:
            continue
        if region.executable is not None and (some := tiles.get(region.executable.id)):
            found[name] = [choice.model_dump(mode="json") for choice in some]
    return found


def write_timings(
    writer: WritableFiles,
    phases: Mapping[str, float],
    lowered: Mapping[str, Lowered],
    emitter: Emitter,
    request: "Request",
    recording: float,
    instructions: Mapping[str, InstructionSeconds],
) -> None:
    """Write timings.json: the path of the checkpoint, and how long each part of the compile took.

    `phases` are the seconds of each phase, and `recording` the seconds of writing the trace. `instructions` are the
    times of the instructions in a short run of the artifact, by bucket class (range of step sizes), such as "decode".
    """
    writer.write_json(
        "timings.json",
        {
            "checkpoint": str(request.checkpoint.folder.absolute()),
            **({"hub": request.origin} if request.origin else {}),
            "phases": dict(phases),
            "passes": [
                {
                    "name": one.name,
                    "entry": one.entry,
                    "bucket": one.bucket,
                    "seconds": one.seconds,
                    "peak_bytes": one.peak_bytes,
                }
                for one in _records(lowered)
            ],
            "recording": recording,
            "instructions": {
                name: {"tokens": list(one.tokens), "seconds": list(one.seconds)} for name, one in instructions.items()
            },
            "executables": emitter.seconds,
            "cached": sorted(emitter.hits),
        },
    )


def write_golden(writer: WritableFiles, sealed: Sealed) -> dict[str, InstructionSeconds] | str:
    """Run the artifact `sealed` before it is published, and write digests of its logits (the golden run).

    Return the times of its instructions by bucket class (range of step sizes). If there is no golden run, return the
    reason as text: this machine lacks the memory to serve the artifact, or no program of it returns logits. Raises
    IngotError if the artifact does not run.
    """
    try:
        artifact = Artifact(sealed.folder, sealed.manifest, sealed.build_id)
        on_mesh = bool(mesh_of(sealed.manifest))
        loaded = bind_ranks(artifact, verify=False) if on_mesh else bind(artifact, verify=False)
        if not any("logits" in plan.outputs for plan in loaded.plans.plans.values()):
            return "no entry returns logits, which a golden run compares"
        with on_threads(THREADS if on_mesh else None):
            recording = record(loaded)
    except OptionError as error:
        return error.what
    writer.write_json(GOLDEN, recording.run.model_dump(mode="json"))
    return recording.instructions


def manifest_of(request: "Request", key: str, plans: Plans) -> Manifest:
    spec = request.spec
    linked = linked_with(plans)
    identity = request.target.identity(linked)
    packages = installed_versions(name for name in linked if name not in VERSIONS)
    versions = {**packages, **identity.pop("versions")}
    return Manifest(
        schema_version=SCHEMA_VERSION,
        # Not the output's name: the same request at another path is the same artifact.
        name=spec.architecture,
        request_key=key,
        exe_keys=tuple(sorted(executable.id for executable in plans.all_executables())),
        target=identity,
        tried=request.target.tried,
        versions=versions,
        model={
            "architecture": spec.architecture,
            "family": spec.family,
            "dtype": DTYPE_NAMES[spec.dtype],
            "vocab_size": spec.vocab_size,
            "max_seq_len": request.limits.max_seq_len,
            "max_batch": request.limits.max_batch,
            "max_tokens": request.limits.max_tokens,
            "page_size": _page_size(plans),
            "eos_token_ids": ",".join(map(str, spec.eos_token_ids)),
            "deterministic": request.deterministic,
            **({"mesh": mesh_text(request.mesh)} if request.mesh else {}),
        },
    )


def linked_with(plans: Plans) -> tuple[str, ...]:
    """Return the names of the packages that the code of the plans links with, such as torch.

    A backend of another package links with that package. The manifest records the versions of these packages.
    """
    buckets = (bucket for plan in plans.plans.values() for bucket in plan.buckets)
    backends = {one.backend for bucket in buckets for one in bucket.instructions}
    entries = (find_entry(name) for name in backends | {one.backend for one in plans.all_executables()})
    return tuple(sorted({package for entry in entries if entry is not None for package in entry.links}))


def _page_size(plans: Plans) -> int:
    for state in plans.states.values():
        if state.kind == "paged_kv":
            size = parse_type(state.type).shape[2]
            assert isinstance(size, int)
            return size
    return 1  # a model without a paged cache has no pages, so any size fits
