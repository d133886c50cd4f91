"""Faults of recipe steps: a step computes something else from the right tensors, for one weight."""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ingot.ir import recipe as recipes
from ingot.ir.program import ParamSpec
from ingot.ir.recipe import Recipe
from planted.fault import Fault, NoFault, Setup, Truth, replaced

Step = Callable[[list[torch.Tensor], Mapping[str, Any]], Any]
Wrong = Callable[[Step, list[torch.Tensor], Mapping[str, Any]], Any]


def _of_result(change: Callable[[torch.Tensor], torch.Tensor]) -> Wrong:
    return lambda step, args, attrs: change(step(args, attrs))


def _of_part(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Wrong:
    def run(step: Step, args: list[torch.Tensor], attrs: Mapping[str, Any]) -> Any:
        made = step(args, attrs)
        return {**made, part: change(made[part])} if part in made else made

    return run


def _off_by_one(step: Step, args: list[torch.Tensor], attrs: Mapping[str, Any]) -> Any:
    shift = -1 if attrs["begin"] else 1
    moved = {**attrs, "begin": attrs["begin"] + shift, "end": attrs["end"] + shift}
    return step(args, moved) if moved["end"] <= args[0].shape[attrs["dim"]] else step([args[0].roll(1, 0)], attrs)


def _next_row(table: torch.Tensor) -> torch.Tensor:
    return table.roll(-1, 0)


STEPS: Mapping[str, Mapping[str, Wrong]] = {
    "concat": {
        "swapped weights": lambda step, args, attrs: step(args[::-1], attrs),
        "repeated weight": lambda step, args, attrs: (
            step([args[0], *args[:-1]], attrs)
            if len({arg.shape for arg in args}) == 1
            else step([args[0], args[1], args[1]], attrs)
        ),
    },
    "slice": {"slice off by one": _off_by_one},
    "affine": {
        "dropped offset": lambda step, args, attrs: step(args, {**attrs, "offset": 0.0}),
        "wrong scale": lambda step, args, attrs: step(args, {**attrs, "scale": 1.25}),
    },
    "cast": {
        "cast through a narrower type": _of_result(lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)),
        "one row wrong": _of_result(lambda x: torch.cat([x[:1] * 0, x[1:]])),
    },
    "table": {
        "wrong rope section": _of_result(lambda x: x.roll(x.shape[1] // 2, 1)),
        "wrong index": _of_result(_next_row),
    },
    "reshape": {"wrong order": _of_result(lambda x: x.flip(0).contiguous())},
    "repeat": {
        "tiled for repeated": lambda step, args, attrs: torch.cat([args[0]] * attrs["times"], attrs["dim"]),
    },
    "shard": {"wrong segment": _of_result(lambda x: x.flip(0).contiguous())},
    "quantize": {
        "wrong scale": _of_part("scales", lambda x: x * 1.25),
        "wrong zero": _of_part("zeros", lambda x: x + 1),
        "wrong rounding": _of_part("weight", lambda x: x // 2 * 2),
    },
}


def steps_of(recipe: Recipe) -> Iterator[Recipe]:
    yield recipe
    for inner in recipe.inputs:
        yield from steps_of(inner)


def draw(
    setup: Setup,
    params: Mapping[str, ParamSpec],
    all_params: Mapping[str, ParamSpec],
    read: Callable[[str], torch.Tensor],
    draw: random.Random,
) -> Fault:
    """A fault of one step of the recipe of one of `params`; `all_params` are those of earlier programs too."""
    by_step: dict[str, list[tuple[str, Recipe]]] = {}
    for name, spec in params.items():
        for step in steps_of(spec.recipe):
            if step.step in STEPS:
                by_step.setdefault(step.step, []).append((name, step))
    if not by_step:
        raise NoFault(f"no recipe of {setup} computes anything")
    kind = draw.choice(sorted(by_step))
    name, chosen = draw.choice(by_step[kind])
    label = draw.choice(sorted(STEPS[kind]))
    if label == "wrong zero" and "zeros" not in dict.fromkeys(str(one.output) for _, one in by_step[kind]):
        raise NoFault("the format has no zeros")
    own = [other for other, spec in all_params.items() if any(_alike(step, chosen) for step in steps_of(spec.recipe))]
    # A shard is executed once for each rank; what it reads is the same for all.
    given = [inner.execute(read) for inner in chosen.inputs] if not _sharded(chosen) else None
    wrong = _only_for(chosen, given, STEPS[kind][label])
    truth = Truth("recipe", kind, f"{kind} of {name}: {label}", tuple(dict.fromkeys((name, *own))))

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        step = recipes.STEPS[kind]
        with replaced(recipes.STEPS, kind, lambda args, attrs: wrong(step, args, attrs)):
            yield

    return Fault(label, setup, truth, plant)


def _alike(one: Recipe, other: Recipe) -> bool:
    return (one.step, one.inputs, one.attrs) == (other.step, other.inputs, other.attrs)


def _sharded(recipe: Recipe) -> bool:
    return any(step.step == "shard" for inner in recipe.inputs for step in steps_of(inner))


def _only_for(chosen: Recipe, given: list[torch.Tensor] | None, wrong: Wrong) -> Callable[..., Any]:
    """`wrong` where a step gets the arguments of `chosen`."""
    wanted = dict(chosen.attrs)

    def run(step: Step, args: list[torch.Tensor], attrs: Mapping[str, Any]) -> Any:
        same = all(attrs.get(name) == value for name, value in wanted.items())
        if same and given is not None:
            pairs = list(zip(args, given, strict=False))
            same = len(args) == len(given) and all(
                one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
                for one, other in pairs
            )
        return wrong(step, args, attrs) if same and (given is not None) else step(args, attrs)

    return run
