"""Store the weights of experts in a format: the params of its parts, and how a mesh divides them."""

from collections.abc import Mapping
from dataclasses import replace

from ingot.ir.errors import OptionError, VerifyError
from ingot.ir.formats import Format
from ingot.ir.formats.stacked import split_stack, stack_types
from ingot.ir.program import ParamSpec, Program
from ingot.ir.recipe import Recipe
from ingot.ir.types import Split
from ingot.ir.weights import StoredExperts, StoredWeight, part_name
from ingot.passes.rewrite import Rewriter

# How a mesh may divide each weight of experts, by the name of its param.
Splits = Mapping[str, Split | None]


def splits_of_experts(program: Program, experts: StoredExperts, formats: Mapping[str, Format], *, mesh: bool) -> Splits:
    """Return how a mesh may divide the weights of experts that are stored in new `formats`, by param.

    Both weights are divided by the experts' width, or neither: if the columns of down must stay together, every rank
    holds all of both. The param of a weight that keeps its numbers is changed accordingly. If gate or up end within a
    block that shares a scale, the weights cannot be divided: with a `mesh`, OptionError is raised.
    """
    names = {name: str(one.parts["weight"].target) for name, one in experts.weights.items()}
    found = {param: program.params[param].split for param in names.values()}
    new = {name: formats.get(name, one.format) for name, one in experts.weights.items()}
    whole = new["down"].whole_columns()
    for name, format in formats.items():
        try:
            for part in format.parts:
                split_stack(found[names[name]], part, format)
        except VerifyError as error:
            if mesh:
                raise OptionError(error.what, where=f"param {names[name]}", expected=error.expected) from None
            whole = True
    if not whole:
        return found
    for name, param in names.items():
        if name not in formats:
            program.params[param] = replace(program.params[param], split=None)
    return dict.fromkeys(found)


def store_stack(
    rewriter: Rewriter, param: str, format: Format, recipes: Mapping[str, Recipe], splits: Splits
) -> StoredWeight:
    """Add the params that store the weight `param` [E, N, K] of experts in `format`, and return them.

    `recipes` make the parts. Raises OptionError if the format cannot store the weight.
    """
    spec = rewriter.program.params[param]
    experts, rows, columns = spec.type.bind({})
    if problem := format.obstacle((rows, columns)):
        raise OptionError(f"the format '{format.name}' cannot store the weight: {problem}", where=f"param {param}")
    nodes = {}
    for part, value_type in stack_types((experts, rows, columns), format, spec.type.dtype).items():
        made = ParamSpec(value_type, recipes[part], split=split_stack(splits[param], part, format))
        nodes[part] = rewriter.add_param(part_name(param, part), made)
    return StoredWeight(format, nodes)
