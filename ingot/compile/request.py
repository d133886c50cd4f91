"""Read and check a compile request: the checkpoint, the target and the options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ingot.cli.progress import OnProgress, no_progress
from ingot.compile.adapted_entry import DEFAULT_LORA_RANK, check_loras, with_adapted_entry
from ingot.compile.buckets import bucket_classes
from ingot.compile.calibrating import CalibrationJob, CalibrationResult, OnDone
from ingot.compile.competing import competitors, with_choices
from ingot.compile.format_claims import check_formats
from ingot.compile.identity import Document, request_document
from ingot.compile.request_checks import (
    check_budget,
    check_cache_dtype,
    check_dtype,
    check_limits,
    check_others,
    check_tunable,
)
from ingot.compile.timing.tuning_log import read_log
from ingot.frontend.cache_scales import (
    SCALE_NAMES,
    read_cache_scales,
    scaled_per_token,
    set_cache_scales,
    unused_scales,
)
from ingot.frontend.checkpoint import Checkpoint, read_config
from ingot.frontend.checkpoint_files import name_files
from ingot.frontend.merge_adapter import ALIAS, adapter_checkpoint, merge_adapter
from ingot.frontend.respelling import Respelling, nearest_respelling
from ingot.frontend.totality import check_totality, expected_shapes
from ingot.frontend.trace import Limits, trace
from ingot.frontend.unsupported import name_code, refuse_unsupported
from ingot.hub.source import Source, find_source
from ingot.ir.adapters.folder import Adapter, read_adapter
from ingot.ir.artifact.backend_times import BackendTimes
from ingot.ir.artifact.digest import digest_json
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.trace import LEVELS, Level
from ingot.ir.artifact.tuning import TuningLog
from ingot.ir.backend import Backend, toolchain_of
from ingot.ir.cache.dtype import CACHE_DTYPES
from ingot.ir.errors import OptionError
from ingot.ir.machine.target import Target
from ingot.ir.mesh import check_mesh
from ingot.ir.program import Model, ModelSpec, Program
from ingot.ir.stored.calibrated import ALIAS as CALIBRATED
from ingot.models.architectures import ARCHITECTURES, ignored_fields, read_spec
from ingot.passes.adopt_quantized import AdoptQuantized
from ingot.passes.pipeline import Phase, edit_pipeline, pipeline_for
from ingot.passes.quantize import Quantize
from ingot.passes.select_linears import check_patterns
from ingot.quantizing.calibrate import SCALING_METHODS
from ingot.quantizing.options import QuantizeOptions
from ingot.quantizing.texts import BUILTIN, CalibrationText, read_text
from ingot.rounding.check import RoundingCheck, check_rounding

MODEL_DTYPES = ("float32", "bfloat16", "float16")
# By device. A GPU's step of 256 sequences takes only a few times as long as a step of one, so throughput workloads send
# that many. It is also vLLM's max_num_seqs.
DEFAULT_MAX_BATCH = {"cpu": 64, "cuda": 256}
# By device. Larger matmuls come nearer to a GPU's peak rate: there, a prompt of 4000 tokens is one step.
DEFAULT_MAX_TOKENS = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True)
class Request:
    """A compile request with checked options, before anything is traced or compiled.

    - `origin`: the checkpoint's commit on the hub, as "org/name@COMMIT"; "" for a local folder
    - `spec`: the description of the model
    - `limits`: the sequence length and step sizes
    - `decided`: calls whose backends a tuning log fixes. It is the log of the user, or of an artifact that is compiled
      again
    - `adapter`: a LoRA adapter to merge into the weights
    - `max_loras`, `max_lora_rank`: the number and the largest rank of LoRA adapters on the device at once; 0: none
    - `quantize`: how weights are quantized; None: they keep their numbers
    - `text`: the calibration text; None: there is none
    - `calibration`: the result of the calibration, once it is done
    - `asked`: the backends that the option `backend` names; the compile does not go on without them
    - `dropped`: backends of other packages that the compile goes on without, each with the reason
    - `options`: the arguments of `compile_model` as JSON values, with "auto" and defaults resolved. `Request.read` with
      them returns an equal request
    """

    checkpoint: Checkpoint
    origin: str
    options: Mapping[str, Any]
    spec: ModelSpec
    limits: Limits
    target: Target
    backends: tuple[Backend, ...]
    deterministic: bool
    weight_budget: float
    passes: str
    kv_cache_dtype: str
    scales_per_token: bool
    mesh: dict[str, int]
    tune: bool
    tuning_log: TuningLog | None
    keep_risky_fusions: bool = False
    decided: tuple[BackendTimes, ...] = ()
    adapter: Adapter | None = None
    max_loras: int = 0
    max_lora_rank: int = 0
    quantize: QuantizeOptions | None = None
    text: CalibrationText | None = None
    calibration: CalibrationResult | None = None
    asked: frozenset[str] = frozenset()
    dropped: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def read(
        checkpoint: str | Path,
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
        progress: OnProgress = no_progress,
    ) -> "Request":
        """Read the checkpoint's configuration, check every option of `compile_model`, and return the request.

        The weights of a hub checkpoint are downloaded only after these checks. Raises IngotError.
        """
        if dtype not in ("auto", *MODEL_DTYPES):
            raise OptionError(f"unknown dtype '{dtype}'", expected=", ".join(("auto", *MODEL_DTYPES)))
        if kv_cache_dtype not in CACHE_DTYPES:
            raise OptionError(f"unknown kv_cache_dtype '{kv_cache_dtype}'", expected=", ".join(CACHE_DTYPES))
        if trace not in LEVELS:
            raise OptionError(f"unknown level of the trace '{trace}'", expected=", ".join(LEVELS))
        axes = check_mesh(mesh or {})
        # The checkpoint may add this pass, so that it can be left out.
        edited = edit_pipeline(passes, edit_pipeline(f"default,{AdoptQuantized.name}", pipeline_for(axes)))
        quantizing = QuantizeOptions.read(
            quantize,
            method=quantize_method,
            ignore=quantize_ignore or (),
            overrides=quantize_overrides or {},
            head=quantize_head,
            calibrate=calibrate,
            max_kl=max_kl,
        )
        if quantizing is not None and any(isinstance(one, Quantize) for phase in edited for one in phase.passes):
            raise OptionError("the pass quantize in addition to the option quantize", where="passes")
        machine = Target.named(target)
        check_cache_dtype(kv_cache_dtype, machine)
        competing = competitors(backend, machine, axes)
        backends = competing.backends
        for one in backends:
            toolchain_of(one)  # report a missing compiler before tracing
        log = None if tuning_log is None else read_log(tuning_log, machine)
        if log is not None:
            backends = tuple(with_choices(one, log.given()) for one in backends)
        check_tunable(backends, machine, tune=tune)
        source = find_source(checkpoint, revision, progress)
        config = read_config(source.folder)
        refuse_unsupported(config, source.folder)
        spec = read_spec(config, str(Path(source.folder) / "config.json"))
        check_others(checkpoints or {}, spec)
        others = {alias: find_source(one, None, progress) for alias, one in (checkpoints or {}).items()}
        merged = None if adapter is None else read_adapter(adapter)
        if dtype != "auto":
            spec = replace(spec, dtype=getattr(torch, dtype))
        check_dtype(spec, machine)
        if max_tokens is None:
            max_tokens = DEFAULT_MAX_TOKENS[machine.device]
        if max_batch is None:
            usual = DEFAULT_MAX_BATCH[machine.device]
            max_batch = max_tokens if isinstance(max_tokens, int) and 0 < max_tokens < usual else usual
        limits = Limits(spec.max_position if max_seq_len is None else max_seq_len, max_batch, max_tokens)
        check_limits(limits, spec)
        check_budget(weight_budget)
        max_lora_rank = check_loras(max_loras, max_lora_rank, axes)
        if max_loras and quantizing is not None and quantizing.method in SCALING_METHODS:
            raise OptionError(
                f"max_loras with quantize_method '{quantizing.method}', which scales the inputs of linears",
                expected="a method that keeps the inputs that adapters are made for: rtn or gptq",
            )
        opened = Checkpoint.open(source.fetch(progress))
        per_token = scaled_per_token(opened, kv_cache_dtype, kv_cache_scales)
        further = {alias: Checkpoint.open(one.fetch(progress)) for alias, one in others.items()}
        if quantizing is not None and opened.quantized is not None:
            raise OptionError(
                "quantize with a checkpoint that is quantized already",
                where=str(opened.folder),
                expected="a checkpoint of floating point weights",
                hint="compile it without quantize: its weights are read as they are",
            )
        if max_loras and opened.quantized is not None:
            raise OptionError(
                "max_loras with a quantized checkpoint",
                where=str(opened.folder),
                expected="a checkpoint of floating point weights",
                hint="merge the adapter with --adapter, or compile the float checkpoint",
            )
        if merged is not None:
            further[ALIAS] = adapter_checkpoint(merged)
        if further:
            opened = opened.with_others(further)
        given = edited if quantizing is None else edit_pipeline(f"default,{quantizing.pass_text()}", edited)
        passes_given = [one for phase in given for one in phase.passes]
        check_formats(passes_given, opened, machine, backends, deterministic=deterministic)
        text = None
        if quantizing is not None and quantizing.calibrate is not None:
            text = read_text(quantizing.calibrate, opened.folder, spec.vocab_size, limits.max_seq_len)
        return Request(
            checkpoint=opened,
            origin=source.origin,
            options={
                "target": machine.name,
                "backend": competing.choice,
                "dtype": next(name for name in MODEL_DTYPES if getattr(torch, name) is spec.dtype),
                "kv_cache_dtype": kv_cache_dtype,
                "kv_cache_scales": kv_cache_scales,
                "max_seq_len": limits.max_seq_len,
                "max_batch": limits.max_batch,
                "max_tokens": limits.max_tokens,
                "deterministic": deterministic,
                "weight_budget": float(weight_budget),
                "passes": passes,
                **_quantize_options(quantizing),
                "mesh": axes,
                "trace": trace,
                "tune": tune,
                "tuning_log": None if log is None else log.model_dump(mode="json"),
                "checkpoints": {alias: _again(one) for alias, one in others.items()},
                "keep_risky_fusions": keep_risky_fusions,
                "adapter": None if merged is None else str(merged.folder.absolute()),
                "max_loras": max_loras,
                "max_lora_rank": max_lora_rank,
            },
            spec=spec,
            limits=limits,
            target=machine,
            backends=backends,
            deterministic=deterministic,
            weight_budget=weight_budget,
            passes=passes,
            kv_cache_dtype=kv_cache_dtype,
            scales_per_token=per_token,
            mesh=axes,
            tune=tune,
            tuning_log=log,
            keep_risky_fusions=keep_risky_fusions,
            decided=() if log is None else log.given_calls(),
            adapter=merged,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            quantize=quantizing,
            text=text,
            asked=competing.asked,
            dropped=competing.dropped,
        )

    def sharing(self, other: "Request") -> "Request":
        """Return the request with the opened checkpoint of `other`, a request of the same model for another target."""
        return replace(self, checkpoint=other.checkpoint)

    def without(self, backend: str, reason: str) -> "Request":
        """Return the request without a backend of another package, which `notes` then names with the reason."""
        backends = tuple(one for one in self.backends if one.name != backend)
        return replace(self, backends=backends, dropped={**self.dropped, backend: reason})

    def trace(self) -> Model:
        """Trace the model's definition and return its programs.

        Raises CheckpointError for a tensor that is missing, has a wrong shape, or is not used.
        """
        logical = self.checkpoint.logical
        stored = {name: info.dtype for name, info in logical.tensors.items()}
        model = trace(self.spec, self.limits, stored)
        set_cache_scales(model, read_cache_scales(self.checkpoint))
        if self.adapter is not None:
            merge_adapter(model, self.adapter, {name: info.shape for name, info in logical.tensors.items()})
        definition = ARCHITECTURES[self.spec.architecture].definition
        params = model.params.values()
        consumed = frozenset().union(*(param.recipe.sources() for param in params))
        optional = definition.optional_prefix(self.spec.dims)
        check_totality(
            self.checkpoint,
            consumed,
            (*definition.ignored(self.spec.dims), SCALE_NAMES),
            expected_shapes((param.recipe, param.type.bind({})) for param in params),
            spelled=Respelling.of(model.respelled, optional).spelled,
            nearest=nearest_respelling(consumed, stored, optional),
        )
        logical.store(model)
        if (quantize := self._quantize_pass()) is not None:
            check_patterns(model.entries.values(), quantize.patterns())
        return with_adapted_entry(model) if self.max_loras else model

    def _quantize_pass(self) -> Quantize | None:
        passes = (one for phase in self.pipeline() for one in phase.passes)
        return next((one for one in passes if isinstance(one, Quantize)), None)

    def calibrated(self, model: Model, identity: Document, on_done: OnDone = lambda done, total: None) -> "Request":
        """Quantize the weights with the calibration text, and return the request with the result.

        Without such a text, return this request. `model` is the result of `trace` and `identity` of `identity`.
        `on_done` is called with the finished calls of a program and the total. Raises CalibrationError.
        """
        quantize = self._quantize_pass()
        if self.text is None or self.quantize is None or quantize is None:
            return self
        job = CalibrationJob(model.entries["main"], self.checkpoint, quantize, self.quantize, self.text)
        parts = ("checkpoint", "config", "programs", "calibration", "sources")
        own = {name: self.options[name] for name in _quantize_options(self.quantize)}
        result = job.result(
            {**{name: identity[name] for name in parts}, "options": own, "limits": self.limits.max_seq_len}, on_done
        )
        others = {**self.checkpoint.others, CALIBRATED: result.tensors}
        return replace(self, checkpoint=self.checkpoint.with_others(others), calibration=result)

    def notes(self, model: Model) -> tuple[str, ...]:
        """Return texts for the user about parts of the checkpoint that are ignored, or not read as they are written."""
        config, notes = self.checkpoint.config, []
        if names := [" ".join(name.split())[:60] for name in ignored_fields(config, self.spec)]:
            notes.append(f"fields of config.json that no definition knows, and that are not read: {name_files(names)}")
        if code := name_code(config):
            notes.append(f"code that the checkpoint brings, and that is not run: {code}")
        if text := unused_scales(self.checkpoint, self.kv_cache_dtype, per_token=self.scales_per_token):
            notes.append(text)
        notes += [f"compiled without the backend '{name}': {reason}" for name, reason in self.dropped.items()]
        if model.respelled:
            notes.append(f"names of tensors in which {Respelling.of(model.respelled)}")
        return tuple(notes)

    def pipeline(self) -> tuple[Phase, ...]:
        cache = f"kv_cache_dtype={self.kv_cache_dtype},per_token={str(self.scales_per_token).lower()}"
        given = f"default,insert-paged-kv{{{cache}}}"
        if self.checkpoint.quantized is not None:
            given += f",{AdoptQuantized.name}"
        if self.quantize is not None:
            given += f",{self.quantize.pass_text()}"
        if self.max_loras:
            given += f",insert-adapters{{max_loras={self.max_loras},max_lora_rank={self.max_lora_rank}}}"
        return edit_pipeline(self.passes, edit_pipeline(given, pipeline_for(self.mesh)))

    def rounding(self, model: Model) -> RoundingCheck:
        """Score the rounding errors of the pipeline's fusions with the model's weights.

        With `keep_risky_fusions`, nothing is scored.
        """
        return RoundingCheck(()) if self.keep_risky_fusions else self.score_fusions(model)

    def score_fusions(self, model: Model, folder: str = "") -> RoundingCheck:
        """Score the rounding errors of the pipeline's fusions with the model's weights.

        `check_rounding` describes `folder`.
        """
        passes = [one for phase in self.pipeline() for one in phase.passes]
        return check_rounding(model, passes, self.checkpoint.read, folder)

    def identity(self, model: Model, rounding: RoundingCheck | None = None) -> Document:
        """Return a JSON document of everything that determines the artifact. Reads every byte of the checkpoint once.

        `rounding` is the result of the method `rounding`. None means that it is computed.
        """
        # The options left out are covered by what they resolve to: the target, the competing backends, the pipeline,
        # the digests of the checkpoints, of the adapter and of the calibration text.
        left_out = ("target", "backend", "passes", "checkpoints", "adapter", "calibrate")
        options = {name: value for name, value in self.options.items() if name not in left_out}
        return request_document(
            self.checkpoint,
            self.spec.config,
            model.entries,
            self.pipeline(),
            self.backends,
            self.target,
            options,
            (rounding or self.rounding(model)).decision(),
            None if self.text is None else self.text.digest(),
        )

    def key(self, model: Model) -> str:
        """Return the `request_key`, the compile cache's key: a digest of everything that determines the artifact."""
        return digest_json(self.identity(model))

    def buckets(self, entry: Program) -> tuple[BucketClass, ...]:
        """Return the bucket classes (ranges of step sizes, each compiled on its own) of an entry, smallest steps first.

        An entry is one of the model's programs. If its inputs have no tokens, the size of a step is its number of
        sequences.
        """
        limits = self.limits
        tokens = limits.max_tokens if "T" in entry.dims else limits.max_batch
        return bucket_classes(self.target, self.backends, tokens, limits.max_batch, deterministic=self.deterministic)


def _quantize_options(given: QuantizeOptions | None) -> dict[str, Any]:
    """Return the options of `compile_model` that quantize, as JSON values. `Request.read` accepts them."""
    calibrate = None if given is None else given.calibrate
    return {
        "quantize": None if given is None else given.scheme,
        "quantize_method": "auto" if given is None else given.method,
        "quantize_ignore": [] if given is None else list(given.ignore),
        "quantize_overrides": {} if given is None else dict(given.overrides),
        "quantize_head": given is not None and given.head,
        "calibrate": str(Path(calibrate).absolute()) if calibrate not in (None, BUILTIN) else calibrate,
        "max_kl": None if given is None else given.max_kl,
    }


def _again(source: Source) -> str:
    """Return a path or hub name that finds the checkpoint of `source` from any working folder."""
    return source.origin or str(Path(source.folder).absolute())
