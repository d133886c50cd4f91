"""Which linears of a program the pass quantize takes, and the storage format of each weight."""

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import fx

from ingot.ir import ops
from ingot.ir.errors import OptionError
from ingot.ir.formats import Format, find_format
from ingot.ir.ops.expert_weights import WEIGHTS
from ingot.ir.program import Program, is_call, named_arguments, tensor_type
from ingot.passes.rewrite import described

# The name by which patterns select the linears that compute logits, also if they share the embedding's weight.
HEAD = "lm_head"


@dataclass(frozen=True)
class SelectedLinears:
    """The linears to quantize, with the format of each; and why others keep their weights."""

    formats: Mapping[fx.Node, Format]
    refused: Mapping[fx.Node, str] = field(default_factory=dict)


def select_linears(
    program: Program,
    format: str,
    *,
    lm_head: bool = False,
    ignore: Collection[str] = (),
    overrides: Mapping[str, str] | None = None,
) -> SelectedLinears:
    """Return the linears of a program to quantize, and their formats.

    - `format`: the name of the format of linears that no override matches
    - `lm_head`: whether linears that compute logits are included
    - `ignore`: patterns of linears that keep their weights
    - `overrides`: the names of formats by pattern. The first pattern that matches decides

    A weight keeps its numbers too if its rows are shorter than a group of its format, unless all are.
    """
    heads = frozenset() if lm_head else heads_of(program)
    chosen: dict[fx.Node, Format] = {}
    refused: dict[fx.Node, str] = {}
    for node in program.calls(ops.linear.overload):
        names = names_of(program, node)
        if node in heads or any(matches(pattern, names) for pattern in ignore):
            continue
        if weight_node(node).meta.get("kind") != "param":
            refused[node] = f"the weight is not a param but {described(weight_node(node))}"
            continue
        name = next((one for pattern, one in (overrides or {}).items() if matches(pattern, names)), format)
        chosen[node] = find_format(name)
    small = {node: reason for node, one in chosen.items() if (reason := one.below_group(_shape(node))) is not None}
    if len(small) < len(chosen):
        refused |= small
        chosen = {node: one for node, one in chosen.items() if node not in small}
    return SelectedLinears(chosen, refused)


def check_fit(formats: Mapping[fx.Node, Format]) -> None:
    """Raise OptionError if a linear's weight cannot be stored in its format."""
    problems = {node: text for node, one in formats.items() if (text := one.obstacle(_shape(node))) is not None}
    if problems:
        node, problem = next(iter(problems.items()))
        raise OptionError(
            f"format '{formats[node].name}' does not fit {len(problems)} of {len(formats)} linears: {problem}",
            where=f"quantize, param {weight_node(node).target}",
            expected="weights of whole tiles, whose rows are a multiple of the group",
            hint="int8 has neither, and fits every weight",
        )


def check_patterns(programs: Collection[Program], patterns: Collection[str]) -> None:
    """Raise OptionError if a pattern matches no linear and no experts of the programs."""
    known = [names_of(program, node) for program in programs for node in program.calls(ops.linear.overload)]
    for program in programs:
        for node in program.calls(ops.experts.overload):
            bound = named_arguments(node)
            known += [param_names(program, bound[name]) for name in WEIGHTS]
    for pattern in patterns:
        if not any(matches(pattern, names) for names in known):
            first = ", ".join(dict.fromkeys(name for names in known[:3] for name in names))
            raise OptionError(
                f"the pattern '{pattern}' matches no linear or experts",
                where="quantize",
                expected=f"names such as {first}",
            )


def matches(pattern: str, names: Collection[str]) -> bool:
    """Return whether a pattern with *, ? or [abc] matches one of the names of a linear."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def names_of(program: Program, linear: fx.Node) -> tuple[str, ...]:
    """Return the names by which patterns select a linear: those of its param and of its checkpoint tensors."""
    found = param_names(program, weight_node(linear))
    return (*found, HEAD) if linear in heads_of(program) else found


def param_names(program: Program, weight: fx.Node) -> tuple[str, ...]:
    """Return the names of a param and of its checkpoint tensors, with and without ".weight"."""
    names = [str(weight.target)]
    if (spec := program.params.get(str(weight.target))) is not None:
        names += sorted(spec.recipe.sources())
    return tuple(dict.fromkeys(one for name in names for one in (name.removesuffix(".weight"), name)))


def weight_node(linear: fx.Node) -> fx.Node:
    """Return the node of a linear's weight."""
    weight = named_arguments(linear)["weight"]
    assert isinstance(weight, fx.Node)
    return weight


def heads_of(program: Program) -> frozenset[fx.Node]:
    """Return the linears that compute the logits.

    The search goes back from the output `logits`, through calls with a single tensor argument, to the first linear.
    """
    found: set[fx.Node] = set()
    waiting = [node for name, node in program.output_nodes().items() if name == "logits"]
    while waiting:
        node = waiting.pop()
        if is_call(node, ops.linear.overload):
            found.add(node)
        elif len(node.all_input_nodes) == 1:
            waiting += node.all_input_nodes
    return frozenset(found)


def _shape(linear: fx.Node) -> tuple[int, ...]:
    return tensor_type(weight_node(linear)).bind({})
