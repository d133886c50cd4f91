"""Check that a model uses every tensor of a checkpoint or ignores it by a rule, and that no tensor is missing."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.safetensors_header import TensorInfo
from ingot.ir.errors import CheckpointError
from ingot.ir.listing import listed
from ingot.ir.recipe import Recipe

FLOAT_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def expected_shapes(made: Iterable[tuple[Recipe, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Return the shape that each checkpoint tensor must have, by tensor name. `made` has pairs of a param's recipe (how
    it is made from checkpoint tensors) and the param's shape."""
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
    """Check that every tensor of the checkpoint is used or ignored by a rule, and that no weight of the model is
    missing.

    consumed        the names of the tensors that the model's recipes read
    ignored_rules   regular expressions for tensors to ignore; each must match a whole name
    expected        the shape that each tensor must have, by name
    floating        the names of tensors that must be float16, bfloat16, float32 or float64; default: all of `expected`
    spelled         returns, for a tensor's name in the checkpoint, the names that the rules are matched with
    nearest         a hint for the error: other prefixes that would fit more names; empty if there are none

    Raises one CheckpointError that lists every tensor that is missing, extra, or of a wrong shape or dtype.
    """
    problems = unfit_tensors(checkpoint.tensors, consumed, ignored_rules, expected, floating, spelled)
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
    """Return the problems of a checkpoint's `tensors`, one text for each kind: missing, extra, wrong shapes, wrong
    dtypes. Empty if there are none.

    `consumed` are the names that the model's recipes read. `expected` has the required shapes by name. Tensors named in
    `floating` must be float16, bfloat16, float32 or float64; default: all of `expected`. `ignored_rules` are regular
    expressions for tensors to ignore. They are matched with each name that `spelled` returns for a tensor.
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
        f"{len(names)} {kind}:\n{listed(names)}"
        for kind, names in (
            ("missing from the checkpoint", missing),
            ("extra, neither used nor ignored by a rule", extra),
            ("of another shape than the configuration says", shapes),
            ("not floating point (float16, bfloat16, float32, float64)", types),
        )
        if names
    ]
