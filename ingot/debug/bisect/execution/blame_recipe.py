"""Find the weight of an artifact that differs from its recipe's result, and the recipe step at fault.

Wrong steps and wrong packing are distinguished. Each step is executed once on its actual inputs, in order, and its
result is checked independently; the first wrong one is at fault. Then the artifact's bytes are compared with the last
result.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ingot.debug.bisect.execution.recipe_meanings import step_problem
from ingot.debug.bisect.execution.tensor_check import first_changed, same_bits
from ingot.ir.errors import IngotError
from ingot.ir.program import ParamSpec
from ingot.ir.recipe import STEPS, Recipe, Results

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class WeightFault:
    """The first wrong weight of an artifact, with the name `param`.

    A weight's recipe makes it from checkpoint tensors in steps. `step` is the faulty step, None if none is known.
    `packed` is True if all steps are right when they run now, so only the artifact's stored bytes are wrong. `text`
    describes the fault.
    """

    param: str
    step: Recipe | None
    packed: bool
    text: str


def weight_fault(
    params: Mapping[str, ParamSpec],
    packed: Mapping[str, torch.Tensor],
    index: Mapping[str, Mapping[str, Any]],
    read: Read,
) -> WeightFault | None:
    """Make each weight again from the checkpoint and compare it with the artifact's weight. Return the first fault;
    None if there is none.

    `params` maps names of weights to their types and recipes. `packed` maps these names to the artifact's tensors.
    `index` is the content of weights.json. `read` takes a name and returns that checkpoint tensor.
    """
    checked: dict[Recipe, Results] = {}  # the results of steps that several params share
    for name, spec in params.items():
        if name not in packed or name not in index:
            return WeightFault(name, None, True, "it is not among the artifact's weights")
        if index[name].get("recipe") != str(spec.recipe):
            text = f"it was packed by {index[name].get('recipe')!s:.200}, the program's recipe is {spec.recipe!s:.200}"
            return WeightFault(name, None, True, text)
        memo = dict(checked)
        for step in _in_order(spec.recipe):
            known = replace(step, output="") in checked
            try:
                step.execute(read, memo)
                problem = None if known else _problem(step, memo, read)
            except IngotError as error:
                return WeightFault(name, step, False, str(error.what))
            except (
                RuntimeError,
                LookupError,
                TypeError,
                ValueError,
            ) as error:  # torch raises these for shapes that do not fit
                return WeightFault(name, step, False, f"{_called(step)} raises {type(error).__name__}: {error}")
            if problem:
                return WeightFault(name, step, False, f"the result of {_called(step)} is wrong: {problem}")
        made = spec.recipe.execute(read, memo).contiguous()
        if problem := spec.type.mismatch(made, {}):
            return WeightFault(name, spec.recipe, False, f"the result of {_called(spec.recipe)} is wrong: {problem}")
        checked.update({step: memo[step] for step in spec.recipe.shared_steps()})
        if problem := _unlike(packed[name], made):
            likely, how = _explained(spec.recipe, packed[name], memo, read)
            return WeightFault(name, likely, True, f"the artifact has {problem}{how}")
    return None


def _in_order(recipe: Recipe) -> list[Recipe]:
    """Return the steps of a recipe in a valid order. Each step comes once, after the steps that make its inputs."""
    found: dict[Recipe, None] = {}

    def visit(one: Recipe) -> None:
        for part in one.inputs:
            visit(part)
        # One result represents the step: execution does not depend on which one it is.
        if not any(replace(known, output="") == replace(one, output="") for known in found):
            found[one] = None

    visit(recipe)
    return list(found)


def _problem(step: Recipe, memo: Mapping[Recipe, Results], read: Read) -> str | None:
    return step_problem(step.step, _given(step, memo, read), dict(step.attrs), memo[replace(step, output="")])


def _given(step: Recipe, memo: Mapping[Recipe, Results], read: Read) -> list[torch.Tensor]:
    """Return the input tensors of a recipe step.

    The input of a source step is a checkpoint tensor, which `read` returns. The inputs of any other step are results of
    earlier steps. `memo` maps these steps to their results.
    """
    if step.step == "source":
        return [read(str(step.attr("name")))]
    return [part.execute(read, dict(memo)) for part in step.inputs]


def _unlike(found: torch.Tensor, made: torch.Tensor) -> str | None:
    if found.dtype is not made.dtype or found.shape != made.shape:
        return f"{found.dtype} {list(found.shape)}, the recipe makes {made.dtype} {list(made.shape)}"
    if same_bits(found, made):
        return None
    place = first_changed(made, found)
    return f"{float(found[place]):.7g} at {list(place)}, the recipe makes {float(made[place]):.7g}"


def _called(step: Recipe) -> str:
    attrs = ", ".join(f"{name}={value}" for name, value in step.attrs)
    return f"the step {step.step}({attrs})"[:200]


def _explained(
    recipe: Recipe, found: torch.Tensor, memo: Mapping[Recipe, Results], read: Read
) -> tuple[Recipe | None, str]:
    """Explain a wrong weight `found`: search for a recipe step that makes these bytes when it is executed wrongly.

    A wrong execution is, for example, one with swapped inputs. `memo` maps each step to its right result.

    Return the step and a description of the wrong execution. If nothing explains the bytes, the description is "". The
    step is then the recipe's only step, or None if the recipe has several.
    """
    steps = _in_order(recipe)
    for step in reversed(steps):
        args = _given(step, memo, read)
        for how, result in _otherwise(step, args):
            if isinstance(memo[replace(step, output="")], dict) != isinstance(result, dict):
                continue
            later = steps[steps.index(step) :]
            kept = {one: value for one, value in memo.items() if not any(one == replace(s, output="") for s in later)}
            kept[replace(step, output="")] = result
            try:
                other = recipe.execute(read, kept).contiguous()
            except IngotError:
                continue
            if other.dtype is found.dtype and other.shape == found.shape and same_bits(other, found):
                return step, f": the result of {_called(step)} {how}"
    return (steps[-1] if len(steps) == 1 else None), ""


def _otherwise(step: Recipe, args: list[torch.Tensor]) -> Iterator[tuple[str, Results]]:
    """Execute a recipe step in plausible wrong ways, such as with swapped inputs or along another axis.

    Yield a description and the result of each way. `args` are the step's input tensors.
    """
    attrs = dict(step.attrs)
    dim = attrs.get("dim")

    def done(how: str, other: list[torch.Tensor], **changed: Any) -> Iterator[tuple[str, Results]]:
        try:
            yield how, STEPS[step.step](other, {**attrs, **changed})
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
            return  # an execution that fails cannot have made the stored bytes

    if len(args) == 1:
        yield "left out", args[0]
    if len(args) == 1 and args[0].dim() == 2:
        yield from done("of the transposed tensor", [args[0].t().contiguous()])
    for first in range(len(args)):
        for second in range(first + 1, len(args)):
            swapped = list(args)
            swapped[first], swapped[second] = args[second], args[first]
            yield from done(f"with its inputs {first} and {second} swapped", swapped)
    if isinstance(dim, int) and args:
        for other in range(args[0].dim() + (step.step == "stack")):
            if other != dim:
                yield from done(f"along axis {other}", args, dim=other)
    if step.step == "slice":
        begin, end = int(str(attrs["begin"])), int(str(attrs["end"]))
        for off in (-1, 1, begin - end, end - begin):
            yield from done(f"{off:+d} elements off", args, begin=begin + off, end=end + off)
        if "every" in attrs and isinstance(dim, int) and args:
            runs = args[0].shape[dim] // int(str(attrs["every"]))
            yield from done(
                "of the whole, not of each run", args, begin=begin * runs, end=end * runs, every=args[0].shape[dim]
            )
    if step.step == "repeat" and isinstance(dim, int):
        yield "of the whole, not of each slice", torch.cat([args[0]] * int(str(attrs["times"])), dim)
    if step.step == "affine":
        yield from done("without its offset", args, offset=0.0)
        yield from done("without its scale", args, scale=1.0)
        yield from done("with the offset's sign turned", args, offset=-float(str(attrs["offset"])))
