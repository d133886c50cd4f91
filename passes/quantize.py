"""quantize: stores the weights of linears in another format, of fewer bits or another order."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar

from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import OptionError
from ingot.ir.formats import SHARED_PARTS, Format, find_format
from ingot.ir.program import ParamSpec, Program, Stage, is_call, named_arguments, tensor_type
from ingot.ir.recipe import quantize
from ingot.ir.weights import StoredWeight, matmul_of, part_name
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter, described


@dataclass(frozen=True)
class Quantize(Pass):
    """Replaces the weight of each `linear` by params in a quantized format, such as codes and scales.

    format      name of a format in `ingot.ir.formats`, such as "int8". A lossless format changes no result.
    lm_head     whether the linear that computes the logits is quantized too
    ignore      patterns of weights that stay, separated by "|", such as "layers.0.*|*.mlp.down.weight"
    overrides   other formats for some weights, as "PATTERN=FORMAT|…"; the first pattern that matches counts

    The embedding is not quantized. A weight stays too if its rows are shorter than a group (elements with one scale):
    its scales would take more bytes than quantizing saves. Any other weight that does not fit the format is an error.
    The values are computed when the artifact is written.
    """

    name: ClassVar[str] = "quantize"
    joins: ClassVar[Stage] = Stage.QUANTIZED
    format: str = "int8"
    lm_head: bool = False
    ignore: str = ""
    overrides: str = ""

    def __post_init__(self) -> None:
        for name in (self.format, *(name for _, name in self._overrides)):
            if missing := sorted(SHARED_PARTS & set(find_format(name).parts)):
                raise OptionError(
                    f"the format '{name}' has {' and '.join(missing)}, which the weight alone does not determine",
                    where=f"pass {self.name}",
                    expected="a format of weights, with activations that are not rounded or rounded in each step",
                )

    @property
    def _overrides(self) -> list[tuple[str, str]]:
        """Return the pairs of a pattern and a format. Raises OptionError for an item that is no pair."""
        pairs = [item.rpartition("=") for item in self.overrides.split("|") if item]
        if bad := [name for pattern, _, name in pairs if not pattern]:
            raise OptionError(f"the override '{bad[0]}'", where=f"pass {self.name}", expected="PATTERN=FORMAT")
        return [(pattern, name) for pattern, _, name in pairs]

    def format_of(self, weight: str) -> Format | None:
        """Return the format for the param `weight`; None if it stays as it is."""
        if any(fnmatchcase(weight, pattern) for pattern in self.ignore.split("|")):
            return None
        names = [name for pattern, name in self._overrides if fnmatchcase(weight, pattern)]
        return find_format(names[0] if names else self.format)

    @property
    def numerics(self) -> Numerics:  # type: ignore[override]  # depends on the format; other passes have one contract
        names = (self.format, *(name for _, name in self._overrides))
        return Numerics.EXACT if all(find_format(name).lossless for name in names) else Numerics.LOSSY

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        heads = frozenset() if self.lm_head else _heads(program)
        chosen: dict[fx.Node, Format] = {}
        for node in program.calls(ops.linear.overload):
            if node in heads:
                continue
            if _weight(node).meta.get("kind") != "param":
                rewriter.refuse(node, f"the weight is not a param but {described(_weight(node))}")
            elif (found := self.format_of(str(_weight(node).target))) is not None:
                chosen[node] = found
        small = {node: reason for node in chosen if (reason := chosen[node].below_group(_shape(node))) is not None}
        if len(small) < len(chosen):
            for node, reason in small.items():
                rewriter.refuse(node, reason)
                del chosen[node]
        for format in dict.fromkeys(chosen.values()):
            _check_fit([_weight(node) for node, own in chosen.items() if own == format], format)
        stored: dict[fx.Node, StoredWeight] = {}  # two linears may share a weight
        for node, format in chosen.items():
            if not rewriter.take(node):
                break
            matmul, weight = matmul_of(node), _weight(node)
            assert matmul is not None
            if weight not in stored:
                stored[weight] = _stored(rewriter, str(weight.target), format)
            op, args, attributes = replace(matmul, weight=stored[weight]).call()
            rewriter.replace(node, rewriter.call(op, *args, before=node, **attributes))


def _weight(linear: fx.Node) -> fx.Node:
    weight = named_arguments(linear)["weight"]
    assert isinstance(weight, fx.Node)
    return weight


def _shape(linear: fx.Node) -> tuple[int, ...]:
    return tensor_type(_weight(linear)).bind({})


def _heads(program: Program) -> frozenset[fx.Node]:
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


def _check_fit(weights: list[fx.Node], format: Format) -> None:
    problems = {}
    for weight in weights:
        if problem := format.obstacle(tensor_type(weight).bind({})):
            problems[str(weight.target)] = problem
    if problems:
        name, problem = next(iter(problems.items()))
        raise OptionError(
            f"format '{format.name}' does not fit {len(problems)} of {len(weights)} linears: {problem}",
            where=f"quantize, param {name}",
            expected="weights of whole tiles, whose rows are a multiple of the group",
            hint="int8 has neither, and fits every weight",
        )


def _stored(rewriter: Rewriter, name: str, format: Format) -> StoredWeight:
    """Add the params that store the weight `name` in `format`, and return them.

    One step of the recipe makes all of them from the original weight. A mesh divides them like that weight.
    """
    spec = rewriter.program.params[name]
    rows, inner = spec.type.bind({})
    types, recipes = format.types((rows, inner), spec.type.dtype), quantize(spec.recipe, format.name)
    parts = {
        part: rewriter.add_param(
            part_name(name, part),
            ParamSpec(types[part], recipes[part], split=format.split(spec.split, part)),
        )
        for part in format.parts
    }
    return StoredWeight(format, parts)
