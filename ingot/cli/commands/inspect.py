"""`ingot inspect`: show the contents of an artifact, on any machine. It imports neither torch nor a compiler."""

from typing import Annotated

from cyclopts import Parameter

from ingot.cli.commands import ArtifactFolder, AsJson, Flag, Variant
from ingot.cli.console import print_json
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
    quantization: Flag = False,
    layer: str | None = None,
    op: str | None = None,
    name: str | None = None,
    variant: Variant = None,
    json: AsJson = False,
) -> None:
    """Show the contents of an artifact: a summary, or one part of it.

    Parameters
    ----------
    program
        The final program. --layer, --op and --name alone show it too.
    stage
        The program at the end of a stage: TRACED, NORMAL, CACHED, FUSED, LOWERED, PLANNED; also QUANTIZED and SHARDED
        if the compile had these stages.
    after_pass
        The program after a pass, as in cse, choose-backends@decode or cse@NORMAL.
    region
        A region (calls compiled together), as in r0 or r0@decode: its program, its calls, its executable.
    plan
        The instructions that a step executes.
    weights
        The weights: types, places in files, and recipes (how each is made from the checkpoint).
    choices
        The backend of each call and its cost, the other candidates, and the backends that refused with their reasons.
    quantization
        How weights were quantized with a calibration text: what that changed, and by how much each linear.
    layer
        Only one layer, as in 3, or several, as in 2-5.
    op
        Only calls of an op, as in linear or ingot.linear, and the weights that it reads.
    name
        Only values with this name, which may contain * and ?.
    """
    from ingot.cli.views.choices import choices_json, print_choices
    from ingot.cli.views.filter import Filter
    from ingot.cli.views.plan import plan_json, print_plan
    from ingot.cli.views.programs import final_texts, print_programs, programs_json, texts_of_pass, texts_of_stage
    from ingot.cli.views.quantization import print_quantization, quantization_json
    from ingot.cli.views.regions import print_regions, regions_of
    from ingot.cli.views.summary import print_summary, summary
    from ingot.cli.views.weights import print_weights, weights_json
    from ingot.runtime.loading.artifact import open_artifact

    parts = {
        "--program": program,
        "--stage": stage,
        "--pass": after_pass,
        "--region": region,
        "--plan": plan,
        "--weights": weights,
        "--choices": choices,
        "--quantization": quantization,
    }
    asked = [option for option, value in parts.items() if value not in (None, False)]
    if len(asked) > 1:
        raise OptionError(f"{' and '.join(asked)} together", expected="one of them")
    wanted = Filter.of(layer, op, name)
    opened = open_artifact(artifact, variant=variant)
    match asked[0] if asked else "--program" if wanted else "":
        case "--region":
            shown = regions_of(opened, str(region), wanted)
            print_json([one.to_json() for one in shown]) if json else print_regions(shown)
        case "--plan":
            print_json(plan_json(opened, wanted)) if json else print_plan(opened, wanted)
        case "--weights":
            print_json(weights_json(opened, wanted)) if json else print_weights(opened, wanted)
        case "--choices":
            print_json(choices_json(opened, wanted)) if json else print_choices(opened, wanted)
        case "--quantization":
            print_json(quantization_json(opened)) if json else print_quantization(opened)
        case "":
            facts = summary(opened)
            print_json(facts) if json else print_summary(facts)
        case _:
            if stage is not None:
                texts = texts_of_stage(opened, stage)
            elif after_pass is not None:
                texts = texts_of_pass(opened, after_pass)
            else:
                texts = final_texts(opened)
            print_json(programs_json(texts, wanted)) if json else print_programs(texts, wanted)
