"""The programs of a compile, in order, and the passes that lead from each to the next."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ingot.compile.request import Request
from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.artifact.record import Rewrite
from ingot.ir.backend import LibraryBuilder, RegionCompiler, signature_of
from ingot.ir.errors import ArtifactError, VerifyError
from ingot.ir.parse import parse_program
from ingot.ir.program import Model, Program, Region, Stage
from ingot.ir.text import print_program
from ingot.passes.base import Pass, PassContext
from ingot.passes.dce import eliminate_dead_code
from ingot.passes.manager import run_pass
from ingot.passes.pipeline import Phase
from ingot.passes.rewrite import Rewriter
from ingot.runtime.loading.artifact import Artifact

NO_BOUND = 1 << 30  # more rewrites than any program allows


@dataclass(eq=False)
class Link:
    """A program of a compile, with the pass that made it.

    `one` is the pass, and `previous` has the program before it. Both are None for the program traced from the model
    definition. `under` is the stage of the pipeline whose rules the program must obey. `ends_phase` is True for the
    last pass of a phase. Its result has reached the stage `under`.
    """

    entry: str
    make: Callable[[], Program] = field(repr=False)
    one: Pass | None = None
    previous: "Link | None" = None
    bucket: BucketClass | None = None
    under: Stage = Stage.TRACED
    ends_phase: bool = False
    context: PassContext | None = None

    @property
    def name(self) -> str:
        return "trace" if self.one is None else self.one.name

    @cached_property
    def program(self) -> Program:
        return self.make()

    @cached_property
    def computation(self) -> str:
        """Return the program's text without its backends, source lines and stage.

        Programs with equal texts compute the same.
        """
        body = print_program(self.program).partition("\n")[2]
        return re.sub(r"( @\w+)?(  # .*)?$", "", body, flags=re.MULTILINE)

    @property
    def before(self) -> Program:
        """Return a copy of the program that the pass received."""
        assert self.previous is not None
        program = self.previous.program.copy()
        program.bucket = self.bucket
        return program

    def again(self, fuel: int = NO_BOUND) -> tuple[Program, tuple[Rewrite, ...]]:
        """Run the installed version of this pass again, on the program before it. Return the new program and its
        rewrites.

        `fuel` is the maximum number of rewrites.
        """
        assert self.one is not None and self.context is not None
        return rewritten(self.one, self.before, self.context, self.under, reached=self.ends_phase, fuel=fuel)


def rewritten(
    one: Pass, program: Program, context: PassContext, under: Stage, *, reached: bool = False, fuel: int = NO_BOUND
) -> tuple[Program, tuple[Rewrite, ...]]:
    """Run the pass `one` on a copy of a program. Return the new program and its rewrites.

    `fuel` is the maximum number of rewrites. The result must obey the rules of the stage `under`. With `reached`, the
    result is marked as a program of that stage.

    With limited fuel, a result that breaks the rules is returned too. A partly rewritten program can still be
    interpreted.
    """
    try:
        result, record = run_pass(one, program, context, under=under, reached=reached, fuel=fuel)
        return result, record.rewrites
    except VerifyError:
        if fuel == NO_BOUND:
            raise
    rewriter = Rewriter(program.copy(), fuel)
    one.run(rewriter, context)
    eliminate_dead_code(rewriter.program)
    return rewriter.program, rewriter.rewrites()


@dataclass(frozen=True)
class Chain:
    """The programs of a compile in order, from the traced program to the last one.

    They belong to one entry (such as `main` or a draft model) and one bucket class (a range of step sizes).
    """

    entry: str
    bucket: BucketClass
    links: tuple[Link, ...]


def chains(artifact: Artifact, request: Request, model: Model, final: Sequence[Program]) -> list[Chain]:
    """Return the programs of a compile in order, as one chain for each entry and bucket class.

    An entry is a program of the model, such as `main` or a draft model. A bucket class is a range of step sizes.
    `final` are the programs after the last pass.

    The other programs are read from the artifact's trace when they are needed. Without a trace, the pipeline runs
    again. Raises ArtifactError if the trace has other passes than the pipeline.
    """
    texts = texts_of(artifact)
    skipped_fusions = request.rounding(model).skipped()
    ends = {(program.name, program.bucket.name if program.bucket else ""): program for program in final}
    found = []
    for entry, traced in model.entries.items():
        context = replace(context_of(request, request.pipeline(), traced), skipped_fusions=skipped_fusions)
        first = Link(entry, _parser(texts[entry, None, 0]) if texts else _given(traced))
        shared = [first]
        for phase in request.pipeline():
            for one in () if phase.by_bucket else phase.passes:
                last = one is phase.passes[-1]
                shared.append(_link(shared[-1], one, None, phase.stage, last, context, texts, len(shared)))
        for bucket in request.buckets(traced):
            narrowed, links = replace(context, bucket=bucket), list(shared)
            for phase in request.pipeline():
                for one in phase.passes if phase.by_bucket and phase.stage < Stage.PLANNED else ():
                    last = one is phase.passes[-1]
                    links.append(_link(links[-1], one, bucket, phase.stage, last, narrowed, texts, len(links)))
            planned = request.pipeline()[-1]
            if (program := ends.get((entry, bucket.name))) is not None:
                one, before = planned.passes[-1], links[-1]
                links.append(Link(entry, _given(program), one, before, bucket, planned.stage, True, narrowed))
            found.append(Chain(entry, bucket, tuple(links)))
    return found


def _given(program: Program) -> Callable[[], Program]:
    return lambda: program


Texts = Mapping[tuple[str, str | None, int], str]


def texts_of(artifact: Artifact) -> Texts:
    """Return the texts of the programs in an artifact's trace, the record of its compile.

    Keys are (entry, bucket class, index). Index 0 is the traced program, and i the result of the i-th pass. The bucket
    class is None for programs of all classes. Each text but the first begins with a line that names the pass. The
    mapping is empty if the trace has no programs.
    """
    texts: dict[tuple[str, str | None, int], str] = {}
    shared: dict[str, int] = {}
    place: dict[tuple[str, str | None], int] = {}
    try:
        for one in artifact.trace:
            entry, bucket = one.entry, one.bucket
            if (entry, None, 0) not in texts:
                texts[entry, None, 0] = artifact.trace.traced_text(entry)
            if bucket is None:
                shared[entry] = place[entry, None] = shared.get(entry, 0) + 1
            else:
                place[entry, bucket] = place.get((entry, bucket), shared.get(entry, 0)) + 1
            texts[entry, bucket, place[entry, bucket]] = f"pass {one.name}\n{one.after_text}"
    except ArtifactError:
        return {}
    return texts


def _parser(text: str) -> Callable[[], Program]:
    return lambda: parse_program(text)


def _link(
    previous: Link,
    one: Pass,
    bucket: BucketClass | None,
    under: Stage,
    ends: bool,
    context: PassContext,
    texts: Texts,
    number: int,
) -> Link:
    link = Link(previous.entry, lambda: link.again()[0], one, previous, bucket, under, ends, context)
    if texts:
        key = (previous.entry, bucket.name if bucket else None, number)
        heading, _, text = texts.get(key, "").partition("\n")
        if heading != f"pass {one.name}":
            raise ArtifactError(
                f"pass {number} of the trace is '{heading.removeprefix('pass ')}'",
                expected=f"'{one.name}', which the pipeline of this installation has there",
                hint="compile the model again",
            )
        link.make = _parser(text)
    return link


def context_of(
    request: Request, pipeline: Sequence[Phase], entry: Program, bucket: BucketClass | None = None
) -> PassContext:
    """Return the facts that passes need to run again on the program `entry`, such as the target and the limits.

    `bucket` is the bucket class (a range of step sizes) to lower for. It is None for passes that run before the program
    is split by class. No pass compiles anything with this context, since bisecting only interprets programs.
    """
    backends = request.backends
    if not any(one.name == "form-regions" for phase in pipeline for one in phase.passes):
        backends = tuple(item for item in backends if not isinstance(item, RegionCompiler))
    return PassContext(
        target=request.target,
        max_seq_len=request.limits.max_seq_len,
        max_batch=request.limits.max_batch,
        max_tokens=request.limits.max_tokens,
        backends=backends,
        deterministic=request.deterministic,
        bucket=bucket,
        buckets=request.buckets(entry),
        weight_budget=request.weight_budget,
        emit=emit_nothing,
        emit_library=build_nothing,
        decided={one.key: one for one in request.decided},
        mesh=request.mesh,
        calibrated=None if request.calibration is None else request.calibration.weights,
    )


def emit_nothing(regions: Sequence[Region]) -> Mapping[str, Executable]:
    """Return executables without code for regions. Nothing is compiled, since bisecting only interprets regions.

    Keys are names of regions. Each executable has the region's inputs and outputs.
    """
    found = {}
    for region in regions:
        inputs, outputs = signature_of(region)
        found[region.name] = Executable(
            id=region.name, backend=region.backend, inputs=inputs, outputs=outputs, files=()
        )
    return found


def build_nothing(backend: LibraryBuilder) -> Executable:
    return Executable(id=backend.name, backend=backend.name, inputs=(), outputs=(), files=())
