"""Merge a LoRA adapter into the recipes of a traced model: `W + scale * B @ A`, computed in float32."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.safetensors_header import read_header
from ingot.ir.adapters.folder import TENSORS, Adapter, Factors
from ingot.ir.adapters.names import match_modules
from ingot.ir.program import Model, ParamSpec
from ingot.ir.recipe import Recipe, add, affine, cast, matmul, permute, source
from ingot.ir.types import DTYPE_NAMES
from ingot.ir.weights import linear_sources

# The adapter's tensors are those of a further checkpoint of this name.
ALIAS = "adapter"


def adapter_checkpoint(adapter: Adapter) -> Checkpoint:
    """Return the tensors of an adapter as a checkpoint, for `Checkpoint.with_others`."""
    return Checkpoint(adapter.folder, {}, read_header(adapter.folder / TENSORS), {})


def merge_adapter(model: Model, adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Add the adapter to the recipes of all params that are made of weights which it changes.

    `shapes` has the shapes of all checkpoint tensors, by name. Raises AdapterError if the adapter changes something
    other than linears of the model, or if shapes differ.
    """
    linears = frozenset().union(*map(linear_sources, model.entries.values()))
    factors = match_modules(adapter, {name: shapes[name] for name in sorted(linears) if name in shapes})

    def merged(name: str) -> Recipe:
        one = factors.get(name)
        return source(name) if one is None else _merged(name, one, transposed=adapter.transposed)

    for program in model.entries.values():
        for name, spec in program.params.items():
            if spec.recipe.sources() & factors.keys():
                program.params[name] = _with(spec, spec.recipe.with_sources(merged))


def _merged(name: str, factors: Factors, *, transposed: bool) -> Recipe:
    b, a = (cast(source(f"{ALIAS}:{one}"), torch.float32) for one in (factors.b_name, factors.a_name))
    change = affine(matmul(b, a), factors.scale, 0.0)
    return add(cast(source(name), torch.float32), permute(change, (1, 0)) if transposed else change)


def _with(spec: ParamSpec, recipe: Recipe) -> ParamSpec:
    """Return the param with another recipe, which is cast to the param's dtype at its end."""
    ends = recipe.step == "cast" and recipe.attr("dtype") == DTYPE_NAMES[spec.type.dtype]
    return replace(spec, recipe=recipe if ends else cast(recipe, spec.type.dtype))
