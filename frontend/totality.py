"""Check that a model uses every tensor of a checkpoint or ignores it by a rule, and that no tensor is missing."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.name_ranges import joined
from ingot.frontend.safetensors_header import TensorInfo
from ingot.ir.errors import CheckpointError
from ingot.ir.listing import listed
from ingot.ir.recipe import Recipe

FLOAT_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def expected_shapes(made: Iterable[tuple[Recipe, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Return the shape that each checkpoint tensor must have, by tensor name.

    `made` has a pair for each parameter of the model: the recipe that makes it from checkpoint tensors, and its shape.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for recipe, whole in made:
        for name, shape in recipe.source_shapes(whole).items():
            # With several slices of one tensor, it extends to the end of the last one.
            expected[name] = tuple(map(max, shape, expected.get(name, shape)))
    return expected


def check_totality(
    checkpoint: Checkpoint,
    consumed: Collection[str],
    ignored_rules: Sequence[str],
    expected: Mapping[str, tuple[int, ...]],
    floating: Collection[str] | None = None,
    *,
    spelled: Callable[[str], Iterable[str]] = lambda name: (name,),
    nearest: str = "",
) -> None:
    """Check that the model uses or ignores every tensor of the checkpoint, and that no needed tensor is missing.

    Of a checkpoint with quantized weights, a weight counts as one tensor of its shape. Tensors that store no weight
    count by themselves.

    consumed        names of the tensors from which the model's parameters are made
    ignored_rules   regular expressions of the names of ignored tensors; each must match a whole name
    expected        tensor name -> the shape that it must have
    floating        names of tensors that must be float16, bfloat16, float32 or float64; None: all in `expected`
    spelled         function: tensor name in the checkpoint -> the names that the rules are matched with
    nearest         a hint for the error: which other prefixes would match more names; "": there are none

    Raises one CheckpointError for all tensors that are missing, extra, or of a wrong shape or dtype.
    """
    problems = unfit_tensors(checkpoint.logical.tensors, consumed, ignored_rules, expected, floating, spelled)
    if problems:
        raise CheckpointError(
            "the checkpoint's tensors do not fit the model that its config.json describes\n" + "\n".join(problems),
            where=str(checkpoint.folder),
            expected="every tensor used or ignored by a rule, every weight of the model present",
            hint="check that config.json and the tensor files are from the same model and complete"
            + (f"; {nearest}" if nearest else ""),
        )


def unfit_tensors(
    tensors: Mapping[str, TensorInfo],
    consumed: Collection[str],
    ignored_rules: Sequence[str],
    expected: Mapping[str, tuple[int, ...]],
    floating: Collection[str] | None = None,
    spelled: Callable[[str], Iterable[str]] = lambda name: (name,),
) -> list[str]:
    """Return the problems of a checkpoint's tensors: one text for each kind of problem.

    The kinds are missing tensors, extra tensors, wrong shapes and wrong dtypes. A kind that does not occur has no text.

    tensors         tensor name -> its dtype and shape in the checkpoint
    consumed        names of the tensors from which the model's parameters are made
    ignored_rules   regular expressions of the names of ignored tensors; each must match a whole name
    expected        tensor name -> the shape that it must have
    floating        names of tensors that must be float16, bfloat16, float32 or float64; None: all in `expected`
    spelled         function: tensor name in the checkpoint -> the names that the rules are matched with
    """
    needed = set(consumed) | expected.keys()
    rules = [re.compile(rule) for rule in ignored_rules]
    missing = [
        name + (f" {list(expected[name])}" if name in expected else "") for name in sorted(needed - tensors.keys())
    ]
    unclaimed = sorted(tensors.keys() - set(consumed))
    extra = [
        f"{name} {list(tensors[name].shape)}"
        for name in unclaimed
        if not any(rule.fullmatch(spelling) for rule in rules for spelling in spelled(name))
    ]
    shapes = [
        f"{name}: expected {list(shape)}, found {list(tensors[name].shape)}"
        for name, shape in sorted(expected.items())
        if name in tensors and tensors[name].shape != tuple(shape)
    ]
    types = [
        f"{name}: found {str(tensors[name].dtype).removeprefix('torch.')}"
        for name in sorted(expected if floating is None else floating)
        if name in tensors and tensors[name].dtype not in FLOAT_DTYPES
    ]
    return [
        f"{len(names)} {kind}:\n{listed(joined(names))}"
        for kind, names in (
            ("missing from the checkpoint", missing),
            ("extra, neither used nor ignored by a rule", extra),
            ("of another shape than the configuration says", shapes),
            ("not floating point (float16, bfloat16, float32, float64)", types),
        )
        if names
    ]
