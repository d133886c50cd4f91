"""Compile a checkpoint into an artifact."""

import contextlib
import gc
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ingot.cli.progress import OnProgress, no_progress
from ingot.compile.adapted_entry import DEFAULT_LORA_RANK
from ingot.compile.cache import cache_folder, locked
from ingot.compile.contents import backend_times, manifest_of, write_golden, write_program, write_timings, write_trace
from ingot.compile.emitter import Emitter
from ingot.compile.golden import InstructionSeconds
from ingot.compile.merged_plans import merged_plans, resident_params, stage_folders, staged_plans
from ingot.compile.numerics import NumericsCheck, NumericsReport
from ingot.compile.packing import Packed, pack_weights
from ingot.compile.publish import ArtifactWriter, Sealed
from ingot.compile.request import Request
from ingot.compile.timing.call_timer import CallTimer
from ingot.compile.timing.tuner import Tuner
from ingot.compile.timing.tuning_log import LACKS, log_of, with_reasons
from ingot.ir.adapters.sites import adapter_sites
from ingot.ir.artifact.adapters import ADAPTED, ADAPTERS_FILE
from ingot.ir.artifact.digest import digest_json
from ingot.ir.artifact.manifest import EXECUTABLES, NUMERICS, REQUEST, TUNING
from ingot.ir.artifact.plan import PlanFile, Plans
from ingot.ir.artifact.quantization import QUANTIZATION, QuantizationRecord
from ingot.ir.artifact.trace import Level
from ingot.ir.errors import OptionError, UserBackendError
from ingot.ir.mesh import STAGES, within_stage
from ingot.ir.plugins import load_user_ops
from ingot.ir.program import Program
from ingot.passes.base import PassContext
from ingot.passes.choose_layouts import SecondCopy, second_copies
from ingot.passes.manager import OnPass, run_pipeline
from ingot.passes.stages import first_layers
from ingot.rounding.check import RoundingCheck


@dataclass(frozen=True)
class CompileReport:
    """The result of a compile, as `compile_model` returns it.

    - `seconds`: the time of each phase
    - `regions`: the number of calls of regions (calls compiled together), over all bucket classes (ranges of step
      sizes)
    - `distinct_regions`: the number of different executables (compiled code) of regions
    - `cached_executables`: how many of these the cache had
    - `second_copies`: the weights that are stored in two layouts
    - `numerics`: None unless `check_numerics` was set
    - `origin`: the commit of a checkpoint on the hub, as "org/name@COMMIT"; "" for a local folder
    - `notes`: parts of the checkpoint that are ignored, or read differently from how they are written
    - `rounding`: the scores of the fusions; its `risks` were skipped
    - `quantization`: how weights were quantized with a calibration text; None without one
    - `dropped`: backends of other packages that failed and are left out, each with the reason; `notes` has them too
    - `no_golden_run`: why the golden run, which `ingot verify` repeats, was skipped; "" if it ran
    """

    output: Path
    build_id: str
    request_key: str
    seconds: dict[str, float]
    regions: int
    distinct_regions: int
    cached_executables: int
    nodes_per_backend: dict[str, int]
    weight_bytes: int
    artifact_bytes: int
    plans: Plans
    second_copies: tuple[SecondCopy, ...] = ()
    numerics: NumericsReport | None = None
    no_golden_run: str = ""
    origin: str = ""
    notes: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    rounding: RoundingCheck = field(default_factory=lambda: RoundingCheck(()))
    quantization: QuantizationRecord | None = None


@dataclass
class _Clock:
    """Measures the phases of a compile. `seconds` has the time of each phase by name, in order.

    It calls `progress` when a phase starts.
    """

    progress: OnProgress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Callable[[int, int], None]]:
        begin = time.perf_counter()
        self.progress(name, 0, 0)
        yield lambda done, total: self.progress(name, done, total)
        self.seconds[name] = time.perf_counter() - begin


