"""Compile a model for one target: trace it, run the passes, compile executables, and write the files."""

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ingot.compile.compile_report import CompileReport
from ingot.compile.contents import backend_times, write_golden, write_program, write_trace
from ingot.compile.emitter import Emitter
from ingot.compile.folder_writer import WritableFiles
from ingot.compile.golden import InstructionSeconds
from ingot.compile.identity import Document
from ingot.compile.merged_plans import merged_plans, resident_params, staged_plans
from ingot.compile.numerics import NumericsCheck
from ingot.compile.packing import Packed
from ingot.compile.phase_clock import PhaseClock
from ingot.compile.publish import Sealed, VariantFiles
from ingot.compile.request import Request
from ingot.compile.timing.call_timer import CallTimer
from ingot.compile.timing.tuner import Tuner
from ingot.compile.timing.tuning_log import LACKS, log_of, with_reasons
from ingot.ir.adapters.sites import adapter_sites
from ingot.ir.artifact.adapters import ADAPTED, ADAPTERS_FILE
from ingot.ir.artifact.digest import digest_json
from ingot.ir.artifact.documents import encode_documents
from ingot.ir.artifact.manifest import EXECUTABLES, NUMERICS, REQUEST, TUNING
from ingot.ir.artifact.manifest_file import VARIANTS_FOLDER
from ingot.ir.artifact.plan import PlanFile, Plans
from ingot.ir.artifact.quantization import QUANTIZATION
from ingot.ir.mesh import STAGES, within_stage
from ingot.ir.program import Model, Program
from ingot.passes.base import PassContext
from ingot.passes.choose_layouts import second_copies
from ingot.passes.manager import Lowered, OnPass, run_pipeline
from ingot.passes.stages import first_layers
from ingot.rounding.check import RoundingCheck


@dataclass(frozen=True)
class CompiledTarget:
    """What the passes make of one request: the programs and executables of an artifact, or of a variant of a fat one.

    `files` writes its files.
    """

    request: Request
    files: WritableFiles
    model: Model
    rounding: RoundingCheck
    identity: Document
    lowered: Mapping[str, Lowered]
    emitter: Emitter
    check: NumericsCheck | None
    plan_file: PlanFile
    plans: Plans

    @property
    def key(self) -> str:
        return digest_json(self.identity)


def compile_target(
    request: Request,
    files: WritableFiles,
    clock: PhaseClock,
    workers: int,
    on_pass: OnPass | None,
    traced: dict[object, tuple[Model, RoundingCheck]],
    *,
    check_numerics: bool,
) -> CompiledTarget:
    """Trace the model, run the passes and compile the executables of one target.

    `traced` has the traced model and the score of its fusions by limits, for further targets: a definition is traced
    once, and its sizes are bounded by the limits.
    """
    backends = {backend.name: backend for backend in request.backends}
    tuner = Tuner(request.target, on_done=partial(clock.progress, "timing tile sizes")) if request.tune else None
    with Emitter(backends, request.target, workers, tuner) as emitter:
        if request.target.device != "cpu" or not request.deterministic:  # a deterministic CPU compile has no regions
            emitter.warm_up()
        if (known := traced.get(request.limits)) is None:
            with clock.phase("trace"):
                model = request.trace()
        else:
            model = known[0]
        with clock.phase("identify"):
            rounding = request.rounding(model) if known is None else known[1]
            identity = request.identity(model, rounding)
        traced[request.limits] = model, rounding
        if request.text is not None:
            with clock.phase("calibrate") as step:
                request = request.calibrated(model, identity, step)
        check = NumericsCheck(model, request.limits, request.checkpoint.read) if check_numerics else None
        if check is not None:
            with clock.phase("numerics"):
                check.begin()
        hooks = [hook for hook in (on_pass, check and check.on_pass) if hook]
        with clock.phase("passes and executables") as step, tuner or contextlib.nullcontext():
            emitter.on_done = step
            # A given log decides alone, for backends as for tile sizes, unless `tune` times the entries it lacks.
            untimed = LACKS if request.tuning_log is not None and not request.tune else ""
            timer = CallTimer(
                emitter, request.target, untimed=untimed, on_done=partial(clock.progress, "timing backends")
            )
            context = PassContext(
                target=request.target,
                max_seq_len=request.limits.max_seq_len,
                max_batch=request.limits.max_batch,
                max_tokens=request.limits.max_tokens,
                backends=request.backends,
                deterministic=request.deterministic,
                weight_budget=request.weight_budget,
                emit=emitter.emit,
                emit_library=emitter.emit_library,
                mesh=within_stage(request.mesh),
                first_layers=first_layers(model, stages) if (stages := request.mesh.get(STAGES, 1)) > 1 else (),
                skipped_fusions=rounding.skipped(),
                calibrated=None if request.calibration is None else request.calibration.weights,
                measure=emitter.measure,
                decided={one.key: one for one in request.decided},
                time_calls=timer.time,
            )
            pipeline = request.pipeline()
            lowered = {
                entry: run_pipeline(
                    model, context, request.buckets(model.entries[entry]), pipeline, entry=entry, on_pass=_all_of(hooks)
                )
                for entry in model.entries
            }
    plans = merged_plans(lowered, model.round)
    file = PlanFile.alike(plans, request.mesh)
    if stages > 1:
        file = PlanFile.staged(staged_plans(lowered, model.round), request.mesh)
    return CompiledTarget(request, files, model, rounding, identity, lowered, emitter, check, file, plans)


