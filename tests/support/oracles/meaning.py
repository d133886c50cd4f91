"""What a program means, as a sorted list of lines without names or order: the reference that diffs are tested against.

It is written apart from `ingot.ir.diff` and much simpler: a digest for each value, from its inputs up.
"""

import hashlib
import json
import operator
from typing import Any

import torch
from torch import fx

from ingot.ir.ops import op_of
from ingot.ir.program import Program, RegionCall, named_arguments, target_name
from ingot.ir.recipe import Recipe
from ingot.ir.types import DTYPE_NAMES


def meaning(program: Program) -> list[str]:
    """Equal for two programs that mean the same, and else not."""
    lines = [f"stage {program.stage.name}", f"bucket {program.bucket}", f"mesh {dict(program.mesh)}"]
    lines += [f"dim {dim}" for dim in program.dims.values()]
    values: dict[fx.Node, Any] = {}
    for node in program.placeholders():
        name = str(node.target)
        match node.meta["kind"]:
            case "param":
                spec = program.params[name]
                line = f"param {spec.type} {spec.split} {_placed(spec.placement)} {_recipe(spec.recipe)}"
            case "state":
                line = f"state {name} {program.states[name]}"
            case _:
                line = f"input {name} {node.meta['type']}"
        lines.append(line)
        values[node] = _digest(line)
    _calls(program, values, lines, "")
    lines += [f"return {name} {values[node]}" for name, node in program.output_nodes().items()]
    return sorted(lines)


def _calls(program: Program, values: dict[fx.Node, Any], lines: list[str], backend: str) -> None:
    for node in program.calls():
        declared = f"{node.meta['type']} {_placed(node.meta.get('placement', ()))}"
        if isinstance(node.target, RegionCall):
            values[node] = _region(node, program, values, lines)
            continue
        if node.target is operator.getitem:
            source, index = node.args
            whole = values[source]
            values[node] = whole[index] if isinstance(whole, tuple) else _digest(f"{whole} item {index}")
            continue
        own = node.meta.get("backend") or backend
        text = f"{target_name(node.target)} {_arguments(node, values)} {declared} {own}"
        values[node] = _digest(text)
        lines.append(text)


def _region(node: fx.Node, program: Program, values: dict[fx.Node, Any], lines: list[str]) -> Any:
    region = program.regions[node.target.name]
    body = region.body
    inner: dict[fx.Node, Any] = {
        placeholder: values[argument] for placeholder, argument in zip(body.placeholders(), node.args, strict=True)
    }
    inside: list[str] = []
    _calls(body, inner, inside, region.backend)
    results = tuple(inner[result] for result in body.output_nodes().values())
    lines += inside
    lines.append(f"region {region.backend} {node.meta.get('backend')} {sorted(inside)} gives {sorted(results)}")
    return results if len(results) > 1 else results[0]


def _arguments(node: fx.Node, values: dict[fx.Node, Any]) -> str:
    op = op_of(node.target)
    if op is not None:
        named = named_arguments(node)
    else:
        parameters = node.target._schema.arguments
        named = {parameter.name: parameter.default_value for parameter in parameters}
        named |= dict(zip(named, node.args, strict=False)) | node.kwargs
    return ", ".join(f"{name}={_text(value, values)}" for name, value in sorted(named.items()))


def _text(value: Any, values: dict[fx.Node, Any]) -> str:
    if isinstance(value, fx.Node):
        return str(values[value])
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(item, values) for item in value)}]"
    return DTYPE_NAMES[value] if isinstance(value, torch.dtype) else repr(value)


def _recipe(recipe: Recipe) -> str:
    attrs = json.dumps(dict(recipe.attrs), sort_keys=True)
    return f"{recipe.step}({', '.join(map(_recipe, recipe.inputs))}; {attrs}).{recipe.output}"


def _placed(placement: Any) -> str:
    return " ".join(sorted(str(place) for place in placement if place.kind != "replicated"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
