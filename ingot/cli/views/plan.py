"""Print the instructions of a plan, and the memory that they take."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ingot.cli.console import console, facts, print_table, table
from ingot.cli.views.caches import print_caches
from ingot.cli.views.filter import Filter
from ingot.cli.views.lines import Line, ProgramLines, read_programs
from ingot.cli.views.memory import memory_rows
from ingot.cli.views.programs import FINAL
from ingot.ir.artifact.plan import Argument, BucketPlan, DType, Instruction, Plans, Ref
from ingot.ir.artifact.trace import trace_name
from ingot.ir.cache.summary import CacheSummary
from ingot.ir.errors import ArtifactError, OptionError
from ingot.runtime.loading.artifact import Artifact
from ingot.runtime.loading.plan_file import read_plan_file

_EXE_SHOWN = 12  # hexadecimal digits of an executable's id: enough to distinguish a few thousand


def read_plans(artifact: Artifact) -> Plans:
    """Return the plans (instructions) of all entries, such as `main`. Raises ArtifactError if they are malformed.

    For an artifact of several ranks, return the plans of rank 0.
    """
    return read_plan_file(artifact).of(0)


def buckets_of(plans: Plans) -> list[tuple[str, BucketPlan]]:
    """Return (title, plan) of every bucket class (range of step sizes) of every entry.

    A title is, for example, "decode", or "draft@decode" for the entry draft.
    """
    return [(trace_name(key, one.bucket.name), one) for key, plan in plans.plans.items() for one in plan.buckets]


@dataclass(frozen=True)
class Step:
    """An instruction of a plan, with the call that it runs.

    `bucket` is the title of its bucket class (range of step sizes), such as "decode". `index` is its place among the
    instructions of this class. `line` is the line of the call in the text of `program`.
    """

    bucket: str
    index: int
    instruction: Instruction
    line: Line
    program: ProgramLines

    def taken_by(self, wanted: Filter) -> bool:
        """Return whether the instruction matches the filter.

        It matches by the ops that it runs, including the ops in a region. It matches by the name of its call, of a
        result or of a state that it updates.
        """
        ops = self.program.computed_by(self.line)
        names = [self.line.name, *filter(None, (*self.instruction.results, *self.instruction.updates))]
        return any(wanted.holds(name, ops, self.line.layers) for name in names)


def steps_of(artifact: Artifact, plans: Plans) -> Iterator[Step]:
    """Yield all instructions of the plans, each with the line of its call in the program's text.

    Raises ArtifactError if a plan does not have as many instructions as its program has calls.
    """
    programs = {program.title: program for program in read_programs(artifact.read_text(FINAL))}
    for name, bucket in buckets_of(plans):
        calls = [line for line in programs[name].calls() if line.op != "getitem"] if name in programs else []
        if len(calls) != len(bucket.instructions):
            raise ArtifactError(
                f"plan.json has {len(bucket.instructions)} instructions for {name} and {FINAL} {len(calls)} calls",
                where=str(artifact.folder),
            )
        for index, (instruction, line) in enumerate(zip(bucket.instructions, calls, strict=True)):
            yield Step(name, index, instruction, line, programs[name])


def filtered_steps(artifact: Artifact, wanted: Filter) -> list[Step]:
    """Return the instructions that match the filter.

    Raises OptionError if there are none, and for an artifact with pipeline stages.
    """
    plans = read_plans(artifact)
    if any(plan.stage is not None for plan in plans.plans.values()):
        raise OptionError(
            "a filter for the instructions of pipeline stages, which are parts of the program",
            where=str(artifact.folder),
            expected="--plan alone, which shows those of stage 0",
            hint="--program with the filter shows calls of all stages",
        )
    steps = list(steps_of(artifact, plans))
    wanted.check({id(step.program): step.program for step in steps}.values())
    found = [step for step in steps if step.taken_by(wanted)]
    if not found:
        raise OptionError("no instruction matches", where=str(wanted), expected="one that matches all that is given")
    return found


def plan_json(artifact: Artifact, wanted: Filter) -> Any:
    """Return the content of plan.json. With a filter, return a list of the matching instructions.

    In this list, an instruction also has the title of its bucket class ("bucket") and its place in it ("index").
    """
    if not wanted:
        return artifact.read_json("plan.json")
    return [
        {"bucket": step.bucket, "index": step.index, **step.instruction.model_dump(mode="json")}
        for step in filtered_steps(artifact, wanted)
    ]


def print_plan(artifact: Artifact, wanted: Filter) -> None:
    """Print the instructions of every bucket class (range of step sizes), and their memory.

    With a filter, print only the matching instructions.
    """
    plans = read_plans(artifact)
    if wanted:
        rows = [_row(step.bucket, step.index, step.instruction) for step in filtered_steps(artifact, wanted)]
    else:
        rows = [
            _row(name, index, one)
            for name, bucket in buckets_of(plans)
            for index, one in enumerate(bucket.instructions)
        ]
    out = console()
    print_table(out, table(("bucket", "#>", "target", "backend", "arguments", "results", "frees"), rows))
    out.print()
    if not wanted:
        print_table(out, facts(memory_rows(plans)))
        out.print()
        print_caches(out, CacheSummary.of(plans).to_json())
        out.print()
    out.print("name!: a state updated in place    –: a result that nothing uses", style="dim", markup=False)


def _row(bucket: str, index: int, one: Instruction) -> tuple[object, ...]:
    named = [f"{name}={_argument(value)}" for name, value in one.kwargs.items()]
    return (
        bucket,
        index,
        one.target[: len("exe.") + _EXE_SHOWN] if one.target.startswith("exe.") else one.target,
        one.backend,
        ", ".join([*map(_argument, one.args), *named]),
        ", ".join([*(name or "–" for name in one.results), *(f"{name}!" for name in one.updates)]),
        ", ".join(one.frees),
    )


def _argument(value: Argument) -> str:
    if isinstance(value, Ref):
        return f"%{value.ref}"
    if isinstance(value, DType):
        return value.dtype
    return repr(list(value) if isinstance(value, tuple) else value)
