"""Print a region of the final program: its body, its calls and its executable."""

from dataclasses import dataclass, replace
from typing import Any

from ingot.cli.console import console, facts, print_program_text, print_table, size_text
from ingot.cli.views.filter import Filter, excerpt
from ingot.cli.views.lines import ProgramLines
from ingot.cli.views.plan import read_plans, steps_of
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import OptionError
from ingot.runtime.loading.artifact import Artifact


@dataclass(frozen=True)
class Call:
    """A call of a region in a program's text.

    `name` is the value that the call defines. `instruction` is the index of its instruction in the plan. `text` is its
    line.
    """

    name: str
    instruction: int
    layers: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class RegionView:
    """A region (calls compiled together) to print.

    `program` is the title of the program that contains it, such as "decode". `body` is the text inside the region.
    `calls` are the program's calls of the region.
    """

    name: str
    program: str
    backend: str
    body: str
    calls: tuple[Call, ...]
    executable: Executable

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "program": self.program,
            "backend": self.backend,
            "body": self.body,
            "calls": [
                {"name": one.name, "instruction": one.instruction, "layers": list(one.layers), "text": one.text}
                for one in self.calls
            ],
            "executable": self.executable.model_dump(mode="json"),
        }


def regions_of(artifact: Artifact, asked: str, wanted: Filter) -> list[RegionView]:
    """Return the regions that `asked` names: "r0" in all programs, or "r0@extend" in one program.

    The filter's layers select calls of these regions. Its op and name select lines inside them. Raises OptionError if
    nothing matches.
    """
    name, _, title = asked.partition("@")
    plans = read_plans(artifact)
    executables = plans.executables
    found: dict[tuple[str, str], list[Call]] = {}
    programs: dict[str, ProgramLines] = {}
    called: dict[tuple[str, str], Executable] = {}
    for step in steps_of(artifact, plans):
        region = step.line.op.removeprefix("region.")
        if region == step.line.op:
            continue
        programs[step.bucket] = step.program
        called[step.bucket, region] = executables[step.instruction.target.removeprefix("exe.")]
        layers = tuple(sorted(step.line.layers))
        found.setdefault((step.bucket, region), []).append(Call(step.line.name, step.index, layers, step.line.text))
    names = [f"{region}@{bucket}" for bucket, region in found]
    if not names:
        raise OptionError(
            "the program has no regions", where="--region", hint="`ingot inspect --choices` shows backends"
        )
    keys = [key for key in found if key[1] == name and title in ("", key[0])]
    if not keys:
        raise OptionError(f"there is no region '{asked}'", where="--region", expected=", ".join(names))
    views = [_view(programs[key[0]], key[1], found[key], called[key], wanted) for key in keys]
    if not any(view.calls and view.body for view in views):
        raise OptionError(f"nothing of region '{asked}' matches", where=str(wanted))
    return [view for view in views if view.calls and view.body]


def _view(program: ProgramLines, region: str, calls: list[Call], executable: Executable, wanted: Filter) -> RegionView:
    body = ProgramLines(program.title, tuple(line for line in program.lines if line.region == region))
    texts = [line.text for line in body.lines]
    in_body = replace(wanted, layers=None)
    if in_body:
        texts = [shown.text for shown in excerpt(body, in_body)]
    in_layers = Filter(wanted.layers)
    left = tuple(call for call in calls if in_layers.holds(call.name, (), call.layers))
    return RegionView(
        region, program.title, executable.backend, "".join(f"{text}\n" for text in texts), left, executable
    )


def print_regions(views: list[RegionView]) -> None:
    out = console()
    for view in views:
        exe = view.executable
        print_table(
            out,
            facts(
                [
                    ("region", f"{view.name} of {view.program}, by {view.backend}"),
                    ("executable", exe.id),
                    ("files", ", ".join(exe.files) or "none"),
                    ("workspace", f"{size_text(exe.workspace)} in the largest step"),
                    *(("called by" if not index else "", _call_text(one)) for index, one in enumerate(view.calls)),
                ]
            ),
        )
        out.print()
        print_program_text(view.body)
        out.print()


def _call_text(call: Call) -> str:
    layers = ", ".join(map(str, call.layers))
    place = f"layer {layers}" if len(call.layers) == 1 else f"layers {layers}" if layers else "no layer"
    return f"%{call.name}, instruction {call.instruction}, {place}"
