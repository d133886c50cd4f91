"""Compile a checkpoint into an artifact."""

import contextlib
import gc
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ingot.cli.progress import OnProgress, no_progress
from ingot.compile.adapted_entry import DEFAULT_LORA_RANK
from ingot.compile.cache import cache_folder, locked
from ingot.compile.compile_report import CompileReport
from ingot.compile.compiled_target import CompiledTarget, bytes_in, compile_target, golden_run, report_of, write_target
from ingot.compile.contents import manifest_of, write_timings
from ingot.compile.merged_plans import resident_params, stage_folders
from ingot.compile.packing import Wanted, pack_weights
from ingot.compile.phase_clock import PhaseClock
from ingot.compile.publish import ArtifactWriter, VariantFiles
from ingot.compile.request import Request
from ingot.compile.targets import fat_key, read_requests
from ingot.ir.artifact.trace import Level
from ingot.ir.errors import OptionError, UserBackendError
from ingot.ir.mesh import within_stage
from ingot.ir.plugins import load_user_ops
from ingot.ir.program import Model
from ingot.passes.manager import OnPass
from ingot.rounding.check import RoundingCheck
from ingot.runtime.loading.variants import variant_folder

Made = TypeVar("Made")


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
      "sm_90". That GPU need not be present. Several, as in "sm_90,cpu", make a fat artifact: a variant for each target,
      and one set of weights
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
        requests = read_requests(
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
        hub = {"hub": time.perf_counter() - begin} if requests[0].origin else {}

        def attempt(requests: Sequence[Request]) -> CompileReport:
            writer.clear()
            clock = PhaseClock(progress, dict(hub))
            return _compile(requests, writer, clock, jobs, on_pass, check_numerics=check_numerics)

        return _without_failing(requests, progress, attempt)


def compile_cached(
    checkpoint: str | Path,
    *,
    jobs: int | None = None,
    progress: OnProgress = no_progress,
    variant: str | None = None,
    **options: Any,
) -> Path:
    """Return the path of the cached artifact of `checkpoint`, a folder or a hub name.

    For several targets, this is the fat artifact, or its `variant` for one of the targets.

    If the cache lacks it, it is compiled. The cache's key is the `request_key`, a digest of the checkpoint and all
    options, and of the backends that compiled it: without a backend of another package that fails, the key is another.
    `options` are keyword arguments of `compile_model`. Two processes that need one artifact compile it once.
    """
    requests = read_requests(checkpoint, progress=progress, **options)
    if variant is not None and variant not in (names := [one.target.name for one in requests]):
        raise OptionError(f"the variant '{variant:.80}' is not compiled", expected=", ".join(names))

    def attempt(requests: Sequence[Request]) -> Path:
        keys = {one.target.name: one.key(one.trace()) for one in requests}
        key = fat_key(keys) if len(keys) > 1 else next(iter(keys.values()))
        folder = cache_folder("artifacts")
        path = folder / f"{key}.ingot"
        with locked(folder / f"{key}.lock"):
            if not path.exists():
                with ArtifactWriter(path) as writer:
                    _compile(requests, writer, PhaseClock(progress), jobs, None, check_numerics=False)
        for name, reason in requests[0].dropped.items():  # only a command prints the notes of a compile
            logging.getLogger("ingot").warning("compiled without the backend '%s': %s", name, reason)
        return path

    path = _without_failing(requests, progress, attempt)
    return path if variant is None else variant_folder(path, variant)


def _without_failing(
    requests: Sequence[Request], progress: OnProgress, attempt: Callable[[Sequence[Request]], Made]
) -> Made:
    """Return the result of `attempt`, which compiles requests.

    If a backend of another package fails that the user did not name, this begins again with requests without it. The
    executables of other backends are in the cache by then.
    """
    while True:
        try:
            return attempt(requests)
        except UserBackendError as error:
            asked = any(error.backend in request.asked for request in requests)
            if asked or all(one.name != error.backend for request in requests for one in request.backends):
                raise
            progress(f"leaving out the backend {error.backend}", 0, 0)
            requests = [request.without(error.backend, error.what) for request in requests]


def _compile(
    requests: Sequence[Request],
    writer: ArtifactWriter,
    clock: PhaseClock,
    jobs: int | None,
    on_pass: OnPass | None,
    *,
    check_numerics: bool,
) -> CompileReport:
    """Compile the requests, one for each target, into the files of `writer`."""
    if jobs is not None and jobs < 1:
        raise OptionError(f"jobs is {jobs}", expected="at least 1")
    workers = jobs or len(os.sched_getaffinity(0))
    load_user_ops()
    fat = len(requests) > 1
    parts: dict[str, CompiledTarget] = {}
    traced: dict[object, tuple[Model, RoundingCheck]] = {}
    with _few_collections() as collect:
        for request in requests:
            name = request.target.name if fat else ""
            files = VariantFiles(writer, name) if fat else writer
            parts[name] = compile_target(
                request, files, clock.of(name), workers, on_pass, traced, check_numerics=check_numerics
            )
        collect()
    first = next(iter(parts.values()))
    with clock.phase("weights") as step:
        wanted = {
            name: Wanted(resident_params(one.lowered), one.files, stage_folders(one.plan_file))
            for name, one in parts.items()
        }
        # Any part's checkpoint has the float weights; a calibration adds tensors, which are those of all targets.
        packed = pack_weights(wanted, first.request.checkpoint.read, writer, step, within_stage(first.request.mesh))
    with clock.phase("write"):
        recording = {name: write_target(one) for name, one in parts.items()}
        for file, path in first.request.checkpoint.tokenizer_files.items():
            shutil.copyfile(path, writer.path(f"tokenizer/{file}"))
        manifests = {name: manifest_of(one.request, one.key, one.plans) for name, one in parts.items()}
        key = fat_key({name: one.key for name, one in parts.items()}) if fat else first.key
        sealed = writer.seal_variants(manifests, key) if fat else {"": writer.seal(manifests[""])}
    golden = {name: golden_run(one.request, one.files, sealed[name], clock.of(name)) for name, one in parts.items()}
    for name, one in parts.items():
        timed = clock.seconds, one.lowered, one.emitter, one.request, recording[name], golden[name][0]
        write_timings(one.files, *timed)
    build_id = writer.publish()
    reports = {
        name: report_of(one, writer.output, sealed[name].build_id, clock, packed, golden[name][1])
        for name, one in parts.items()
    }
    if not fat:
        return replace(reports[""], build_id=build_id)
    return replace(
        next(iter(reports.values())),
        output=writer.output,
        build_id=build_id,
        request_key=key,
        artifact_bytes=bytes_in(writer.output),
        variants=reports,
    )


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
