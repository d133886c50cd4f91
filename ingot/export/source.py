"""Read what is exported: an artifact, or a checkpoint with compile options."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ingot.cli.progress import OnProgress, no_progress
from ingot.compile.recorded_request import recorded_request
from ingot.compile.request import Request
from ingot.ir.artifact.manifest_file import MANIFEST
from ingot.ir.errors import ExportError, OptionError
from ingot.ir.mesh import within_stage
from ingot.ir.program import Model, Program, Stage
from ingot.passes.base import PassContext
from ingot.passes.manager import run_pipeline
from ingot.passes.pipeline import Phase
from ingot.runtime.loading.artifact import open_artifact

# Options of a compile that decide nothing of what is exported. With these values, an artifact for a machine that is
# not here can be exported, and no compiler needs to be installed.
_ANY_MACHINE: Mapping[str, Any] = {
    "target": "cpu",
    "backend": "reference",
    "kv_cache_dtype": "auto",
    "kv_cache_scales": "auto",
    "tune": False,
    "tuning_log": None,
    "max_loras": 0,
    "trace": "none",
}


@dataclass(frozen=True)
class Source:
    """A model to export.

    given     the folder or name that the user gave
    request   the request, with the weights of a calibration if there was one
    model     the traced programs
    traced    the request before the calibration: only its checkpoint has no tensors but those of the definition
    """

    given: str
    request: Request
    model: Model
    traced: Request

    def in_dtype(self, dtype: torch.dtype) -> "Source":
        """Return the source with weights and activations in `dtype`.

        Weights that a calibration quantized keep their numbers.
        """
        if self.request.spec.dtype == dtype:
            return self
        request, traced = (replace(one, spec=replace(one.spec, dtype=dtype)) for one in (self.request, self.traced))
        return Source(self.given, request, traced.trace(), traced)

    def program(self, entry: str, stage: Stage) -> Program:
        """Run the passes up to `stage`, and return the program of an entry. Raises OptionError for an unknown entry.

        Up to QUANTIZED, attention is one op over the tokens of a step, and nothing is cached.
        """
        if entry not in self.model.entries:
            raise OptionError(f"no entry '{entry}'", where=self.given, expected=", ".join(self.model.entries))
        request = self.request
        context = PassContext(
            target=request.target,
            max_seq_len=request.limits.max_seq_len,
            max_batch=request.limits.max_batch,
            max_tokens=request.limits.max_tokens,
            backends=request.backends,
            mesh=within_stage(request.mesh),
            calibrated=None if request.calibration is None else request.calibration.weights,
        )
        phases = tuple(phase for phase in request.pipeline() if _before_lowering(phase, stage))
        return run_pipeline(self.model, context, (), phases, entry=entry, upto=stage).fused


def _before_lowering(phase: Phase, stage: Stage) -> bool:
    return phase.stage <= stage and not phase.by_bucket


def read_source(
    source: str,
    *,
    checkpoint: str | None = None,
    options: Mapping[str, Any] | None = None,
    progress: OnProgress = no_progress,
) -> Source:
    """Read an artifact, a checkpoint folder or a hub name, and trace the model.

    `options` are arguments of `Request.read`, for a checkpoint; an artifact has its own. `checkpoint` replaces the
    checkpoint that an artifact was compiled from. Weights with a calibration are quantized here, or found in the
    cache. Raises IngotError.
    """
    given = {name: value for name, value in (options or {}).items() if value is not None}
    if (Path(source) / MANIFEST).is_file():
        if given:
            raise OptionError(
                f"--{next(iter(given)).replace('_', '-')} with an artifact, which has options of its own",
                where=source,
                hint="export the checkpoint with these options instead",
            )
        request = recorded_request(open_artifact(source), checkpoint, changes=_ANY_MACHINE)
    elif checkpoint is not None:
        raise OptionError("--checkpoint without an artifact", where=source, expected="NAME.ingot")
    else:
        request = Request.read(source, **{**_ANY_MACHINE, **given}, progress=progress)
    progress("trace", 0, 0)
    model = request.trace()
    if request.text is not None:
        progress("calibrate", 0, 0)
        calibrated = request.calibrated(
            model, request.identity(model), lambda done, total: progress("calibrate", done, total)
        )
        return Source(source, calibrated, model, request)
    return Source(source, request, model, request)


def refuse_mesh(source: Source, what: str) -> None:
    """Raise ExportError for a model that is divided over a mesh, which `what` cannot express."""
    if source.request.mesh:
        raise ExportError(
            f"{what} of a model for a mesh of {source.request.mesh}",
            where=source.given,
            expected="a model for one device",
            hint="export the checkpoint, or an artifact that was compiled without --mesh",
        )
