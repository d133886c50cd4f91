"""The oracle of the tracer: the programs of a model's definition as torch.export sees it."""

import re
from typing import Any

import torch
from torch import fx

from ingot.frontend.trace import Limits
from ingot.ir import build
from ingot.ir.program import Model, ParamSpec, Program, Stage
from ingot.models.architectures import ARCHITECTURES, Entry


def exported(model: Model, limits: Limits) -> dict[str, Program]:
    """The entries of a traced model, traced again; params, dims and endings are those of the model."""
    spec = model.spec
    definition = ARCHITECTURES[spec.architecture].definition
    with torch.device("meta"):
        module = definition.build(spec.dims, spec.dtype, limits.max_seq_len)
        entries = {"main": Entry(module), **definition.more_entries(spec.dims, module)}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        name: exported_program(name, entry, model.entries[name], model.params, names) for name, entry in entries.items()
    }


def exported_program(
    name: str, entry: Entry, traced: Program, params: dict[str, ParamSpec], names: dict[int, str]
) -> Program:
    """An entry that was traced as `traced`. `names` tells a parameter of `main` by its identity."""
    exported = _export(entry, traced)
    program = Program(name, Stage.TRACED, dict(traced.dims), entry.ending)
    values: dict[fx.Node, Any] = {}
    own = dict(entry.module.named_parameters(remove_duplicate=False))
    param_of = exported.graph_signature.inputs_to_parameters
    used = {
        names.get(id(own[called]), f"{name}.{called}"): node
        for node in exported.graph.find_nodes(op="placeholder")
        if (called := param_of.get(node.name)) is not None and node.users
    }
    for shared in sorted(used, key=list(traced.params).index):  # a tied weight is where torch saw it last
        values[used[shared]] = program.add_param(shared, params[shared])
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name not in param_of:
            values[node] = program.add_input(node.name, entry.inputs[node.name])
        elif node.op == "call_function":
            args = fx.node.map_arg(node.args, values.__getitem__)
            kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
            values[node] = build.call(program, node.target, args, kwargs, origin=_origin(node))
        elif node.op == "output":
            program.set_outputs(dict(zip(entry.outputs, map(values.__getitem__, node.args[0]), strict=True)))
    return program


def _export(entry: Entry, traced: Program) -> torch.export.ExportedProgram:
    # A symbol of torch holds eight sizes or more, and the example is none of the sizes that it takes for constants.
    symbols = {dim.name: torch.export.Dim(dim.name, min=1, max=max(dim.hi, 8)) for dim in traced.dims.values()}
    example = dict.fromkeys(traced.dims, 4)
    return torch.export.export(
        entry.module,
        (),
        kwargs={
            name: torch.zeros(one.bind(example), dtype=one.dtype, device="meta") for name, one in entry.inputs.items()
        },
        dynamic_shapes={
            name: {axis: symbols[size] for axis, size in enumerate(one.shape) if isinstance(size, str)}
            for name, one in entry.inputs.items()
        },
        strict=False,
    )


_FRAME = re.compile(r'File "[^"]*?models/(blocks/[^"/]+\.py)", line (\d+)')
_LEAVES = ("blocks/linear.py", "blocks/norm.py", "blocks/positions.py")  # what many blocks call


def _origin(node: fx.Node) -> str:
    """Layer, file and line of a call in a definition that is made of the blocks of models/."""
    places = [f"{file}:{line}" for file, line in _FRAME.findall(node.meta.get("stack_trace") or "")]
    paths = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    layers = [match.group(1) for path in paths if (match := re.search(r"\blayers\.(\d+)", path))]
    # Outermost first: the decoder's line, the layer's, and that of a block in it.
    if layers:
        places = [place for place in places if not place.startswith(_LEAVES)][-1:]
    place = places[0] if places else ""
    return ", ".join([f"layer {layer}" for layer in layers[-1:]] + [place] * bool(place))
