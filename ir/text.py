"""Print a program as text. `ingot.ir.parse` reads it back; only the records of passes are lost."""

import json
from typing import Any

import torch
from torch import fx

from ingot.ir.artifact.plan import BucketClass
from ingot.ir.errors import InternalError
from ingot.ir.features.feature import SAMPLED
from ingot.ir.mesh import mesh_text
from ingot.ir.program import Program, target_name
from ingot.ir.types import DTYPE_NAMES, Placement


def value_name(node: fx.Node) -> str:
    """Return the name of a node in a program's text, such as "%linear_3" or "%layers.0.norm"."""
    return f"%{node.target}" if node.op == "placeholder" else f"%{node.name}"


def print_argument(value: Any) -> str:
    """Return a call's argument as text: the name of a node, or a constant.

    No two different constants have equal text.
    """
    if isinstance(value, fx.Node):
        return value_name(value)
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES[value]
    if isinstance(value, str):
        return json.dumps(value)
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(print_argument(item) for item in value) + "]"
    raise InternalError(f"an argument {value!r} of type {type(value).__name__} has no text form")


def _placements(placement: tuple[Placement, ...]) -> str:
    return "".join(f" {place}" for place in placement)


def print_call(node: fx.Node) -> str:
    """Return the line of a call in a program's text: `%name = op(arguments) : type`.

    The backend and the origin follow if they are set.
    """
    arguments = [print_argument(value) for value in node.args]
    arguments += [f"{name}={print_argument(value)}" for name, value in node.kwargs.items()]
    line = f"{value_name(node)} = {target_name(node.target)}({', '.join(arguments)}) : {node.meta['type']}"
    line += _placements(node.meta.get("placement", ()))
    if backend := node.meta.get("backend"):
        line += f" @{backend}"
    if origin := node.meta.get("origin"):
        line += f"  # {origin}"
    return line


def print_placeholder(node: fx.Node, program: Program) -> str:
    """Return the line that declares an input, param or state in a program's text."""
    name = str(node.target)
    match node.meta["kind"]:
        case "param":
            spec = program.params[name]
            split = f" {spec.split}" if spec.split else ""
            return f"param {name}: {spec.type}{split}{_placements(spec.placement)} = {spec.recipe}"
        case "state":
            state = program.states[name]
            line = f"state {name}: {state.kind} {state.type} group={state.group} unit={state.unit}"
            return line + _placements(state.placement)
    return f"input {name}: {node.meta['type']}"


def _body(program: Program, indent: str) -> list[str]:
    lines = [print_placeholder(node, program) for node in program.placeholders()]
    for region in program.regions.values():
        lines.append(f"region {region.name} @{region.backend} {{")
        # A region prints only dims whose bounds are narrower than the program's.
        lines += [f"  dim {dim}" for dim in region.body.dims.values() if dim != program.dims.get(dim.name)]
        lines += _body(region.body, "  ")
        lines.append("}")
    lines += [print_call(node) for node in program.calls()]
    outputs = ", ".join(f"{name}={value_name(node)}" for name, node in program.output_nodes().items())
    lines.append(f"return {outputs}")
    return [indent + line for line in lines]


def bucket_text(bucket: BucketClass) -> str:
    """Return a bucket class (a range of step sizes) as text: `decode tokens=[1, 16] q_max=1`."""
    q_max = "any" if bucket.q_max is None else str(bucket.q_max)
    features = "".join(f" +{feature}" for feature in bucket.features)
    return f"{bucket.name} tokens=[{bucket.tokens[0]}, {bucket.tokens[1]}] q_max={q_max}{features}"


def print_program(program: Program) -> str:
    """Return the program as text that `parse_program` can read. It ends in a newline."""
    header = f"program {program.name} stage={program.stage.name}"
    if program.bucket is not None:
        header += f" bucket={bucket_text(program.bucket)}"
    mesh = [f"mesh {mesh_text(program.mesh)}"] if program.mesh else []
    ending = [f"ending {program.ending}"] if program.ending != SAMPLED else []
    dims = [f"dim {dim}" for dim in program.dims.values()]
    return "\n".join([header, *mesh, *ending, *dims, *_body(program, "")]) + "\n"


def print_region_body(body: Program) -> str:
    """Return the calls of a region as text with numbers in place of names. A region is compiled together.

    Regions with equal text have equal compiled code. This is common, because regions of two layers often differ only in
    names and origins.
    """
    names: dict[fx.Node, str] = {}
    lines = [f"dim {dim}" for dim in body.dims.values()]
    for index, node in enumerate(body.placeholders()):
        names[node] = f"%in{index}"
        if node.meta["kind"] == "state":
            lines.append(f"state {index}: {body.states[str(node.target)].type}")
        else:
            lines.append(f"input {index}: {node.meta['type']}")
    for index, node in enumerate(body.calls()):
        arguments = [_renamed(value, names) for value in node.args]
        arguments += [f"{name}={_renamed(value, names)}" for name, value in sorted(node.kwargs.items())]
        names[node] = f"%{index}"
        lines.append(f"%{index} = {target_name(node.target)}({', '.join(arguments)}) : {node.meta['type']}")
    lines.append("return " + ", ".join(names[node] for node in body.output_nodes().values()))
    return "\n".join(lines) + "\n"


def _renamed(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_renamed(item, names) for item in value) + "]"
    return print_argument(value)
