"""The driver: a checkpoint becomes an artifact."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ingot.backends.cpu.emit import Cpu
from ingot.backends.inductor.emit import Inductor
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.cache import cache_folder, locked
from ingot.contents import manifest_of, write_golden, write_program, write_timings, write_trace
from ingot.debug.golden import InstructionSeconds
from ingot.debug.numerics import NumericsCheck, NumericsReport
from ingot.emitter import Emitter
from ingot.frontend.checkpoint import Checkpoint, check_totality
from ingot.frontend.trace import Limits, trace
from ingot.identity import Document, request_document
from ingot.ir.artifact import EXECUTABLES, NUMERICS, REQUEST, TIMINGS
from ingot.ir.backend import Backend
from ingot.ir.digest import digest_json
from ingot.ir.errors import ArtifactError, CheckpointError, OptionError, TargetError
from ingot.ir.json_text import parse_json
from ingot.ir.layout import Layout
from ingot.ir.mesh import check_mesh
from ingot.ir.plan import FEW_TOKENS, BucketClass, Plans
from ingot.ir.plugins import load_user_ops
from ingot.ir.program import Model, ModelSpec, Program
from ingot.ir.target import Target
from ingot.ir.trace import LEVELS, Level
from ingot.merged_plans import merged_plans, resident_params
from ingot.models.architectures import ARCHITECTURES, read_spec
from ingot.packing import Packed, pack_weights
from ingot.passes.base import PassContext
from ingot.passes.choose_layouts import SecondCopy, second_copies
from ingot.passes.manager import OnPass, run_pipeline
from ingot.passes.pipeline import Phase, edit_pipeline, pipeline_for
from ingot.publish import ArtifactWriter
from ingot.runtime.artifact import Artifact

BACKENDS: Mapping[str, Callable[[], Backend]] = {
    "cpu": Cpu,
    "inductor": Inductor,
    "reference": Reference,
    "rowwise": Rowwise,
}
# What each choice of --backend lets compete; every op has a provider in each.
BACKEND_CHOICES: Mapping[str, tuple[str, ...]] = {
    "auto": ("inductor", "cpu", "reference", "rowwise"),
    "inductor": ("inductor", "cpu", "reference", "rowwise"),
    "reference": ("reference", "rowwise"),
}
MODEL_DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_MAX_BATCH = 64
DEFAULT_MAX_TOKENS = 2048

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CompileReport:
    """What a compile did. Times in seconds by phase; `regions` counts the calls of regions over all bucket classes.

    `no_golden_run` says why nothing was run at the end, which leaves `ingot verify` nothing to repeat; "" when it was.
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


@dataclass
class _Clock:
    """Seconds by phase, in order."""

    progress: Progress
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
    target: str = "auto",
    backend: str = "auto",
    dtype: str = "auto",
    max_seq_len: int | None = None,
    max_batch: int = DEFAULT_MAX_BATCH,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    deterministic: bool = False,
    weight_budget: float = 1.0,
    passes: str = "default",
    mesh: Mapping[str, int] | None = None,
    trace: Level = "full",
    jobs: int | None = None,
    check_numerics: bool = False,
    progress: Progress = lambda phase, done, total: None,
    on_pass: OnPass | None = None,
) -> CompileReport:
    """Compile the Hugging Face checkpoint folder `checkpoint` into the artifact folder `output`.

    `max_seq_len` bounds prompt and output together (default: what the model was made for), `max_batch` the sequences
    and `max_tokens` the tokens of one step. `dtype` "auto" keeps the checkpoint's. `deterministic` uses only providers
    whose results do not depend on the batch. `weight_budget` bounds the resident weights, in multiples of their size:
    above 1.0 a weight may be kept in a second layout. `passes` edits the pipeline ("default,-name,name{option=value}").
    `mesh` gives the axes of a mesh their sizes, as in {"tp": 2}; such an artifact can be inspected and not served yet.
    `trace` says what the artifact keeps of the passes: "full" the program before and after each, "summary" what they
    did without programs, "none" nothing. `jobs` bounds the compiler processes (default: the cores). `check_numerics`
    measures every pass against its numerics contract on sample inputs, and raises NumericsError when one breaks it.
    `progress` is called with a phase's name, steps done and all; `on_pass` with the program before and after each pass,
    the latter's `history` ending in the pass's record.

    Nothing is visible at `output` until all of it is there. Raises IngotError.
    """
    # The place first: nobody wants to learn after minutes that it cannot be written.
    with ArtifactWriter(output) as writer:
        request = Request.read(
            checkpoint,
            target=target,
            backend=backend,
            dtype=dtype,
            max_seq_len=max_seq_len,
            max_batch=max_batch,
            max_tokens=max_tokens,
            deterministic=deterministic,
            weight_budget=weight_budget,
            passes=passes,
            mesh=mesh,
            trace=trace,
        )
        return _compile(request, writer, _Clock(progress), jobs, on_pass, check_numerics=check_numerics)


