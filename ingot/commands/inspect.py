"""`ingot inspect`: what stands in an artifact, on any machine. It imports neither torch nor a compiler."""

from typing import Annotated

from cyclopts import Parameter

from ingot.commands import ArtifactFolder, AsJson, Flag
from ingot.console import print_json
from ingot.ir.errors import OptionError


def inspect_artifact(
    artifact: ArtifactFolder,
    /,
    *,
    program: Flag = False,
    stage: str | None = None,
    after_pass: Annotated[str | None, Parameter(name="--pass")] = None,
    region: str | None = None,
    plan: Flag = False,
    weights: Flag = False,
    choices: Flag = False,
    layer: str | None = None,
    op: str | None = None,
    name: str | None = None,
    json: AsJson = False,
) -> None:
    """Show what an artifact holds: a summary, or one part of it.

    Parameters
    ----------
    program
        The final program, which --layer, --op and --name without another choice show too.
    stage
        The program at the end of a stage: TRACED, NORMAL, CACHED, FUSED, LOWERED, PLANNED; QUANTIZED and SHARDED where
        the compile passed through them.
    after_pass
        The program as a pass left it: cse, choose-providers@decode, cse@NORMAL.
    region
        A region, as r0 or r0@decode: what it computes, who calls it, its executable.
    plan
        The instructions that a step executes.
    weights
        The weights: types, places and recipes.
    choices
        Who computes each call, at which cost, who else would have, and who refused why.
    layer
        Only what belongs to a layer, 3, or to several, 2-5.
    op
        Only what calls an op, as linear or ingot.linear, and the weights that it reads.
    name
        Only values with such a name, which may hold * and ?.
    """
    from ingot.commands import views
    from ingot.commands.views.filter import Filter
    from ingot.runtime.artifact import open_artifact

    parts = {
        "--program": program,
        "--stage": stage,
        "--pass": after_pass,
        "--region": region,
        "--plan": plan,
        "--weights": weights,
        "--choices": choices,
    }
    asked = [option for option, value in parts.items() if value not in (None, False)]
    if len(asked) > 1:
        raise OptionError(f"{' and '.join(asked)} together", expected="one of them")
    wanted = Filter.of(layer, op, name)
    opened = open_artifact(artifact)
    match asked[0] if asked else "--program" if wanted else "":
        case "--region":
            shown = views.regions_of(opened, str(region), wanted)
            print_json([one.to_json() for one in shown]) if json else views.print_regions(shown)
        case "--plan":
            print_json(views.plan_json(opened, wanted)) if json else views.print_plan(opened, wanted)
        case "--weights":
            print_json(views.weights_json(opened, wanted)) if json else views.print_weights(opened, wanted)
        case "--choices":
            print_json(views.choices_json(opened, wanted)) if json else views.print_choices(opened, wanted)
        case "":
            summary = views.summary(opened)
            print_json(summary) if json else views.print_summary(summary)
        case _:
            if stage is not None:
                texts = views.texts_of_stage(opened, stage)
            elif after_pass is not None:
                texts = views.texts_of_pass(opened, after_pass)
            else:
                texts = views.final_texts(opened)
            print_json(views.programs_json(texts, wanted)) if json else views.print_programs(texts, wanted)
