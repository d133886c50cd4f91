"""The pass manager: it runs the pipeline and verifies, counts, times and records every pass."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.record import PassRecord, Snapshot
from ingot.ir.backend import RegionCompiler
from ingot.ir.errors import NumericsError, PassError, VerifyError
from ingot.ir.mesh import mesh_text
from ingot.ir.program import Model, ParamSpec, Program, Stage, op_counts
from ingot.ir.text import print_program
from ingot.ir.verify import verify
from ingot.passes.base import Pass, PassContext
from ingot.passes.blame import input_error, is_ours, raised, user_pass_error
from ingot.passes.dce import eliminate_dead_code
from ingot.passes.pipeline import PIPELINE, Phase
from ingot.passes.resident import peak_between, resident
from ingot.passes.rewrite import Rewriter

# Called with the program before and after a pass; `after.history[-1]` is the pass's record.
OnPass = Callable[[Program, Program], None]


@dataclass
class Lowered:
    """The result of the pipeline for one program of the model, such as `main`.

    fused      the program before it is copied for each bucket class (a range of step sizes)
    programs   name of bucket class -> program after all passes
    records    the records of all passes that ran, in order
    """

    fused: Program
    programs: dict[str, Program] = field(default_factory=dict)
    records: list[PassRecord] = field(default_factory=list)

    def params(self) -> dict[str, ParamSpec]:
        """Return all weights that any program in `programs` reads, by name. Serving keeps them in memory."""
        return {name: spec for program in self.programs.values() for name, spec in program.params.items()}


def run_pass(
    one: Pass,
    program: Program,
    context: PassContext,
    *,
    under: Stage,
    reached: bool = False,
    fuel: int | None = None,
) -> tuple[Program, PassRecord]:
    """Run one pass on a copy of `program`, and verify the result. Return the new program and the record of the pass.

    under     stage of the pipeline whose rules the result must obey
    reached   whether the new program is then at this stage
    fuel      most rewrites that the pass may apply; None: no limit. With a limit, the pass may apply fewer than
              expected.

    Raises VerifyError if the result or `program` breaks a rule. Raises UserPassError if a pass of another package
    fails, and InternalError if a pass of Ingot fails.
    """
    rewriter = Rewriter(program.copy(), fuel, context.skipped_fusions.get((program.name, one.name), {}))
    held, begin = resident(), time.perf_counter()
    try:
        one.run(rewriter, context)
    except Exception as error:
        if earlier := input_error(one, program, under):
            raise earlier from error
        if (said := raised(one, error)) is error:
            raise
        raise said from error
    eliminate_dead_code(rewriter.program)
    seconds, peak = time.perf_counter() - begin, peak_between(held, resident())
    try:
        verify(rewriter.program, under=under, after=one.name)
    except VerifyError as error:
        raise input_error(one, program, under) or error from None
    if reached:
        rewriter.program.stage = under
    record = PassRecord(
        name=one.name,
        entry=program.name,
        options=one.options(),
        source_hash=one.source_hash(),
        bucket=context.bucket.name if context.bucket else None,
        stage=under.name,
        rewrites=rewriter.rewrites(),
        refusals=tuple(rewriter.refusals),
        op_count_diff=_op_count_diff(program, rewriter.program),
        numerics=one.numerics,
        seconds=seconds,
        peak_bytes=peak,
        before=_snapshot(program),
        after=Snapshot(rewriter.program, print_program),
    )
    owed = context.expected.get(one.name, 0) - rewriter.excused if fuel is None else 0
    if record.matches < owed:
        raise PassError(
            f"pass {one.name} matched {record.matches} times",
            where=f"program {program.name}",
            expected=f"at least {owed}, from the model's layers and flags",
        )
    rewriter.program.history = (*program.history, record)
    return rewriter.program, record


def _op_count_diff(before: Program, after: Program) -> dict[str, int]:
    old, new = op_counts(before), op_counts(after)
    names = sorted(old.keys() | new.keys())
    return {name: new.get(name, 0) - old.get(name, 0) for name in names if new.get(name, 0) != old.get(name, 0)}


def _snapshot(program: Program) -> Snapshot:
    """Return a snapshot of the program for the record of a pass.

    If the program has not changed since the previous pass, it is the snapshot of that pass. So no program is printed
    twice.
    """
    last = program.history[-1].after if program.history else None
    return last if last is not None and last.of(program) else Snapshot(program, print_program)


def _run_phase(
    phase: Phase, program: Program, context: PassContext, records: list[PassRecord], on_pass: OnPass | None
) -> Program:
    for one in phase.passes:
        before = program
        with _attributed(one):
            program, record = run_pass(one, before, context, under=phase.stage, reached=one is phase.passes[-1])
            records.append(record)
            if on_pass is not None:
                on_pass(before, program)
    if not phase.passes:  # without a pass, `program` is still the caller's object
        program = program.copy()
    eliminate_dead_code(program)
    program.stage = phase.stage
    if not phase.passes:
        verify(program)
        return program
    with _attributed(phase.passes[-1]):
        verify(program, after=phase.passes[-1].name)
    return program


@contextmanager
def _attributed(one: Pass) -> Iterator[None]:
    """Turn a VerifyError or NumericsError in the `with` block into UserPassError if the pass is of another package."""
    try:
        yield
    except (VerifyError, NumericsError) as error:
        if is_ours(one):
            raise
        raise user_pass_error(one, error) from error


def run_pipeline(
    model: Model,
    context: PassContext,
    buckets: tuple[BucketClass, ...],
    pipeline: tuple[Phase, ...] = PIPELINE,
    *,
    entry: str = "main",
    upto: Stage = Stage.PLANNED,
    on_pass: OnPass | None = None,
) -> Lowered:
    """Run the passes of `pipeline` on one program of `model`.

    The first passes run once. Later ones run once for each bucket class (a range of step sizes).

    buckets   all bucket classes
    entry     name of the program, such as "main"
    upto      stage at which to stop
    on_pass   function that is called after each pass with two programs: before the pass and after it. The record of the
              pass is the last item of `history` in the second program.
    """
    context = replace(context, expected=model.expected.get(entry, {}), buckets=buckets)
    if context.mesh and not any(phase.stage is Stage.SHARDED for phase in pipeline):
        raise PassError("the pipeline shards nothing", where=mesh_text(context.mesh), expected="pipeline_for(mesh)")
    if not any(one.name == "form-regions" for phase in pipeline for one in phase.passes):
        # No pass makes regions, so drop the backends that compute regions.
        others = tuple(item for item in context.backends if not isinstance(item, RegionCompiler))
        context = replace(context, backends=others)
    verify(model.entries[entry])
    result = Lowered(model.entries[entry])
    for phase in pipeline:
        if not phase.by_bucket and phase.stage <= upto:
            result.fused = _run_phase(phase, result.fused, context, result.records, on_pass)
    for bucket in buckets if upto >= Stage.LOWERED else ():
        program = result.fused.copy()
        program.bucket = bucket
        for phase in pipeline:
            if phase.by_bucket and phase.stage <= upto:
                narrowed = replace(context, bucket=bucket)
                program = _run_phase(phase, program, narrowed, result.records, on_pass)
        result.programs[bucket.name] = program
    return result