def compile_model(
    checkpoint: str | Path,
    output: str | Path,
    *,
    revision: str | None = None,
    target: str = "auto",
    backend: str = "auto",
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    kv_cache_scales: str = "auto",
    max_seq_len: int | None = None,
    max_batch: int | None = None,
    max_tokens: int | None = None,
    deterministic: bool = False,
    weight_budget: float = 1.0,
    passes: str = "default",
    quantize: str | None = None,
    quantize_method: str = "auto",
    quantize_ignore: Sequence[str] | None = None,
    quantize_overrides: Mapping[str, str] | None = None,
    quantize_head: bool = False,
    calibrate: str | Path | None = None,
    max_kl: float | None = None,
    mesh: Mapping[str, int] | None = None,
    trace: Level = "full",
    tune: bool = False,
    tuning_log: str | Path | Mapping[str, Any] | None = None,
    checkpoints: Mapping[str, str | Path] | None = None,
    keep_risky_fusions: bool = False,
    adapter: str | Path | None = None,
    max_loras: int = 0,
    max_lora_rank: int = DEFAULT_LORA_RANK,
    jobs: int | None = None,
    check_numerics: bool = False,
    progress: OnProgress = no_progress,
    on_pass: OnPass | None = None,
) -> CompileReport:
    """Compile the Hugging Face checkpoint `checkpoint` into the artifact folder `output`.

    Nothing is visible at `output` until the artifact is complete. Raises IngotError.

    - `checkpoint`: a local folder, or else a repository on the Hugging Face hub, "org/name". The files that compiling
      needs are downloaded into the hub's cache
    - `revision`: a branch, tag or commit of the repository (default: main)
    - `target`: "auto" (this machine's GPU if it has one, else its CPU), "cpu", "cuda", or a GPU's capability such as
      "sm_90". That GPU need not be present
    - `backend`: selects the backends that may compute for the target
    - `dtype`: "auto" keeps the checkpoint's dtype
    - `kv_cache_dtype`: "auto" stores keys and values in the model's dtype. "fp8" and "int8" store them in eight bits
    - `kv_cache_scales`: the scales of such a cache. "tensor" takes the checkpoint's, or 1.0 for fp8. "token" computes
      one for each token and head. "auto" takes the checkpoint's if they are for this dtype. Without any,
      fp8 has 1.0, and int8 has scales per token
    - `max_seq_len`: the most tokens of prompt plus output (default: the model's limit)
    - `max_batch`, `max_tokens`: the most sequences and the most tokens of a step. The defaults are 256 and 8192 on a
      GPU, 64 and 2048 on a CPU. There are at most as many sequences as tokens
    - `deterministic`: use only backends with results that do not depend on the batch
    - `weight_budget`: the most memory for weights, in multiples of their size. Above 1.0, a weight may be stored in a
      second layout
    - `passes`: edits the pipeline, as in "default,-name,name{option=value}"
    - `quantize`: the storage format of the weights of linears, such as "int8"; "auto" chooses one for each layer
    - `quantize_method`: "rtn" rounds to nearest. "gptq", "awq" and "smoothquant" need a calibration text. "auto" is
      gptq with such a text, and rtn without one
    - `quantize_ignore`: patterns of linears that keep their weights, such as "layers.0.*" or "lm_head"
    - `quantize_overrides`: other formats for linears that match a pattern, as in {"*.down": "int8"}
    - `quantize_head`: also quantize the linear that computes the logits
    - `calibrate`: a text or JSONL file that the methods use and the model is measured on; "builtin" is a short text
      that comes with Ingot
    - `max_kl`: for "auto", the largest KL divergence from the original model on held-out text, in nats per token
    - `mesh`: the sizes of a mesh's axes, as in {"tp": 2, "pp": 2}: parts of each layer, and stages of layers. Each rank
      is a process of its own while serving
    - `trace`: what the artifact records of the passes. "full" is the program before and after each pass, "summary" only
      the changes, "none" nothing
    - `tuning_log`: an artifact, its tuning.json, or the content of one. The compile takes tile sizes of kernels and
      backends of calls from it
    - `tune`: time the tile sizes and backends that the log lacks, on this machine's GPU, which must be the target's.
      The cache keeps the results
    - `checkpoints`: folders or hub names of additional checkpoints that the model's definition needs, such as a
      separately trained draft, by alias
    - `keep_risky_fusions`: also make fusions that would break the contract for rounding with these weights. Without it,
      the compile computes their calls separately and reports them
    - `adapter`: a PEFT folder with a LoRA adapter, which is merged into the weights
    - `max_loras`: the most LoRA adapters on the device at once while serving; 0: the artifact serves none
    - `max_lora_rank`: the largest rank of such an adapter
    - `jobs`: the most compiler processes (default: the cores)
    - `check_numerics`: measure every pass against its numerics contract on sample inputs, and raise NumericsError if
      one breaks it
    - `progress`: called with the name of a phase, the steps done and the total
    - `on_pass`: called with the program before and after each pass. The `history` of the second one ends in the pass's
      record
    """
    # Open the output first, so that an unwritable path fails before minutes of compiling.
    with ArtifactWriter(output) as writer:
        begin = time.perf_counter()
        request = Request.read(
            checkpoint,
            revision=revision,
            target=target,
            backend=backend,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_scales=kv_cache_scales,
            max_seq_len=max_seq_len,
            max_batch=max_batch,
            max_tokens=max_tokens,
            deterministic=deterministic,
            weight_budget=weight_budget,
            passes=passes,
            quantize=quantize,
            quantize_method=quantize_method,
            quantize_ignore=quantize_ignore,
            quantize_overrides=quantize_overrides,
            quantize_head=quantize_head,
            calibrate=calibrate,
            max_kl=max_kl,
            mesh=mesh,
            trace=trace,
            tune=tune,
            tuning_log=tuning_log,
            checkpoints=checkpoints,
            keep_risky_fusions=keep_risky_fusions,
            adapter=adapter,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            progress=progress,
        )
        hub = {"hub": time.perf_counter() - begin} if request.origin else {}
        return _compile(request, writer, progress, hub, jobs, on_pass, check_numerics=check_numerics)


