"""From a ModelSpec to a traced Model: the definition runs once on the meta device, and no weight is read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ingot.ir import build
from ingot.ir.errors import InternalError
from ingot.ir.program import Model, ModelSpec, ParamSpec, Program, Stage
from ingot.ir.recipe import Recipe, cast
from ingot.ir.types import DTYPES, Dim, TensorType
from ingot.models.architectures import ARCHITECTURES, Entry


@dataclass(frozen=True)
class Limits:
    """Upper bounds of a step: positions of a sequence, sequences, tokens."""

    max_seq_len: int
    max_batch: int
    max_tokens: int


INPUTS = {"tokens": "T", "positions": "T", "token_seqs": "T", "logit_rows": "L"}


def trace(spec: ModelSpec, limits: Limits, stored: dict[str, torch.dtype] | None = None) -> Model:
    """Trace each entry of the definition of `spec` into a program at stage TRACED, `main` first.

    `stored` gives the dtypes of the checkpoint's tensors: a weight stored in another dtype than the model's gets a
    cast as its recipe's last step.
    """
    definition = ARCHITECTURES[spec.architecture].definition
    with torch.device("meta"):
        module = definition.build(spec.dims, spec.dtype, limits.max_seq_len)
        main = Entry(module, definition.expected_matches(spec.dims))
        entries = {"main": main, **definition.more_entries(spec.dims, module)}
    recipes = definition.weight_map(spec.dims, limits.max_seq_len)
    parameters = dict(module.named_parameters())
    if recipes.keys() != parameters.keys():
        odd = sorted(recipes.keys() ^ parameters.keys())
        raise InternalError(f"weight map and definition of {spec.family} differ in {', '.join(odd)}")
    params = {
        name: ParamSpec(
            TensorType(parameter.dtype, tuple(parameter.shape)),
            _in_dtype(recipes[name], parameter.dtype, stored or {}),
            split=definition.split(spec.dims, name),
        )
        for name, parameter in parameters.items()
    }
    names = {id(parameter): name for name, parameter in parameters.items()}
    programs = {name: _trace_entry(name, entry.module, params, names, limits) for name, entry in entries.items()}
    expected = {name: entry.expected_matches for name, entry in entries.items()}
    return Model(spec, programs, expected)


def _trace_entry(
    entry: str, module: nn.Module, params: Mapping[str, ParamSpec], names: Mapping[int, str], limits: Limits
) -> Program:
    """The program of one entry. `names` tells a parameter, by its identity, from what the module calls it."""
    dims = {
        "T": Dim("T", 1, limits.max_tokens),
        "L": Dim("L", 1, limits.max_tokens),
    }
    symbols = {name: torch.export.Dim(name, min=1, max=max(dim.hi, 8)) for name, dim in dims.items()}
    exported = torch.export.export(
        module,
        (),
        kwargs={name: torch.zeros(4, dtype=torch.int32, device="meta") for name in INPUTS},
        dynamic_shapes={name: {0: symbols[dim]} for name, dim in INPUTS.items()},
        strict=False,
    )
    program = Program(entry, Stage.TRACED, dims)
    values: dict[fx.Node, Any] = {}
    own = dict(module.named_parameters(remove_duplicate=False))
    param_of = exported.graph_signature.inputs_to_parameters
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            if node.name not in param_of:
                values[node] = program.add_input(node.name, TensorType(torch.int32, (INPUTS[node.name],)))
            elif node.users:  # an entry may use a part of the model only
                name = names[id(own[param_of[node.name]])]
                values[node] = program.add_param(name, params[name])
        elif node.op == "call_function":
            args = fx.node.map_arg(node.args, values.__getitem__)
            kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
            values[node] = build.call(program, node.target, args, kwargs, origin=_origin(node))
        elif node.op == "output":
            program.set_outputs({"logits": values[node.args[0][0]]})
    return program


def _in_dtype(recipe: Recipe, dtype: torch.dtype, stored: dict[str, torch.dtype]) -> Recipe:
    return recipe if _dtype_of(recipe, dtype, stored) == dtype else cast(recipe, dtype)


def _dtype_of(recipe: Recipe, default: torch.dtype, stored: dict[str, torch.dtype]) -> torch.dtype:
    """The dtype of what a recipe makes; `default` for a source that the checkpoint lacks, and for a table."""
    if recipe.step == "source":
        return stored.get(str(recipe.attr("name")), default)
    if recipe.step == "cast":
        return DTYPES[str(recipe.attr("dtype"))]
    return _dtype_of(recipe.inputs[0], default, stored) if recipe.inputs else default


_FRAME = re.compile(r'File "[^"]*?((?:models|frontend)/[^"/]+\.py)", line (\d+)')


def _origin(node: fx.Node) -> str:
    """Layer, file and line of the definition that made a call."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    places = [f"{file}:{line}" for file, line in frames]
    paths = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    layers = [match.group(1) for path in paths if (match := re.search(r"\blayers\.(\d+)", path))]
    # The line inside the layer that made the call, not the one inside a Linear or a norm that all calls share.
    place = places[min(1 if layers else 0, len(places) - 1)] if places else ""
    return ", ".join([f"layer {layer}" for layer in layers[-1:]] + [place] * bool(place))
