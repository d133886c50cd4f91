"""A model brought through the pipeline pass by pass with nothing compiled, and its logits at every step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ingot.backends.inductor.emit import Inductor
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.frontend.trace import Limits, trace
from ingot.ir.backend import Backend, signature_of
from ingot.ir.harness import InterpreterRun, MeshRun, Run, load_params, teacher_forced
from ingot.ir.plan import BucketClass, Executable
from ingot.ir.program import Model, Program, Region
from ingot.ir.record import Numerics, PassRecord
from ingot.ir.target import Target
from ingot.ir.tolerances import TOLERANCES, compare
from ingot.models.architectures import read_spec
from ingot.passes.base import PassContext
from ingot.passes.manager import Lowered, run_pipeline
from ingot.passes.pipeline import PIPELINE, Phase

LIMITS = Limits(max_seq_len=160, max_batch=8, max_tokens=256)
BUCKET = BucketClass(name="any", tokens=(1, LIMITS.max_tokens))
BACKENDS: tuple[Backend, ...] = (Inductor(), Reference(), Rowwise())
CHUNK = 11  # tokens of a sequence in a step: cuts pages and prompts at odd places
# How many times worse than the program before a ROUNDING pass may be, against float64 (architecture, section 3).
ROUNDING_FACTOR = 1.25


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
        "backends": BACKENDS,
        "emit": emit_nothing,
        "bucket": BUCKET,
    }
    return PassContext(**{**fields, **changes})


def traced(config: Mapping[str, Any], limits: Limits = LIMITS, **stored: torch.dtype) -> Model:
    """The traced model of a config.json. No weight is read."""
    return trace(read_spec(config), limits, stored)


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


@dataclass(frozen=True)
class Logits:
    """What a program computes for the same requests: in its own dtypes, and in float64."""

    found: torch.Tensor
    exact: torch.Tensor

    @property
    def error(self) -> torch.Tensor:
        return (self.found.double() - self.exact).abs()


def logits_of(
    program: Program,
    read: Callable[[str], torch.Tensor],
    requests: Sequence[Sequence[int]],
    chunk: int = CHUNK,
) -> Logits:
    """Teacher-forced logits of all positions of all requests, one after the other: [positions, vocab].

    A program on a mesh is run by all its ranks.
    """
    results = []
    for exact in (False, True):
        run: Run = (
            MeshRun.load(program, read, exact=exact)
            if program.mesh
            else InterpreterRun(program, load_params(program.params, read), exact=exact)
        )
        results.append(torch.cat(teacher_forced(program.input_types(), run, requests, chunk=chunk, seed=3)))
    return Logits(*results)


def broken_contract(numerics: Numerics, before: Logits, after: Logits, dtype: torch.dtype) -> str | None:
    """How a pass broke its numerics contract, in words; None when it kept it. `dtype` is the model's."""
    # What a program means is its float64 interpretation, and no pass may change that, whatever it does to rounding.
    # Logits sum products of sums: 100 times the table's float64 tolerance, which is for single ops, is 1e-10.
    if problem := compare(after.exact, before.exact, torch.float64, factor=100):
        return f"the meaning changed: {problem}"
    if numerics is Numerics.EXACT:
        if torch.equal(after.found, before.found):
            return None
        worst = float((after.found.double() - before.found.double()).abs().max())
        return f"declared exact, but logits differ by up to {worst:.3g}"
    if numerics is not Numerics.ROUNDING:
        return f"numerics {numerics} have no contract that logits could show"
    tolerance = TOLERANCES[dtype]
    allowed = ROUNDING_FACTOR * before.error.max() + tolerance.atol + tolerance.rtol * before.exact.abs()
    excess = after.error / allowed
    if bool((excess <= 1).all()):  # NaN is not
        return None
    return f"the error is {float(after.error.max()):.3g}, before {float(before.error.max()):.3g}"
