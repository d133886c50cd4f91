"""Checks of a quantizing pass: each weight is within half a scale of the original, and nothing else changes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.formats import Format, dequantize, find_format, quantize
from ingot.ir.numerics.contracts import Breach, RankParams
from ingot.ir.numerics.tolerances import TOLERANCES
from ingot.ir.program import Program, is_call, named_arguments
from ingot.ir.recipe import Recipe


@dataclass(frozen=True)
class WeightBreach:
    """A weight that is quantized wrongly: the wrong param (elements, scales or zeros) by name, and its error."""

    param: str
    breach: Breach


@dataclass(frozen=True)
class _Quantized:
    """A quantized weight of a program.

    parts     the params that store it, by "weight", "scales" and "zeros"
    format    its storage format
    original  the param that it was before quantization; None if there is none
    """

    parts: Mapping[str, str]
    format: Format
    original: str | None

    def dequantized(self, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weight, scales, zeros = self.tensors(params)
        return dequantize(weight, scales, zeros, self.format, torch.float64)

    def tensors(
        self, params: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        scales, zeros = (params[self.parts[part]] if part in self.parts else None for part in ("scales", "zeros"))
        return params[self.parts["weight"]], scales, zeros


def weight_breaches(
    before: Program, after: Program, before_params: RankParams, after_params: RankParams
) -> list[WeightBreach]:
    """Return the weights that the program `after` has quantized wrongly, compared with the program `before`.

    Each value must be within half its scale of the original value. No scale may be larger than its block's values need.
    `before_params` and `after_params` hold the params of each rank by name.
    """
    found = []
    for one in _quantized(before, after):
        name = one.parts["weight"]
        if one.original is None:
            text = "it is not quantized from a param of the program before"
            found.append(WeightBreach(name, Breach(float("inf"), float("inf"), 0.0, text)))
            continue
        for old, new in zip(before_params, after_params, strict=True):
            if problem := weight_breach(old[one.original], *one.tensors(new), one.format):
                found.append(WeightBreach(_wrong_part(one, old[one.original], new), problem))
                break
    return found


def _wrong_part(one: _Quantized, original: torch.Tensor, params: Mapping[str, torch.Tensor]) -> str:
    """Return the param to report for a wrongly quantized weight: elements, scales or zeros.

    It is the one that differs from quantizing `original` again. If several differ, it is the elements.
    """
    expected = quantize(original, one.format)
    wrong = [name for part, name in one.parts.items() if not torch.equal(params[name], expected[part])]
    return wrong[0] if len(wrong) == 1 else one.parts["weight"]


def weight_breach(
    original: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    format: Format,
) -> Breach | None:
    """Return how a quantized matrix differs from `original` [N, K] more than rounding allows; None if it does not.

    `weight` holds the packed elements. `scales` and `zeros` are None if `format` has none.
    """
    if scales is None:
        return _moved_breach(original, dequantize(weight, None, None, format))
    exact = original.double()
    error = (dequantize(weight, scales, zeros, format, torch.float64) - exact).abs()
    step = _spread(scales.double(), original.shape)
    # Quantizing divides and rounds in float32, so a value halfway between two elements may go to either. Rounding a
    # zero point moves all elements by at most half an element, so the ends of the range are no farther off than the
    # rest.
    allowed = step / 2 + TOLERANCES[torch.float32].rtol * exact.abs()
    if not bool((error <= allowed).all()):
        index = int((error - allowed).nan_to_num(nan=float("inf")).argmax())
        most, steps = float(error.flatten()[index]), float((error / step).flatten()[index])
        text = f"a value is off by {steps:.3g} steps of {float(step.flatten()[index]):.3g}"
        return Breach(most, most / float(exact.abs().max()), float(allowed.flatten()[index]), text)
    needed = quantize(original, format)["scales"].double()
    wide = scales.double() > needed * (1 + TOLERANCES[torch.float32].rtol)
    if bool(wide.any()):
        index = int((scales.double() / needed).argmax())
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


def _spread(scales: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    rows, columns = (size // count for size, count in zip(shape, scales.shape, strict=True))
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def with_rounded_weights(
    before: Program, after: Program, before_params: RankParams, after_params: RankParams
) -> tuple[Program, list[dict[str, torch.Tensor]]]:
    """Return the program `before` with the rounded weights of the quantized program `after`, and each rank's params.

    Each linear that `after` quantizes reads the dequantized weight, in float64. Callers compare the result with
    `after`. If the float64 results are equal, quantizing changed nothing but the weights.
    """
    program, params = before.copy(), [dict(values) for values in before_params]
    kept = {node.name for node in after.calls(ops.linear.overload)}
    for one in _quantized(before, after):
        if one.original is None:
            continue
        name, old = f"{one.original}.rounded", program.find(one.original)
        new = program.add_param(name, before.params[one.original])
        for values, quantized in zip(params, after_params, strict=True):
            values[name] = one.dequantized(quantized)
        for user in list(old.users):
            if is_call(user, ops.linear.overload) and user.name not in kept:
                _reweigh(user, old, new)
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
    for node in after.calls(ops.quant_linear.overload):
        bound = named_arguments(node)
        parts = {part: str(bound[part].target) for part in ("weight", "scales", "zeros") if bound[part] is not None}
        if parts["weight"] in seen or parts["weight"] not in after.params:
            continue
        seen.add(parts["weight"])
        step = _quantizing(after.params[parts["weight"]].recipe)
        # Find the original by name, because the recipe may be wrong.
        named = f"{parts['weight'].removesuffix('.qweight')}.weight"
        original = named if named in before.params else names.get(step.inputs[0]) if step else None
        yield _Quantized(parts, find_format(bound["format"]), original)


def _quantizing(recipe: Recipe) -> Recipe | None:
    """Return the quantize step in a weight's recipe; None if it has none. A recipe says how the weight is made."""
    if recipe.step == "quantize":
        return recipe
    return next((found for inner in recipe.inputs if (found := _quantizing(inner))), None)


def _reweigh(linear: fx.Node, old: fx.Node, new: fx.Node) -> None:
    if named_arguments(linear)["weight"] is old:
        linear.replace_input_with(old, new)