def write_target(part: CompiledTarget) -> float:
    """Write the files of one target but weights, tokenizer and manifest. Return the seconds of writing the trace."""
    request, files, emitter, plans, lowered = part.request, part.files, part.emitter, part.plans, part.lowered
    choices = {key: with_reasons(some, request.tuning_log) for key, some in emitter.choices.items()}
    write_program(files, part.model, lowered, part.plan_file, choices)
    used = [one for executable in plans.all_executables() for one in choices[executable.id]]
    calls = backend_times(lowered)
    if used or calls:
        files.write_json(TUNING, log_of(used, calls, request.target).model_dump(mode="json"))
    if part.check is not None:
        files.write_json(NUMERICS, part.check.report().to_json())
    if request.calibration is not None:
        files.write_json(QUANTIZATION, request.calibration.record.model_dump(mode="json"))
    _write_executables(request, files, emitter, plans)
    if ADAPTED in lowered:
        shapes = {name: info.shape for name, info in request.checkpoint.logical.tensors.items()}
        sites = adapter_sites(lowered[ADAPTED].fused, shapes)
        files.write_json(ADAPTERS_FILE, sites.model_dump(mode="json"))
    files.write_json(REQUEST, {"options": request.options, "identity": part.identity})
    return write_trace(files, request.options["trace"], part.model, lowered)


def _write_executables(request: Request, writer: WritableFiles, emitter: Emitter, plans: Plans) -> None:
    """Write the files of the executables, and the JSON documents whose digests are their cache keys."""
    for executable in plans.all_executables():
        folder = f"exe/{request.target.name}/{executable.id}"
        for name in executable.files:
            shutil.copyfile(emitter.folders[executable.id] / name, writer.path(f"{folder}/{name}"))
    writer.write_json(
        EXECUTABLES, encode_documents({one.id: emitter.documents[one.id] for one in plans.all_executables()})
    )


def golden_run(
    request: Request, writer: WritableFiles, sealed: Sealed, clock: PhaseClock
) -> tuple[Mapping[str, InstructionSeconds], str]:
    """Run the artifact `sealed` once and store digests of its results, which `ingot verify` compares (the golden run).

    Return the times of its instructions by bucket class (range of step sizes), and "". If there is no golden run,
    return an empty dict and the reason.
    """
    if missing := request.target.missing_here():
        return {}, missing
    if request.mesh and request.target.device != "cpu":
        return {}, "a golden run is of one process, and the artifact is for several GPUs"
    with clock.phase("golden run"):
        ran = write_golden(writer, sealed)
    return ({}, ran) if isinstance(ran, str) else (ran, "")


def _all_of(hooks: Sequence[OnPass]) -> OnPass:
    def on_pass(before: Program, after: Program) -> None:
        for hook in hooks:
            hook(before, after)

    return on_pass


def report_of(
    part: CompiledTarget, output: Path, build_id: str, clock: PhaseClock, packed: Packed, no_golden_run: str
) -> CompileReport:
    request, plans, emitter = part.request, part.plans, part.emitter
    per_backend: dict[str, int] = {}
    buckets = [bucket for plan in plans.plans.values() for bucket in plan.buckets]
    for bucket in buckets:
        for name, count in bucket.nodes_per_backend().items():
            per_backend[name] = per_backend.get(name, 0) + count
    if isinstance(part.files, VariantFiles):
        output = output / VARIANTS_FOLDER / part.files.name
    return CompileReport(
        output=output,
        build_id=build_id,
        request_key=part.key,
        seconds=clock.seconds,
        regions=sum(
            1 for bucket in buckets for instruction in bucket.instructions if instruction.target.startswith("exe.")
        ),
        distinct_regions=len(plans.executables),
        cached_executables=len(emitter.hits & plans.executables.keys()),
        nodes_per_backend=per_backend,
        weight_bytes=packed.bytes,
        plans=plans,
        second_copies=second_copies(resident_params(part.lowered)),
        numerics=None if part.check is None else part.check.report(),
        no_golden_run=no_golden_run,
        origin=request.origin,
        artifact_bytes=bytes_in(output),
        notes=request.notes(part.model),
        dropped=request.dropped,
        rounding=part.rounding,
        quantization=None if request.calibration is None else request.calibration.record,
        tried=request.target.tried,
    )


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
