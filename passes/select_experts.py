"""Which weights of experts the pass quantize takes, and the storage format of each."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import fx

from ingot.ir import ops
from ingot.ir.errors import OptionError
from ingot.ir.formats import Format, find_format
from ingot.ir.program import Program, tensor_type
from ingot.ir.weights import experts_of
from ingot.passes.rewrite import described
from ingot.passes.select_linears import matches, param_names


@dataclass(frozen=True)
class SelectedExperts:
    """The calls of `experts` to quantize, with the format of each weight by name; and why others keep their weights."""

    formats: Mapping[fx.Node, Mapping[str, Format]]
    refused: Mapping[fx.Node, str] = field(default_factory=dict)


def float_weights(node: fx.Node) -> dict[str, fx.Node]:
    """Return the weights of a call of `experts` that are not quantized, by name: "gate_up" and "down"."""
    experts = experts_of(node)
    assert experts is not None
    return {name: one.parts["weight"] for name, one in experts.weights.items() if one.format.name == "plain"}


def select_experts(
    program: Program, format: str, *, ignore: Collection[str] = (), overrides: Mapping[str, str] | None = None
) -> SelectedExperts:
    """Return the weights of experts to quantize, and their formats. The arguments are those of `select_linears`.

    The experts of a layer have one format, so a pattern that matches a tensor of one of them decides for all. Weights
    whose rows are shorter than a group of their format keep their numbers.
    """
    chosen: dict[fx.Node, dict[str, Format]] = {}
    refused: dict[fx.Node, str] = {}
    for node in program.calls(ops.experts.overload):
        found: dict[str, Format] = {}
        for name, weight in float_weights(node).items():
            if weight.meta.get("kind") != "param":
                refused[node] = f"the weight '{name}' is not a param but {described(weight)}"
                continue
            names = param_names(program, weight)
            if any(matches(pattern, names) for pattern in ignore):
                continue
            wanted = find_format(next((one for text, one in (overrides or {}).items() if matches(text, names)), format))
            if (reason := wanted.below_group(_matrix(weight))) is not None:
                refused[node] = f"{name}: {reason}"
                continue
            found[name] = wanted
        if found:
            chosen[node] = found
    return SelectedExperts(chosen, refused)


def check_experts_fit(formats: Mapping[fx.Node, Mapping[str, Format]]) -> None:
    """Raise OptionError if the weights of experts cannot be stored in their format."""
    for node, chosen in formats.items():
        for name, format in chosen.items():
            weight = float_weights(node)[name]
            if (problem := format.obstacle(_matrix(weight))) is not None:
                raise OptionError(
                    f"format '{format.name}' does not fit the weights of experts: {problem}",
                    where=f"quantize, param {weight.target}",
                    expected="weights of whole tiles, whose rows are a multiple of the group",
                    hint="int8 has neither, and fits every weight",
                )


def _matrix(weight: fx.Node) -> tuple[int, ...]:
    """Return the shape of one expert's matrix."""
    return tensor_type(weight).bind({})[1:]