def compile_cached(
    checkpoint: str | Path,
    *,
    jobs: int | None = None,
    progress: Progress = lambda phase, done, total: None,
    **options: Any,
) -> Path:
    """The artifact of `checkpoint` in the cache, by its `request_key`; compiled first when it is not there.

    `options` are those of `compile_model`. Two processes that ask for the same artifact compile it once.
    """
    request = Request.read(checkpoint, **options)
    key = request.key(request.trace())
    folder = cache_folder("artifacts")
    with locked(folder / f"{key}.lock"):
        path = folder / f"{key}.ingot"
        if not path.exists():
            with ArtifactWriter(path) as writer:
                _compile(request, writer, _Clock(progress), jobs)
    return path


@dataclass(frozen=True)
class Request:
    """A compile, read and checked: nothing is traced or compiled yet.

    `options` are those of `compile_model` with what stands for "auto" and for defaults filled in, as JSON values: with
    them the same request is read again.
    """

    checkpoint: Checkpoint
    options: Mapping[str, Any]
    spec: ModelSpec
    limits: Limits
    target: Target
    backends: tuple[Backend, ...]
    deterministic: bool
    weight_budget: float
    passes: str
    mesh: dict[str, int]

    @staticmethod
    def read(
        checkpoint: str | Path,
        *,
        target: str = "auto",
        backend: str = "auto",
        dtype: str = "auto",
        max_seq_len: int | None = None,
        max_batch: int = DEFAULT_MAX_BATCH,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        deterministic: bool = False,
        weight_budget: float = 1.0,
        passes: str = "default",
        mesh: Mapping[str, int] | None = None,
        trace: Level = "full",
    ) -> "Request":
        """Read the checkpoint's configuration and check every option against it. Raises IngotError."""
        if backend not in BACKEND_CHOICES:
            raise OptionError(f"unknown backend '{backend}'", expected=", ".join(BACKEND_CHOICES))
        if dtype not in ("auto", *MODEL_DTYPES):
            raise OptionError(f"unknown dtype '{dtype}'", expected=", ".join(("auto", *MODEL_DTYPES)))
        if trace not in LEVELS:
            raise OptionError(f"unknown level of the trace '{trace}'", expected=", ".join(LEVELS))
        axes = check_mesh(mesh or {})
        edit_pipeline(passes, pipeline_for(axes))
        machine = Target.detect("cpu") if target == "auto" else Target.detect(target)
        if machine.device != "cpu":
            raise TargetError(f"target '{target}' is not supported yet", expected="auto or cpu")
        backends = tuple(BACKENDS[name]() for name in BACKEND_CHOICES[backend])
        for one in backends:
            one.toolchain()  # a missing compiler is said now, and not after tracing
        opened = Checkpoint.open(checkpoint)
        spec = read_spec(opened.config, str(opened.folder / "config.json"))
        if dtype != "auto":
            spec = replace(spec, dtype=getattr(torch, dtype))
        limits = Limits(spec.max_position if max_seq_len is None else max_seq_len, max_batch, max_tokens)
        _check_limits(limits, spec)
        _check_budget(weight_budget)
        return Request(
            checkpoint=opened,
            options={
                "target": machine.device,
                "backend": next(name for name, among in BACKEND_CHOICES.items() if among == BACKEND_CHOICES[backend]),
                "dtype": next(name for name in MODEL_DTYPES if getattr(torch, name) is spec.dtype),
                "max_seq_len": limits.max_seq_len,
                "max_batch": limits.max_batch,
                "max_tokens": limits.max_tokens,
                "deterministic": deterministic,
                "weight_budget": float(weight_budget),
                "passes": passes,
                "mesh": axes,
                "trace": trace,
            },
            spec=spec,
            limits=limits,
            target=machine,
            backends=backends,
            deterministic=deterministic,
            weight_budget=weight_budget,
            passes=passes,
            mesh=axes,
        )

    @staticmethod
    def of_artifact(artifact: Artifact, checkpoint: str | Path | None = None) -> "Request":
        """The request that `artifact` answers, on the checkpoint folder that it was compiled from unless another is
        given. Raises ArtifactError where it does not say, and CheckpointError where there is no such checkpoint."""
        made: Any = artifact.read_json(REQUEST)
        if not isinstance(made, dict) or not isinstance(made.get("options"), dict):
            raise ArtifactError(f"{REQUEST} is malformed", where=str(artifact.folder))
        folder = checkpoint or _compiled_from(artifact)
        try:
            return Request.read(folder, **made["options"])
        except TypeError as error:
            raise ArtifactError(f"{REQUEST} is malformed: {error}", where=str(artifact.folder)) from None

    def trace(self) -> Model:
        """The traced model, with every tensor of the checkpoint accounted for. Raises CheckpointError."""
        stored = {name: info.dtype for name, info in self.checkpoint.tensors.items()}
        model = trace(self.spec, self.limits, stored)
        definition = ARCHITECTURES[self.spec.architecture].definition
        params = model.params.values()
        consumed = frozenset().union(*(param.recipe.sources() for param in params))
        expected: dict[str, tuple[int, ...]] = {}
        for param in params:
            for name, shape in param.recipe.source_shapes(param.type.bind({})).items():
                # Several slices of one tensor: it reaches as far as the last one.
                expected[name] = tuple(map(max, shape, expected.get(name, shape)))
        check_totality(self.checkpoint, consumed, definition.ignored(self.spec.dims), expected)
        return model

    def pipeline(self) -> tuple[Phase, ...]:
        return edit_pipeline(self.passes, pipeline_for(self.mesh))

    def identity(self, model: Model) -> Document:
        """All that decides the artifact. Reads every byte of the checkpoint once."""
        # Those left out are there with what they stand for: the target, the backends that compete, the pipeline.
        options = {name: value for name, value in self.options.items() if name not in ("target", "backend", "passes")}
        return request_document(
            self.checkpoint, self.spec.config, model.entries, self.pipeline(), self.backends, self.target, options
        )

    def key(self, model: Model) -> str:
        """The `request_key`."""
        return digest_json(self.identity(model))

    def buckets(self) -> tuple[BucketClass, ...]:
        """The bucket classes: one for decode where there are kernels for few tokens, one for all that is larger.

        In deterministic mode one lowering serves every step, since another could round otherwise.
        """
        largest = self.limits.max_tokens
        if self.deterministic or not any(backend.emits_library for backend in self.backends):
            return (BucketClass(name="any", tokens=(1, largest)),)
        decode = BucketClass(name="decode", tokens=(1, min(FEW_TOKENS, largest)))
        if largest <= FEW_TOKENS:
            return (decode,)
        return (decode, BucketClass(name="extend", tokens=(FEW_TOKENS + 1, largest)))


