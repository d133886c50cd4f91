"""From a ModelSpec to a traced Model: the definition runs once on the meta device, and no weight is read."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ingot.ir import build
from ingot.ir.errors import InternalError
from ingot.ir.program import Model, ModelSpec, ParamSpec, Program, Stage
from ingot.ir.recipe import Recipe, cast
from ingot.ir.types import DTYPES, Dim, TensorType
from ingot.models.architectures import ARCHITECTURES


@dataclass(frozen=True)
class Limits:
    """Upper bounds of a step: positions of a sequence, sequences, tokens."""

    max_seq_len: int
    max_batch: int
    max_tokens: int


INPUTS = {"tokens": "T", "positions": "T", "token_seqs": "T", "logit_rows": "L"}


def trace(spec: ModelSpec, limits: Limits, stored: dict[str, torch.dtype] | None = None) -> Model:
    """Trace the definition of `spec` into one program, `main`, at stage TRACED.

    `stored` gives the dtypes of the checkpoint's tensors: a weight stored in another dtype than the model's gets a
    cast as its recipe's last step.
    """
    definition = ARCHITECTURES[spec.architecture].definition
    with torch.device("meta"):
        module = definition.build(spec.dims, spec.dtype, limits.max_seq_len)
        example = {name: torch.zeros(4, dtype=torch.int32) for name in INPUTS}
    dims = {
        "T": Dim("T", 1, limits.max_tokens),
        "L": Dim("L", 1, limits.max_tokens),
    }
    symbols = {name: torch.export.Dim(name, min=1, max=max(dim.hi, 8)) for name, dim in dims.items()}
    exported = torch.export.export(
        module,
        (),
        kwargs=example,
        dynamic_shapes={name: {0: symbols[dim]} for name, dim in INPUTS.items()},
        strict=False,
    )
    program = Program("main", Stage.TRACED, dims)
    recipes = definition.weight_map(spec.dims, limits.max_seq_len)
    parameters = dict(module.named_parameters())
    if recipes.keys() != parameters.keys():
        odd = sorted(recipes.keys() ^ parameters.keys())
        raise InternalError(f"weight map and definition of {spec.family} differ in {', '.join(odd)}")
    values: dict[fx.Node, Any] = {}
    param_of = exported.graph_signature.inputs_to_parameters
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            if node.name in param_of:
                name = param_of[node.name]
                values[node] = program.add_param(
                    name,
                    ParamSpec(
                        TensorType(parameters[name].dtype, tuple(parameters[name].shape)),
                        _in_dtype(recipes[name], parameters[name].dtype, stored or {}),
                        definition.placement(name),
                    ),
                )
            else:
                values[node] = program.add_input(node.name, TensorType(torch.int32, (INPUTS[node.name],)))
        elif node.op == "call_function":
            args = fx.node.map_arg(node.args, values.__getitem__)
            kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
            values[node] = build.call(program, node.target, args, kwargs, origin=_origin(node))
        elif node.op == "output":
            program.set_outputs({"logits": values[node.args[0][0]]})
    return Model(spec, {"main": program}, definition.expected_matches(spec.dims))


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
