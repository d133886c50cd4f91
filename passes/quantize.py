"""quantize: linears keep their weights in few bits. Op and recipe are rewritten together."""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ingot.ir import ops
from ingot.ir.errors import OptionError
from ingot.ir.program import ParamSpec, Program, Stage, is_call, tensor_type
from ingot.ir.recipe import quantize
from ingot.ir.record import Numerics
from ingot.ir.schemes import Scheme, find_scheme
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter, described, trimmed

# The parts in the order of `quant_linear`, and what they are called as GPTQ and AWQ name them: layers.0.mlp.up.weight
# becomes layers.0.mlp.up.qweight and so on.
_SUFFIXES = {"weight": "qweight", "scales": "scales", "zeros": "zeros"}


@dataclass(frozen=True)
class Quantize(Pass):
    """Each `linear` over a param becomes `quant_linear` over the parts that one step of a recipe makes of it.

    `scheme` is a name in `ingot.ir.schemes`. The embedding stays as it is, and so does the head, which makes the
    logits, unless `lm_head`. A weight that the scheme does not fit is an error, never left out.
    """

    name: ClassVar[str] = "quantize"
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    joins: ClassVar[Stage] = Stage.QUANTIZED
    scheme: str = "int8"
    lm_head: bool = False

    def __post_init__(self) -> None:
        find_scheme(self.scheme)

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program, scheme = rewriter.program, find_scheme(self.scheme)
        heads = frozenset() if self.lm_head else _heads(program)
        chosen: list[fx.Node] = []
        for node in program.calls(ops.linear.overload):
            if node in heads:
                continue
            weight = ops.linear.bind(node.args, node.kwargs)["weight"]
            if weight.meta.get("kind") == "param":
                chosen.append(node)
            else:
                rewriter.refuse(node, f"the weight is no param but {described(weight)}")
        _check_fit(program, chosen, scheme)
        parts: dict[fx.Node, dict[str, fx.Node]] = {}  # two linears may share a weight
        for node in chosen:
            if not rewriter.take(node):
                break
            bound = ops.linear.bind(node.args, node.kwargs)
            weight = bound["weight"]
            if weight not in parts:
                parts[weight] = _add_parts(rewriter, str(weight.target), scheme)
            args = trimmed([bound["x"], *(parts[weight].get(part) for part in _SUFFIXES), bound["bias"]])
            rewriter.replace(node, rewriter.call(ops.quant_linear, *args, before=node, scheme=scheme.name))


def _heads(program: Program) -> frozenset[fx.Node]:
    """The linears behind which nothing but single arguments are changed up to the logits."""
    found: set[fx.Node] = set()
    waiting = [node for name, node in program.output_nodes().items() if name == "logits"]
    while waiting:
        node = waiting.pop()
        if is_call(node, ops.linear.overload):
            found.add(node)
        elif len(node.all_input_nodes) == 1:
            waiting += node.all_input_nodes
    return frozenset(found)


def _check_fit(program: Program, linears: list[fx.Node], scheme: Scheme) -> None:
    problems = {}
    for node in linears:
        weight = ops.linear.bind(node.args, node.kwargs)["weight"]
        if problem := scheme.obstacle(tensor_type(weight).bind({})):
            problems[str(weight.target)] = problem
    if problems:
        name, problem = next(iter(problems.items()))
        raise OptionError(
            f"scheme '{scheme.name}' does not fit {len(problems)} of {len(linears)} linears: {problem}",
            where=f"quantize, param {name}",
            expected="weights whose rows are a multiple of the group",
            hint="int8 has no groups and fits every weight",
        )


def _add_parts(rewriter: Rewriter, name: str, scheme: Scheme) -> dict[str, fx.Node]:
    """The params that stand for the param `name`, by part."""
    spec = rewriter.program.params[name]
    rows, inner = spec.type.bind({})
    types, recipes = scheme.types((rows, inner)), quantize(spec.recipe, scheme.name)
    return {
        part: rewriter.add_param(
            f"{name.removesuffix('.weight')}.{_SUFFIXES[part]}",
            ParamSpec(types[part], recipes[part], split=scheme.split(spec.split, part)),
        )
        for part in scheme.parts
    }
