"""Edits of regions, backends and outputs, and of what a program says of itself."""

import random
from dataclasses import replace
from typing import Any

import torch

from ingot.ir.program import Program, Region, RegionCall, Stage
from ingot.ir.types import Dim, TensorType
from semantic_edits.of_calls import (
    another_cast,
    another_op,
    another_scale,
    another_slice,
    another_value,
    another_view,
    swapped_arguments,
)
from semantic_edits.of_types import other_type
from semantic_edits.places import calls_of, pick, region_calls


def another_call_backend(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    node = pick([node for node in calls_of(changed) if node.meta.get("backend")], draw)
    if node is None:
        return None
    node.meta = {**node.meta, "backend": "cpu" if node.meta["backend"] != "cpu" else "reference"}
    return changed


def _region_of(program: Program, draw: random.Random) -> Region | None:
    found: Region | None = pick(list(program.regions.values()), draw)
    return found


def another_region_backend(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    region = _region_of(changed, draw)
    if region is None:
        return None
    changed.regions[region.name] = replace(region, backend="tensorrt")
    for node in changed.calls(RegionCall(region.name)):
        node.meta = {**node.meta, "backend": "tensorrt"}
    return changed


def another_body(program: Program, draw: random.Random) -> Program | None:
    """A region computes something else."""
    changed = program.copy()
    region = _region_of(changed, draw)
    if region is None:
        return None
    edits = [another_op, another_scale, another_view, another_slice, another_cast, swapped_arguments, another_value]
    draw.shuffle(edits)
    for edit in edits:
        body = edit(region.body, draw)
        if body is not None:
            changed.regions[region.name] = replace(region, body=body)
            return changed
    return None


def another_result(program: Program, draw: random.Random) -> Program | None:
    """A region gives another of its values."""
    changed = program.copy()
    region = _region_of(changed, draw)
    if region is None:
        return None
    body = region.body.copy()
    outputs = body.output_nodes()
    name = draw.choice(list(outputs))
    tensors = [node for node in body.calls() if isinstance(node.meta["type"], TensorType)]
    others = [node for node in tensors if node not in outputs.values()]
    if not others:
        return None
    body.set_outputs({**outputs, name: draw.choice(others)})
    changed.regions[region.name] = replace(region, body=body)
    return changed


def dissolved_region(program: Program, draw: random.Random) -> Program | None:
    """One call of a region becomes the calls of its body."""
    changed = program.copy()
    node = pick(region_calls(changed), draw)
    if node is None:
        return None
    region = changed.regions[node.target.name]
    inner = dict(zip(region.body.placeholders(), node.args, strict=True))
    with changed.graph.inserting_before(node):
        for call in region.body.calls():
            inner[call] = changed.graph.node_copy(call, inner.__getitem__)
            inner[call].meta["backend"] = region.backend
    results = [inner[result] for result in region.body.output_nodes().values()]
    if len(results) == 1:
        node.replace_all_uses_with(results[0])
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            changed.graph.erase_node(user)
    changed.graph.erase_node(node)
    if not list(changed.calls(RegionCall(region.name))):
        del changed.regions[region.name]
    return changed


def another_stage(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    changed.stage = draw.choice([stage for stage in Stage if stage is not program.stage])
    return changed


def another_bound(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    dim = draw.choice(list(changed.dims.values()))
    changed.dims[dim.name] = Dim(dim.name, dim.lo, dim.hi + 1)
    return changed


def another_bucket(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    if changed.bucket is None:
        return None
    update = draw.choice([{"tokens": (1, 9)}, {"q_max": 3}, {"features": ("spec",)}])
    changed.bucket = changed.bucket.model_copy(update=update)
    return changed


def another_mesh(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    changed.mesh = {"tp": changed.mesh.get("tp", 1) * 2}
    return changed


def another_state(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    if not changed.states:
        return None
    name = draw.choice(list(changed.states))
    spec = changed.states[name]
    changes: list[dict[str, Any]] = [
        {"kind": "other"},
        {"group": "other"},
        {"unit": "token" if spec.unit == "sequence" else "sequence"},
        {"type": other_type(spec.type, draw)},
    ]
    changed.states[name] = replace(spec, **draw.choice(changes))
    return changed


def another_output(program: Program, draw: random.Random) -> Program | None:
    """An output is missing, is called otherwise, or is another value."""
    changed = program.copy()
    outputs = changed.output_nodes()
    name = draw.choice(list(outputs))
    value = outputs.pop(name)
    match draw.choice(["missing", "name", "value"]):
        case "name":
            outputs["renamed"] = value
        case "value":
            tensors = [node for node in changed.calls() if isinstance(node.meta["type"], TensorType)]
            outputs[name] = draw.choice([node for node in tensors if node is not value])
    if not outputs:
        return None
    changed.set_outputs(outputs)
    return changed


def one_more(program: Program, draw: random.Random) -> Program | None:
    """An input that nothing reads."""
    changed = program.copy()
    changed.add_input("more", TensorType(torch.float32, ("T",)))
    return changed
