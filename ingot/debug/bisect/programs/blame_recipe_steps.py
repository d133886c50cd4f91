"""Check that the recipes of a pass's new params execute correctly, before the pass itself is blamed."""

import re
from dataclasses import replace

from ingot.debug.bisect.case import Case
from ingot.debug.bisect.execution.recipe_meanings import step_problem
from ingot.debug.bisect.verdict import Kind, Verdict
from ingot.ir.mesh import ranks
from ingot.ir.program import Program
from ingot.ir.recipe import Recipe, Results


def wrong_step(case: Case, before: Program, after: Program) -> Verdict | None:
    """Check the weights that a pass added. Return a verdict on the first recipe step with a wrong result; None if all
    are right.

    A recipe makes a weight from checkpoint tensors in steps. Weights of `after` are checked if `before` has none with
    an equal recipe.
    """
    known = {spec.recipe for spec in before.params.values()}
    for name, spec in after.params.items():
        if spec.recipe in known:
            continue
        recipe = spec.recipe.for_rank(ranks(after.mesh)[-1]) if after.mesh else spec.recipe
        memo: dict[Recipe, Results] = {}
        recipe.execute(case.read, memo)
        for step, result in memo.items():  # each after the steps that it depends on
            args = [part.execute(case.read, memo) for part in step.inputs]
            if step.step == "source":
                args = [case.read(str(step.attr("name")))]
            if problem := step_problem(step.step, args, dict(step.attrs), result):
                layer = re.search(r"\blayers\.(\d+)\.", name)
                return Verdict(
                    Kind.RECIPE,
                    blamed=step.step,
                    entry=after.name,
                    node=name,
                    tensor=name,
                    layer=int(layer[1]) if layer else None,
                    found=f"the result of {str(replace(step, inputs=()))[:200]} is wrong: {problem}",
                )
    return None
