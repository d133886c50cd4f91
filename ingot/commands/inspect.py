"""`ingot inspect`: what stands in an artifact, on any machine. It imports neither torch nor a compiler."""

from typing import Annotated

from cyclopts import Parameter

from ingot.commands import Flag
from ingot.console import print_json, print_program_text
from ingot.ir.errors import OptionError


def inspect_artifact(
    artifact: str,
    /,
    *,
    stage: str | None = None,
    after_pass: Annotated[str | None, Parameter(name="--pass")] = None,
    plan: Flag = False,
    weights: Flag = False,
    json: Flag = False,
) -> None:
    """Show what an artifact holds: a summary, or one part of it.

    Parameters
    ----------
    artifact
        An artifact folder.
    stage
        The program at the end of a stage: TRACED, NORMAL, CACHED, FUSED, LOWERED, PLANNED.
    after_pass
        The program as a pass left it.
    plan
        The instructions that a step executes.
    weights
        The weights: types, places and recipes.
    json
        As JSON.
    """
    asked = [
        name
        for name, value in (("--stage", stage), ("--pass", after_pass), ("--plan", plan), ("--weights", weights))
        if value not in (None, False)
    ]
    if len(asked) > 1:
        raise OptionError(f"{' and '.join(asked)} together", expected="one of them")

    from ingot.commands import artifact_views as views
    from ingot.runtime.artifact import open_artifact

    opened = open_artifact(artifact)
    if stage is not None or after_pass is not None:
        texts = views.texts_of_stage(opened, stage) if stage else views.texts_of_pass(opened, str(after_pass))
        if json:
            print_json(texts)
        else:
            for text in texts.values():
                print_program_text(text)
    elif plan:
        print_json(opened.read_json("plan.json")) if json else views.print_plan(opened)
    elif weights:
        print_json(opened.read_json("weights.json")) if json else views.print_weights(opened)
    else:
        summary = views.summary(opened)
        print_json(summary) if json else views.print_summary(summary)