def compile_cached(
    checkpoint: str | Path,
    *,
    jobs: int | None = None,
    progress: OnProgress = no_progress,
    **options: Any,
) -> Path:
    """Return the path of the cached artifact of `checkpoint`, a folder or a hub name.

    If the cache lacks it, it is compiled. The cache's key is the `request_key`, a digest of the checkpoint and all
    options. `options` are keyword arguments of `compile_model`. Two processes that need one artifact compile it once.
    """
    request = Request.read(checkpoint, progress=progress, **options)
    key = request.key(request.trace())
    folder = cache_folder("artifacts")
    with locked(folder / f"{key}.lock"):
        path = folder / f"{key}.ingot"
        if not path.exists():
            with ArtifactWriter(path) as writer:
                report = _compile(request, writer, progress, {}, jobs)
            for name, reason in report.dropped.items():  # only a command prints the notes of a compile
                logging.getLogger("ingot").warning("compiled without the backend '%s': %s", name, reason)
    return path


def _compile(
    request: Request,
    writer: ArtifactWriter,
    progress: OnProgress,
    seconds: Mapping[str, float],
    jobs: int | None,
    on_pass: OnPass | None = None,
    *,
    check_numerics: bool = False,
) -> CompileReport:
    """Compile the request into the files of `writer`. `seconds` has the times of phases so far.

    If a backend of another package fails that the user did not name, this begins again without it. The executables of
    other backends are in the cache by then.
    """
    while True:
        try:
            clock = _Clock(progress, dict(seconds))
            return _compile_once(request, writer, clock, jobs, on_pass, check_numerics=check_numerics)
        except UserBackendError as error:
            if error.backend in request.asked or all(one.name != error.backend for one in request.backends):
                raise
            progress(f"leaving out the backend {error.backend}", 0, 0)
            request = request.without(error.backend, error.what)
            writer.clear()


