"""A model brought through the pipeline pass by pass with nothing compiled, and its logits at every step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.backends.gloo.emit import Gloo
from ingot.backends.inductor.emit import Inductor
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.compile.request import Request
from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.trace import Limits, trace
from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.artifact.record import PassRecord
from ingot.ir.backend import Backend, signature_of
from ingot.ir.machine.target import Target
from ingot.ir.numerics.contracts import Measured, measure
from ingot.ir.numerics.harness import InterpreterRun, load_params, rank_params
from ingot.ir.program import Model, Program, Region
from ingot.models.architectures import read_spec
from ingot.passes.base import PassContext
from ingot.passes.manager import Lowered, run_pipeline
from ingot.passes.pipeline import PIPELINE, Phase

LIMITS = Limits(max_seq_len=160, max_batch=8, max_tokens=256)
BUCKET = BucketClass(name="any", tokens=(1, LIMITS.max_tokens))
BACKENDS: tuple[Backend, ...] = (Inductor(), Reference(), Rowwise())
CHUNK = 11  # tokens of a sequence in a step: cuts pages and prompts at odd places


def emit_nothing(regions: Sequence[Region]) -> Mapping[str, Executable]:
    """Executables with the right signatures and no files, for pipelines whose regions are only interpreted."""
    found = {}
    for region in regions:
        inputs, outputs = signature_of(region)
        found[region.name] = Executable(
            id=f"exe_{region.name}", backend=region.backend, inputs=inputs, outputs=outputs, files=()
        )
    return found


def pass_context(limits: Limits = LIMITS, **changes: Any) -> PassContext:
    """A context for a CPU and all backends that compiles nothing; `changes` are fields of PassContext."""
    fields: dict[str, Any] = {
        "target": Target.detect("cpu"),
        "max_seq_len": limits.max_seq_len,
        "max_batch": limits.max_batch,
        "max_tokens": limits.max_tokens,
        "backends": (*BACKENDS, Gloo()) if changes.get("mesh") else BACKENDS,
        "emit": emit_nothing,
        "bucket": BUCKET,
    }
    return PassContext(**{**fields, **changes})


def traced(config: Mapping[str, Any], limits: Limits = LIMITS, **stored: torch.dtype) -> Model:
    """The traced model of a config.json. No weight is read."""
    return trace(read_spec(config), limits, stored)


def interpreted(checkpoint: Path, **options: Any) -> InterpreterRun:
    """The interpreter on the traced entry `main` of a checkpoint, which `compile_model` is given with these options."""
    program = Request.read(checkpoint, **options).trace().entries["main"]
    return InterpreterRun(program, load_params(program.params, Checkpoint.open(checkpoint).read))


@dataclass(frozen=True)
class Step:
    """The program that a pass left; for the traced program itself there is no record."""

    name: str
    program: Program
    record: PassRecord | None = None


def staged(
    model: Model, pipeline: tuple[Phase, ...] = PIPELINE, limits: Limits = LIMITS, **changes: Any
) -> tuple[list[Step], Lowered]:
    """The traced program and what each pass made of it, in order; and all that the pipeline returned."""
    steps = [Step("trace", model.entries["main"])]
    bucket = BucketClass(name="any", tokens=(1, limits.max_tokens))
    lowered = run_pipeline(
        model,
        pass_context(limits, **{"bucket": None, **changes}),
        (bucket,),
        pipeline,
        on_pass=lambda _, after: steps.append(Step(after.history[-1].name, after, after.history[-1])),
    )
    return steps, lowered


def logits_of(
    program: Program,
    read: Callable[[str], torch.Tensor],
    requests: Sequence[Sequence[int]],
    chunk: int = CHUNK,
) -> Measured:
    """Teacher-forced logits of all positions of all requests, one after the other: [positions, vocab]."""
    return measure(program, rank_params(program, read), requests, chunk=chunk, seed=3).logits
