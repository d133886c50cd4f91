"""Checks of a quantizing pass: each weight is within half a scale of the original, and nothing else changes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.formats import (
    ELEMENTS,
    SHARED_PARTS,
    Format,
    Scales,
    dequantize,
    dequantize_rotated,
    find_format,
    format_of,
    quantize,
)
from ingot.ir.formats.format import KEPT, outer_of_blocks
from ingot.ir.formats.stacked import matrix_of
from ingot.ir.numerics.contracts import Breach, RankParams
from ingot.ir.numerics.tolerances import TOLERANCES
from ingot.ir.ops.expert_weights import PLAIN
from ingot.ir.program import ParamSpec, Program, is_call, named_arguments
from ingot.ir.recipe import Recipe
from ingot.ir.types import TensorType
from ingot.ir.weights import Matmul, StoredExperts, StoredWeight, experts_of, matmul_of

# Names of the params that `with_originals` adds end so.
_ORIGINAL = ".original"
# The largest error of a weight whose elements a calibration chose, in multiples of the error of rounding to nearest.
# GPTQ moves elements to compensate for others, so a weight's own error grows. A wrong scale, zero point or order of
# elements makes an error about as large as the weight. The factor is between the two by estimate; it is not
# measured.
_CHOSEN_ERROR = 4.0


@dataclass(frozen=True)
class WeightBreach:
    """A weight that is quantized wrongly: the wrong param (elements, scales or zeros) by name, and its error."""

    param: str
    breach: Breach


@dataclass(frozen=True)
class _Quantized:
    """A quantized weight of a program.

    parts     the params that store it, by part name, such as "weight" and "scales"
    format    its storage format
    original  the param that it was before quantization; None if there is none
    adopted   whether the checkpoint stores it so. If not, a `quantize` step of its recipe has made it.
    chosen    whether a calibration has chosen its elements, and not rounding to nearest
    stacked   whether it is a stack of matrices, those of experts
    """

    parts: Mapping[str, str]
    format: Format
    original: str | None
    adopted: bool = False
    chosen: bool = False
    stacked: bool = False

    def dequantized(self, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weight in float64. If activations are rounded, it is the weight of the rotated input."""
        made = dequantize if self.format.activations is None else dequantize_rotated
        parts = self.tensors(params)
        if not self.stacked:
            return made(parts, self.format, torch.float64)
        stack = (matrix_of(parts, index) for index in range(len(parts["weight"])))
        return torch.stack([made(one, self.format, torch.float64) for one in stack])

    def of_input(self) -> dict[str, str]:
        """Return the params, by part name, that the rounding of activations and rotations need."""
        rounds = self.format.activations is not None
        return {part: name for part, name in self.parts.items() if rounds and part in SHARED_PARTS - {"order"}}

    def tensors(self, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {part: params[name] for part, name in self.parts.items()}

    def matrices(
        self, original: torch.Tensor, params: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Yield each matrix of the weight, from `original`, with the tensors that store it by part name."""
        parts = self.tensors(params)
        if not self.stacked:
            yield original, parts
            return
        for index, matrix in enumerate(original):
            yield matrix, matrix_of(parts, index)


def weight_breaches(
    before: Program, after: Program, before_params: RankParams, after_params: RankParams
) -> list[WeightBreach]:
    """Return the weights that the program `after` has quantized wrongly, compared with the program `before`.

    Each value must be within half its scale of the original value. No scale may be larger than its block's values need.
    A weight that the checkpoint stores quantized must have exactly the original values, rounded to their dtype. If a
    calibration has chosen the elements, only the error of the whole weight has a bound, and `after` must be the result
    of `with_originals`. `before_params` and `after_params` hold the params of each rank by name.
    """
    found = []
    for one in _quantized(before, after):
        name = one.parts["weight"]
        if one.original is None:
            text = "it is not quantized from a param of the program before"
            found.append(WeightBreach(name, Breach(float("inf"), float("inf"), 0.0, text)))
            continue
        for old, new in zip(before_params, after_params, strict=True):
            original = new.get(name + _ORIGINAL, old[one.original])
            problems = (_problem(one, *pair) for pair in one.matrices(original, new))
            problem = next((breach for breach in problems if breach is not None), None)
            if problem:
                found.append(problem)
                break
    return found


def _problem(one: _Quantized, original: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> WeightBreach | None:
    """Return how the `parts` of a matrix do not store `original` as they must; None if they do."""
    wrong = one.parts["weight"]
    if one.chosen:
        problem = _chosen_breach(original, parts, one.format)
    elif one.adopted:
        problem = _moved_breach(original, dequantize(parts, one.format).to(original.dtype))
    elif problem := weight_breach(original, parts, one.format):
        wrong = _wrong_part(one, original, parts)
    return None if problem is None else WeightBreach(wrong, problem)


def with_originals(after: Program) -> Program:
    """Return the program with a further param for each weight whose elements a calibration has chosen.

    It is the original weight, with the scales of its rows and columns that the calibration chose.
    """
    program = after.copy()
    for name, spec in after.params.items():
        step = _quantizing(spec.recipe)
        if step is not None and step.output == "weight" and len(step.inputs) > 1:
            shape = find_format(str(step.attr("format"))).shape_of(tuple(spec.type.bind({})))
            program.params[name + _ORIGINAL] = ParamSpec(TensorType(torch.float32, shape), step.inputs[0])
    return program


def _chosen_breach(original: torch.Tensor, parts: Mapping[str, torch.Tensor], format: Format) -> Breach | None:
    """Return how elements that a calibration chose are too far from `original`; None if they are not."""
    exact = original.double()
    found, rounded = (dequantize(one, format, torch.float64) for one in (parts, quantize(original, format)))
    error, usual = float((found - exact).norm()), float((rounded - exact).norm())
    if error <= _CHOSEN_ERROR * usual:
        return None
    size = float(exact.norm())
    text = f"the weight is off by {error / size:.3g} of its size, and {usual / size:.3g} by rounding to nearest"
    return Breach(error, error / size, _CHOSEN_ERROR * usual, text)


def _wrong_part(one: _Quantized, original: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> str:
    """Return the param to report for a wrongly quantized weight: elements, scales or zeros.

    It is the one that differs from quantizing `original` again. If several differ, it is the elements.
    """
    expected = quantize(original, one.format)
    wrong = [name for part, name in one.parts.items() if not _same(parts[part], expected[part])]
    return wrong[0] if len(wrong) == 1 else one.parts["weight"]


def weight_breach(original: torch.Tensor, parts: Mapping[str, torch.Tensor], format: Format) -> Breach | None:
    """Return how a quantized matrix differs from `original` [N, K] more than rounding allows; None if it does not.

    `parts` holds the tensors that store the matrix in `format`, by part name.
    """
    if format.element == KEPT:
        return _moved_breach(original, dequantize(parts, format))
    exact = original.double()
    error = (dequantize(parts, format, torch.float64) - exact).abs()
    scales = _scales(parts, format)
    step = _spread(scales, format.levels[0], original.shape)
    # Quantizing divides and rounds in float32, so a value halfway between two elements may go to either. Rounding a
    # zero point moves all elements by at most half an element, so the ends of the range are no farther off than the
    # rest.
    allowed = _half_gap(exact / step, format) * step + TOLERANCES[torch.float32].rtol * exact.abs()
    if not bool((error <= allowed).all()):
        index = int((error - allowed).nan_to_num(nan=float("inf")).argmax())
        most, steps = float(error.flatten()[index]), float((error / step).flatten()[index])
        text = f"a value is off by {steps:.3g} steps of {float(step.flatten()[index]):.3g}"
        return Breach(most, most / float(exact.abs().max()), float(allowed.flatten()[index]), text)
    needed = _scales(quantize(original, format), format)
    wide = scales > needed * (1 + TOLERANCES[torch.float32].rtol)
    if format.levels[0].dtype is torch.float8_e8m0fnu:
        wide = scales != needed
    if bool(wide.any()):
        index = int((scales / needed).argmax())
        most, least = float(scales.flatten()[index]), float(needed.flatten()[index])
        text = f"a step is {most:.3g}, but the weights' range needs {least:.3g}"
        return Breach(most - least, (most - least) / least, least, text)
    return None


def _moved_breach(original: torch.Tensor, found: torch.Tensor) -> Breach | None:
    """Return how `found` differs from the weight `original`, which a lossless format stores; None if it does not."""
    if torch.equal(found, original):
        return None
    error = (found.double() - original.double()).abs().nan_to_num(nan=float("inf"))
    most = float(error.max())
    return Breach(
        most, most / float(original.double().abs().max()), 0.0, f"a value is off by {most:.3g}, but must be exact"
    )


def _scales(parts: Mapping[str, torch.Tensor], format: Format) -> torch.Tensor:
    """Return the scale of each block of the first level, in float64: the product of the scales of all levels."""
    scales = parts["scales"].double()
    return scales * outer_of_blocks(parts["outer"].double(), format, scales) if "outer" in parts else scales


def _half_gap(values: torch.Tensor, format: Format) -> torch.Tensor:
    """Return half the distance between the elements around each of `values`, in units of the scale.

    Integers have a distance of 1. A scale that is a power of two leaves the largest values of a block beyond the
    largest element, so these may be off by what they exceed it.
    """
    element = ELEMENTS[format.element]
    if element.integer:
        return torch.full_like(values, 0.5)
    numbers = element.numbers()
    half = numbers.diff()[torch.bucketize(values, numbers[1:-1])] / 2
    beyond = values.abs() - element.high if format.levels[0].dtype is torch.float8_e8m0fnu else torch.zeros_like(half)
    return torch.maximum(half, beyond)


def _spread(scales: torch.Tensor, level: Scales, shape: Sequence[int]) -> torch.Tensor:
    rows, columns = level.rows or shape[0], level.columns or shape[1]
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have equal bits. torch compares no floats of eight bits."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def with_rounded_weights(
    before: Program, after: Program, before_params: RankParams, after_params: RankParams
) -> tuple[Program, list[dict[str, torch.Tensor]]]:
    """Return the program `before` with the rounded weights of the quantized program `after`, and each rank's params.

    Each linear that `after` quantizes reads the dequantized weight, in float64. If its format rounds activations, the
    linear does so too. Callers compare the result with `after`. If the float64 results are equal, quantizing changed
    nothing but the weights and the activations.
    """
    program, params = before.copy(), [dict(values) for values in before_params]
    for name, spec in before.params.items():
        if name in after.params and after.params[name].recipe != spec.recipe:  # a calibration divided it by scales
            for values, quantized in zip(params, after_params, strict=True):
                values[name] = quantized[name]
    kept = _float_weights(after)
    for one in _quantized(before, after):
        if one.original is None:
            continue
        name, old = f"{one.original}.rounded", program.find(one.original)
        new = program.add_param(name, before.params[one.original])
        for values, quantized in zip(params, after_params, strict=True):
            values[name] = one.dequantized(quantized)
        for stored in one.of_input().values():
            if stored not in program.params:  # linears may share it
                program.add_param(stored, after.params[stored])
                for values, quantized in zip(params, after_params, strict=True):
                    values[stored] = quantized[stored]
        for user in list(old.users):
            if (user.name, one.original) in kept:
                continue
            of_input = {part: program.find(held) for part, held in one.of_input().items()}
            if is_call(user, ops.linear.overload):
                _reweigh(user, old, new)
                _round_input(user, one.format, of_input)
            elif (experts := experts_of(user)) is not None:
                _reweigh_experts(user, experts, old, StoredWeight(_of_floats(one.format), {"weight": new, **of_input}))
    return program, params


def kl_divergence(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the mean Kullback-Leibler divergence of next-token distributions over positions, in nats.

    `before` and `after` are logits [positions, vocab]. It says how far the distributions moved.
    """
    old, new = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return float((old.exp() * (old - new)).sum(-1).mean())


def _quantized(before: Program, after: Program) -> Iterator[_Quantized]:
    """Yield each quantized weight of the program `after` that the program `before` does not have."""
    names = {spec.recipe: name for name, spec in before.params.items()}
    seen = set(before.params)
    for weight, stacked in _stored_weights(after):
        parts = {part: str(node.target) for part, node in weight.parts.items()}
        if parts["weight"] in seen or parts["weight"] not in after.params:
            continue
        seen.add(parts["weight"])
        step = _quantizing(after.params[parts["weight"]].recipe)
        # Find the original by name, because the recipe may be wrong.
        base = parts["weight"].removesuffix(".qweight")
        named = next((name for name in (f"{base}.weight", base) if name in before.params), None)
        original = named or (names.get(step.inputs[0]) if step else None)
        chosen = step is not None and len(step.inputs) > 1
        yield _Quantized(parts, weight.format, original, step is None, chosen, stacked)


def _stored_weights(program: Program) -> Iterator[tuple[StoredWeight, bool]]:
    """Yield each quantized weight that a call multiplies by, and whether it is a stack of matrices."""
    for node in program.calls():
        if is_call(node, ops.quant_linear.overload) and (matmul := matmul_of(node)) is not None:
            yield matmul.weight, False
        elif (experts := experts_of(node)) is not None:
            yield from ((one, True) for one in experts.weights.values() if one.format.name != PLAIN)


def has_quantized_weights(program: Program) -> bool:
    """Return whether a call of the program multiplies by a quantized weight."""
    return any(True for _ in _stored_weights(program))


def _float_weights(program: Program) -> set[tuple[str, str]]:
    """Return (call, param) for each weight of linears and experts that is one tensor of floats."""
    found = {(node.name, str(named_arguments(node)["weight"].target)) for node in program.calls(ops.linear.overload)}
    for node in program.calls(ops.experts.overload):
        experts = experts_of(node)
        assert experts is not None
        plain = (one for one in experts.weights.values() if one.format.name == PLAIN)
        found |= {(node.name, str(one.parts["weight"].target)) for one in plain}
    return found


def _quantizing(recipe: Recipe) -> Recipe | None:
    """Return the quantize step in a weight's recipe; None if it has none. A recipe says how the weight is made."""
    if recipe.step == "quantize":
        return recipe
    return next((found for inner in recipe.inputs if (found := _quantizing(inner))), None)


def _reweigh(linear: fx.Node, old: fx.Node, new: fx.Node) -> None:
    if named_arguments(linear)["weight"] is old:
        linear.replace_input_with(old, new)


def _reweigh_experts(node: fx.Node, experts: StoredExperts, old: fx.Node, new: StoredWeight) -> None:
    """Make a call of experts multiply by the weight `new` in place of the param `old`."""
    weights = {name: new if one.parts["weight"] is old else one for name, one in experts.weights.items()}
    op, args, node.kwargs = replace(experts, weights=weights).call()
    node.target, node.args = op.overload, tuple(args)


def _of_floats(format: Format) -> Format:
    """Return the format of floats that rounds and rotates its input as `format` does, if it rounds it."""
    if format.activations is None:
        return find_format(PLAIN)
    return format_of(KEPT, activations=format.activations, rotated_in=format.rotated_in, rotated_out=format.rotated_out)


def _round_input(linear: fx.Node, format: Format, parts: Mapping[str, fx.Node]) -> None:
    """Make a linear rotate and round its input as `format` says, if it rounds it, before it multiplies it.

    The linear's plain weight is that of the rotated input. `parts` are the further parts that this needs, by name.
    """
    if format.activations is None:
        return
    bound = named_arguments(linear)
    weight = StoredWeight(_of_floats(format), {"weight": bound["weight"], **parts})
    op, args, linear.kwargs = Matmul(bound["x"], weight, bound["bias"]).call()
    linear.target, linear.args = op.overload, tuple(args)
