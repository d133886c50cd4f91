"""The weight of a matmul or of experts as one object, whether it is one tensor or elements, scales and zeros."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from ingot.ir import ops
from ingot.ir.formats import PARTS, Format, find_format
from ingot.ir.ops import Op, op_of
from ingot.ir.ops.expert_weights import PLAIN, WEIGHTS, part_parameter
from ingot.ir.program import Program, named_arguments


@dataclass(frozen=True)
class StoredWeight:
    """The weight of a matmul, or the stacked weights of experts, in any storage format.

    `parts` maps the names of the format's parts, such as "weight" and "scales", to their nodes.
    """

    format: Format
    parts: Mapping[str, fx.Node]


@dataclass(frozen=True)
class Matmul:
    """The operands of a matmul `x @ weight.T + bias`. The weight has any storage format. `bias` may be None."""

    x: fx.Node
    weight: StoredWeight
    bias: fx.Node | None

    def call(self) -> tuple[Op, list[Any], dict[str, Any]]:
        """Return how to call this matmul: the op, its positional arguments and its keyword arguments.

        The op is `linear` for a plain weight, else `quant_linear`.
        """
        if self.weight.format.name == PLAIN:
            return ops.linear, _trimmed([self.x, self.weight.parts["weight"], self.bias]), {}
        weight, scales, zeros, *others = [self.weight.parts.get(part) for part in PARTS]
        args = [self.x, weight, scales, zeros, self.bias, *others]
        return ops.quant_linear, _trimmed(args), {"format": self.weight.format.name}


def matmul_of(node: fx.Node) -> Matmul | None:
    """Return the matmul that a call of `linear` or `quant_linear` computes; None for any other node."""
    op = op_of(node.target)
    if op not in (ops.linear, ops.quant_linear) or op is None:
        return None
    bound = named_arguments(node)
    format = find_format(bound.get("format", "plain"))
    return Matmul(bound["x"], StoredWeight(format, {part: bound[part] for part in format.parts}), bound["bias"])


@dataclass(frozen=True)
class StoredExperts:
    """The arguments of a call of `experts`. Each of its two weights, "gate_up" and "down", has any storage format.

    `others` are the other arguments by parameter name.
    """

    weights: Mapping[str, StoredWeight]
    others: Mapping[str, Any]

    def call(self) -> tuple[Op, list[Any], dict[str, Any]]:
        """Return how to call these experts: the op, its positional arguments and its keyword arguments.

        Attributes with their default values are left out.
        """
        bound = dict(self.others)
        for name, weight in self.weights.items():
            bound |= {part_parameter(name, part): weight.parts.get(part) for part in PARTS}
            bound[f"{name}_format"] = weight.format.name
        parameters = ops.experts.parameters
        positional = parameters.names[: parameters.positional]
        attributes = {
            name: bound[name]
            for name in parameters.names[parameters.positional :]
            if bound[name] != parameters.defaults[name]
        }
        return ops.experts, _trimmed([bound[name] for name in positional]), attributes


def experts_of(node: fx.Node) -> StoredExperts | None:
    """Return the arguments of a call of `experts`; None for any other node."""
    if op_of(node.target) is not ops.experts:
        return None
    bound = dict(named_arguments(node))
    weights = {}
    for name in WEIGHTS:
        format = find_format(bound.pop(f"{name}_format"))
        given = {part: bound.pop(part_parameter(name, part)) for part in PARTS}
        weights[name] = StoredWeight(format, {part: given[part] for part in format.parts})
    return StoredExperts(weights, bound)


def formats_of_call(node: fx.Node) -> list[Format]:
    """Return the storage formats of the weights that a call multiplies by, other than "plain"."""
    found = []
    if (matmul := matmul_of(node)) is not None:
        found = [matmul.weight.format]
    elif (experts := experts_of(node)) is not None:
        found = [one.format for one in experts.weights.values()]
    return [format for format in found if format.name != PLAIN]


def part_name(weight: str, part: str) -> str:
    """Return the name of the param that stores one part of a param `weight`, as in GPTQ and AWQ.

    layers.0.mlp.up.weight becomes layers.0.mlp.up.qweight, layers.0.mlp.up.scales and so on.
    """
    return f"{weight.removesuffix('.weight')}.{'qweight' if part == 'weight' else part}"


def linear_sources(program: Program) -> frozenset[str]:
    """Return the names of the checkpoint tensors that the weights of a program's linears are made of."""
    matmuls = [found for node in program.calls() if (found := matmul_of(node)) is not None]
    weights = {str(part.target) for one in matmuls for part in one.weight.parts.values() if part.op == "placeholder"}
    return frozenset().union(*(program.params[name].recipe.sources() for name in weights & program.params.keys()))


def _trimmed(args: list[Any]) -> list[Any]:
    while args[-1] is None:
        args.pop()
    return args
