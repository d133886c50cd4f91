"""quantize: stores the weights of linears and experts in another format, of fewer bits or another order."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import OptionError
from ingot.ir.formats import SHARED_PARTS, Format, find_format
from ingot.ir.program import ParamSpec, Program, Stage
from ingot.ir.recipe import quantize
from ingot.ir.stored.calibrated import CalibratedWeights
from ingot.ir.weights import StoredExperts, StoredWeight, experts_of, matmul_of, part_name
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter
from ingot.passes.select_experts import check_experts_fit, select_experts
from ingot.passes.select_linears import SelectedLinears, check_fit, select_linears, weight_node
from ingot.passes.store_experts import splits_of_experts, store_stack

# The format that stands for the formats that a calibration chose.
AUTO = "auto"


@dataclass(frozen=True)
class Quantize(Pass):
    """Replaces the weights of each `linear` and `experts` by params in a quantized format, such as codes and scales.

    format     name of a format in `ingot.ir.formats`, such as "int8". A lossless format changes no result. "auto": the
               formats that a calibration chose
    lm_head    whether the linear that computes the logits is quantized too
    ignore     patterns of linears that keep their weights, separated by "|", as in "layers.0.*|*.down"
    overrides  other formats for some linears, as in "layers.0.*=int8|*.down=int8". The first pattern that matches
               decides

    A pattern may contain *, ? and [abc]. It must match the whole name of the param or of a tensor of the checkpoint,
    with or without ".weight". "lm_head" is also a name of the linear that computes the logits.

    The experts of a layer have one format, and a pattern that matches a tensor of one of them decides for all. With a
    calibration, they keep their weights.

    The embedding is not quantized. A weight stays too if its rows are shorter than a group (elements with one scale):
    its scales would take more bytes than quantizing saves. Any other weight that does not fit its format is an error.
    The values are computed when the artifact is written, unless a calibration has computed them.
    """

    name: ClassVar[str] = "quantize"
    joins: ClassVar[Stage] = Stage.QUANTIZED
    format: str = "int8"
    lm_head: bool = False
    ignore: str = ""
    overrides: str = ""

    def __post_init__(self) -> None:
        for name in self.formats():
            if missing := sorted(SHARED_PARTS & set(find_format(name).parts)):
                raise OptionError(
                    f"the format '{name}' has {' and '.join(missing)}, which the weight alone does not determine",
                    where=f"pass {self.name}",
                    expected="a format of weights, with activations that are not rounded or rounded in each step",
                )

    @property
    def numerics(self) -> Numerics:  # type: ignore[override]  # depends on the format; other passes have one contract
        lossless = self.format != AUTO and all(find_format(name).lossless for name in self.formats())
        return Numerics.EXACT if lossless else Numerics.LOSSY

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program, calibrated = rewriter.program, context.calibrated or CalibratedWeights()
        selected = self.select(program)
        for node, reason in selected.refused.items():
            rewriter.refuse(node, reason)
        chosen = {node: one for node, one in selected.formats.items() if self.format != AUTO or one.name != "plain"}
        for node in program.calls(ops.linear.overload):
            if (name := calibrated.formats.get(str(weight_node(node).target))) is not None:
                chosen[node] = find_format(name)
        check_fit(chosen)
        order = {node: place for place, node in enumerate(program.calls())}
        stored: dict[fx.Node, StoredWeight] = {}  # two linears may share a weight
        for group in _groups(sorted(chosen, key=order.__getitem__), calibrated):
            if not rewriter.take(group[0]):
                break
            _rescale(program, group, calibrated)
            for node in group:
                matmul, weight = matmul_of(node), weight_node(node)
                assert matmul is not None
                if weight not in stored:
                    stored[weight] = _stored(rewriter, str(weight.target), chosen[node], calibrated)
                op, args, attributes = replace(matmul, weight=stored[weight]).call()
                rewriter.replace(node, rewriter.call(op, *args, before=node, **attributes))
        self._run_experts(rewriter, context)

    def _run_experts(self, rewriter: Rewriter, context: PassContext) -> None:
        format = "plain" if self.format == AUTO else self.format
        program = rewriter.program
        selected = select_experts(program, format, ignore=self._ignored(), overrides=self._overrides())
        if context.calibrated is not None:
            for node in selected.formats:
                rewriter.refuse(node, "a calibration quantizes linears alone: experts keep their weights")
            return
        for node, reason in selected.refused.items():
            rewriter.refuse(node, reason)
        chosen = {
            node: {name: one for name, one in formats.items() if self.format != AUTO or one.name != "plain"}
            for node, formats in selected.formats.items()
        }
        check_experts_fit(chosen)
        for node, formats in chosen.items():
            if formats and not rewriter.take(node):
                break
            if formats:
                op, args, attributes = _stored_experts(rewriter, node, formats, mesh=bool(context.mesh)).call()
                rewriter.replace(node, rewriter.call(op, *args, before=node, **attributes))

    def select(self, program: Program) -> SelectedLinears:
        """Return the linears that the options select, and their formats without a calibration.

        If the format is "auto", the linears that no override matches have the format "plain".
        """
        format = "plain" if self.format == AUTO else self.format
        return select_linears(
            program, format, lm_head=self.lm_head, ignore=self._ignored(), overrides=self._overrides()
        )

    def patterns(self) -> tuple[str, ...]:
        """Return all patterns of the options."""
        return (*self._ignored(), *self._overrides())

    def formats(self) -> list[str]:
        """Return the names of the formats that the options name."""
        return [*([] if self.format == AUTO else [self.format]), *self._overrides().values()]

    def _ignored(self) -> list[str]:
        return [pattern for pattern in self.ignore.split("|") if pattern]

    def _overrides(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for item in filter(None, self.overrides.split("|")):
            pattern, equals, format = item.partition("=")  # formats may contain "="
            if not (pattern and equals and format) or pattern in found:
                raise OptionError(f"the override '{item}'", where="quantize", expected="PATTERN=FORMAT, each once")
            found[pattern] = format
        return found


def _groups(linears: Iterable[fx.Node], calibrated: CalibratedWeights) -> Iterator[list[fx.Node]]:
    """Yield the linears that must be rewritten at once, in the order of the first of each group.

    Linears are rewritten one by one unless a calibration moved scales from one into another.
    """
    group_of = {weight: index for index, one in enumerate(calibrated.together) for weight in one.weights}
    found: dict[object, list[fx.Node]] = {}
    for node in linears:
        found.setdefault(group_of.get(str(weight_node(node).target), node), []).append(node)
    yield from found.values()


def _rescale(program: Program, group: Iterable[fx.Node], calibrated: CalibratedWeights) -> None:
    """Multiply the gains and biases that belong to a group of linears by the factors of the calibration."""
    weights = {str(weight_node(node).target) for node in group}
    for one in calibrated.together:
        if one.weights & weights:
            for name in sorted(one.vectors):
                spec = program.params[name]
                program.params[name] = replace(spec, recipe=calibrated.vector(name, spec.recipe, spec.type.dtype))


def _stored(rewriter: Rewriter, name: str, format: Format, calibrated: CalibratedWeights) -> StoredWeight:
    """Add the params that store the weight `name` in `format`, and return them.

    One step of the recipe makes all of them from the original weight, or from what a calibration computed. A mesh
    divides them like that weight.
    """
    spec = rewriter.program.params[name]
    rows, inner = spec.type.bind({})
    types = format.types((rows, inner), spec.type.dtype)
    recipes = (
        calibrated.parts(name, spec.recipe, format.parts)
        if name in calibrated.formats
        else quantize(spec.recipe, format.name)
    )
    parts = {
        part: rewriter.add_param(
            part_name(name, part),
            ParamSpec(types[part], recipes[part], split=format.split(spec.split, part)),
        )
        for part in format.parts
    }
    return StoredWeight(format, parts)


def _stored_experts(rewriter: Rewriter, node: fx.Node, formats: Mapping[str, Format], *, mesh: bool) -> StoredExperts:
    """Add the params that store weights of experts in `formats`, and return the experts with them."""
    experts = experts_of(node)
    assert experts is not None
    splits = splits_of_experts(rewriter.program, experts, formats, mesh=mesh)
    made = {}
    for name, format in formats.items():
        param = str(experts.weights[name].parts["weight"].target)
        recipes = quantize(rewriter.program.params[param].recipe, format.name)
        made[name] = store_stack(rewriter, param, format, recipes, splits)
    return replace(experts, weights={**experts.weights, **made})