def _compiled_from(artifact: Artifact) -> str:
    """The checkpoint's folder when the artifact was compiled."""
    path = artifact.folder / TIMINGS
    timings: Any = parse_json(path.read_bytes()) if path.is_file() else {}
    folder = timings.get("checkpoint") if isinstance(timings, dict) else None
    if not isinstance(folder, str) or not Path(folder).is_dir():
        raise CheckpointError(
            "the checkpoint that the artifact was compiled from is not there",
            where=str(folder or artifact.folder),
            hint="name its folder with --checkpoint",
        )
    return folder


def _check_limits(limits: Limits, spec: ModelSpec) -> None:
    for name, value, hi in (
        ("max_seq_len", limits.max_seq_len, spec.max_position),
        ("max_batch", limits.max_batch, 1 << 16),
        ("max_tokens", limits.max_tokens, 1 << 20),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= hi:
            raise OptionError(f"{name} is {value!r}", expected=f"a whole number from 1 to {hi}")
    if limits.max_tokens < limits.max_batch:
        raise OptionError(
            f"max_tokens {limits.max_tokens} is below max_batch {limits.max_batch}",
            expected="room for one token of every sequence in a step",
        )


def _check_budget(budget: float) -> None:
    if not isinstance(budget, int | float) or isinstance(budget, bool) or not 1.0 <= budget <= len(Layout):
        raise OptionError(
            f"the weight budget is {budget!r}", expected=f"a number from 1.0 to {len(Layout)}.0, copies of the weights"
        )


def _compile(
    request: Request,
    writer: ArtifactWriter,
    clock: _Clock,
    jobs: int | None,
    on_pass: OnPass | None = None,
    *,
    check_numerics: bool = False,
) -> CompileReport:
    if jobs is not None and jobs < 1:
        raise OptionError(f"jobs is {jobs}", expected="at least 1")
    workers = jobs or len(os.sched_getaffinity(0))
    load_user_ops()
    with Emitter({backend.name: backend for backend in request.backends}, request.target, workers) as emitter:
        if not request.deterministic:
            emitter.warm_up()
        with clock.phase("trace"):
            model = request.trace()
        with clock.phase("identify"):
            identity = request.identity(model)
        check = NumericsCheck(model, request.limits, request.checkpoint.read) if check_numerics else None
        if check is not None:
            with clock.phase("numerics"):
                check.begin()
        hooks = [hook for hook in (on_pass, check and check.on_pass) if hook]
        with clock.phase("passes and executables") as step:
            emitter.on_done = step
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
                mesh=request.mesh,
                measure=emitter.measure,
            )
            pipeline = request.pipeline()
            lowered = {
                entry: run_pipeline(model, context, request.buckets(), pipeline, entry=entry, on_pass=_all_of(hooks))
                for entry in model.entries
            }
        with clock.phase("weights") as step:
            params = resident_params(lowered)
            packed = pack_weights(params, request.checkpoint.read, writer, step, request.mesh)
        with clock.phase("write"):
            plans = merged_plans(lowered)
            write_program(writer, model, lowered, plans)
            if check is not None:
                writer.write_json(NUMERICS, check.report().to_json())
            for executable in plans.all_executables():
                folder = f"exe/{request.target.name}/{executable.id}"
                for name in executable.files:
                    shutil.copyfile(emitter.folders[executable.id] / name, writer.path(f"{folder}/{name}"))
            for name, path in request.checkpoint.tokenizer_files.items():
                shutil.copyfile(path, writer.path(f"tokenizer/{name}"))
            key = digest_json(identity)
            writer.write_json(REQUEST, {"options": request.options, "identity": identity})
            writer.write_json(EXECUTABLES, {one.id: emitter.documents[one.id] for one in plans.all_executables()})
            recording = write_trace(writer, request.options["trace"], model, lowered)
            sealed = writer.seal(manifest_of(request, key, plans))
        ran: dict[str, InstructionSeconds] | str = "artifacts for a mesh cannot be served yet"
        if not request.mesh:
            with clock.phase("golden run"):
                ran = write_golden(writer, sealed)
        seconds, no_golden_run = ({}, ran) if isinstance(ran, str) else (ran, "")
        write_timings(writer, clock.seconds, lowered, emitter, request.checkpoint.folder, recording, seconds)
        build_id = writer.publish()
    copies = second_copies(params)
    report = _report(request, writer, key, build_id, clock, plans, emitter, packed, copies, no_golden_run)
    return replace(report, numerics=check.report()) if check is not None else report


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
        for name, count in bucket.nodes_per_provider().items():
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
        artifact_bytes=sum(file.stat().st_size for file in writer.output.rglob("*") if file.is_file()),
    )