def _compile_once(
    request: Request,
    writer: ArtifactWriter,
    clock: _Clock,
    jobs: int | None,
    on_pass: OnPass | None,
    *,
    check_numerics: bool,
) -> CompileReport:
    if jobs is not None and jobs < 1:
        raise OptionError(f"jobs is {jobs}", expected="at least 1")
    workers = jobs or len(os.sched_getaffinity(0))
    load_user_ops()
    backends = {backend.name: backend for backend in request.backends}
    tuner = Tuner(request.target, on_done=partial(clock.progress, "timing tile sizes")) if request.tune else None
    with _few_collections() as collect, Emitter(backends, request.target, workers, tuner) as emitter:
        if request.target.device != "cpu" or not request.deterministic:  # a deterministic CPU compile has no regions
            emitter.warm_up()
        with clock.phase("trace"):
            model = request.trace()
        with clock.phase("identify"):
            rounding = request.rounding(model)
            identity = request.identity(model, rounding)
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
        collect()
        with clock.phase("weights") as step:
            params = resident_params(lowered)
            plans = merged_plans(lowered, model.round)
            file = PlanFile.alike(plans, request.mesh)
            if stages > 1:
                file = PlanFile.staged(staged_plans(lowered, model.round), request.mesh)
            packed = pack_weights(
                params, request.checkpoint.read, writer, step, within_stage(request.mesh), stage_folders(file)
            )
        with clock.phase("write"):
            choices = {key: with_reasons(some, request.tuning_log) for key, some in emitter.choices.items()}
            write_program(writer, model, lowered, file, choices)
            used = [one for executable in plans.all_executables() for one in choices[executable.id]]
            calls = backend_times(lowered)
            if used or calls:
                writer.write_json(TUNING, log_of(used, calls, request.target).model_dump(mode="json"))
            if check is not None:
                writer.write_json(NUMERICS, check.report().to_json())
            if request.calibration is not None:
                writer.write_json(QUANTIZATION, request.calibration.record.model_dump(mode="json"))
            _write_files(request, writer, emitter, plans)
            if ADAPTED in lowered:
                shapes = {name: info.shape for name, info in request.checkpoint.logical.tensors.items()}
                sites = adapter_sites(lowered[ADAPTED].fused, shapes)
                writer.write_json(ADAPTERS_FILE, sites.model_dump(mode="json"))
            key = digest_json(identity)
            writer.write_json(REQUEST, {"options": request.options, "identity": identity})
            recording = write_trace(writer, request.options["trace"], model, lowered)
            sealed = writer.seal(manifest_of(request, key, plans))
        seconds, no_golden_run = _golden_run(request, writer, sealed, clock)
        write_timings(writer, clock.seconds, lowered, emitter, request, recording, seconds)
        build_id = writer.publish()
    copies = second_copies(params)
    report = _report(request, writer, key, build_id, clock, plans, emitter, packed, copies, no_golden_run)
    record = None if request.calibration is None else request.calibration.record
    report = replace(
        report, notes=request.notes(model), dropped=request.dropped, rounding=rounding, quantization=record
    )
    return replace(report, numerics=check.report()) if check is not None else report


@contextlib.contextmanager
def _few_collections() -> Iterator[Callable[[], None]]:
    """Disable Python's cyclic garbage collection until the caller calls the function that this yields.

    That function enables it again, but excludes the objects made so far (`gc.freeze`) until the block ends. Programs
    are many small long-lived objects. Repeated scans of them take a fifth of the time of tracing and passes. Their
    garbage is some 50 MB for 32 layers. The large weights come later.
    """
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()

    def go_on() -> None:
        if not frozen:  # otherwise the caller holds frozen objects, which `unfreeze` would thaw
            gc.freeze()
        if enabled:
            gc.enable()

    gc.disable()
    try:
        yield go_on
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()


def _write_files(request: Request, writer: ArtifactWriter, emitter: Emitter, plans: Plans) -> None:
    """Write the files of the executables and of the tokenizer.

    Also write the JSON documents whose digests are the executables' cache keys.
    """
    for executable in plans.all_executables():
        folder = f"exe/{request.target.name}/{executable.id}"
        for name in executable.files:
            shutil.copyfile(emitter.folders[executable.id] / name, writer.path(f"{folder}/{name}"))
    writer.write_json(EXECUTABLES, {one.id: emitter.documents[one.id] for one in plans.all_executables()})
    for name, path in request.checkpoint.tokenizer_files.items():
        shutil.copyfile(path, writer.path(f"tokenizer/{name}"))


def _golden_run(
    request: Request, writer: ArtifactWriter, sealed: Sealed, clock: _Clock
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


def _report(
    request: Request,
    writer: ArtifactWriter,
    key: str,
    build_id: str,
    clock: _Clock,
    plans: Plans,
    emitter: Emitter,
    packed: Packed,
    copies: tuple[SecondCopy, ...],
    no_golden_run: str,
) -> CompileReport:
    per_backend: dict[str, int] = {}
    buckets = [bucket for plan in plans.plans.values() for bucket in plan.buckets]
    for bucket in buckets:
        for name, count in bucket.nodes_per_backend().items():
            per_backend[name] = per_backend.get(name, 0) + count
    return CompileReport(
        output=writer.output,
        build_id=build_id,
        request_key=key,
        seconds=clock.seconds,
        regions=sum(
            1 for bucket in buckets for instruction in bucket.instructions if instruction.target.startswith("exe.")
        ),
        distinct_regions=len(plans.executables),
        cached_executables=len(emitter.hits & plans.executables.keys()),
        nodes_per_backend=per_backend,
        weight_bytes=packed.bytes,
        plans=plans,
        second_copies=copies,
        no_golden_run=no_golden_run,
        origin=request.origin,
        artifact_bytes=sum(file.stat().st_size for file in writer.output.rglob("*") if file.is_file()),
    )
