"""Compute statistics of a model's weights that show which rewrites would make it less accurate."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ingot.ir.ops import op_of
from ingot.ir.program import ParamSpec, Program, named_arguments

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Measure:
    """A statistic of a weight, and what a large value means.

    If the value exceeds `bound`, the rewrites in `risky` lose accuracy. `source` says where the bound comes from.
    """

    name: str
    bound: float
    source: str
    risky: str


# LLM.int8() calls a feature of the hidden states an outlier from a magnitude of 6.0. Normed states have a mean square
# of one, so a gain of 6 turns any channel into an outlier. Weights are compared with their own root mean square.
_OUTLIER, _OUTLIER_SOURCE = 6.0, "LLM.int8(), arXiv 2208.07339: outlier features from 6.0 on"

MEASURES: Mapping[str, Measure] = {
    one.name: one
    for one in (
        Measure(
            "largest gain",
            _OUTLIER,
            f"{_OUTLIER_SOURCE}; Qwen3-0.6B's K norm reaches 96.5",
            "folding the gain into weights, rounding before the gain, few bits for activations",
        ),
        Measure(
            "zero gains",
            0.0,
            "a quotient of zero",
            "whatever divides by a gain, as moving scales from activations into weights does",
        ),
        Measure(
            "outlier in a row: largest / rms",
            _OUTLIER,
            _OUTLIER_SOURCE,
            "quantize with one scale a row or a tensor: small weights of the row round to nothing",
        ),
        Measure(
            "outlier channel: rms / rms of all",
            _OUTLIER,
            _OUTLIER_SOURCE,
            "float16, sums of squares in less than float32, few bits for activations",
        ),
        Measure(
            "massive values: largest / median",
            1000.0,
            "massive activations, arXiv 2402.17762: some thousand times the median",
            "float16, few bits for activations or the cache",
        ),
        Measure(
            "rows of zeros",
            0.0,
            "a group of zeros has no scale",
            "quantize by a format that divides by the range; norms of such a row",
        ),
        Measure("values that are not finite", 0.0, "no sum with one is finite", "every rewrite: all results are lost"),
    )
}


@dataclass(frozen=True)
class WeightStatistic:
    """One statistic over all params of a kind: params whose names differ only in the layer number.

    `value` is the largest value. It belongs to the param `param` of layer `layer`. `params` is the number of params of
    the kind, and `exceed` is how many of them exceed the bound of `measure`.
    """

    measure: Measure
    kind: str
    value: float
    param: str
    layer: int | None
    exceed: int
    params: int

    @property
    def is_risk(self) -> bool:
        return self.exceed > 0


def weight_statistics(programs: Iterable[Program], read: Read) -> tuple[WeightStatistic, ...]:
    """Return the statistics of the weights of traced programs. Only one weight is in memory at a time.

    `read` takes a name and returns the checkpoint tensor.
    """
    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for name, spec, role in _params(programs):
        for measure, value in _values(spec.recipe.execute(read), role):
            found.setdefault((_LAYER.sub("*", name), measure), []).append((value, name))
    return tuple(_worst(kind, MEASURES[measure], values) for (kind, measure), values in sorted(found.items()))


def _worst(kind: str, measure: Measure, values: list[tuple[float, str]]) -> WeightStatistic:
    value, param = max(values, key=lambda item: item[0])  # the first of equals
    exceed = sum(one > measure.bound for one, _ in values)
    layer = _LAYER.search(param)
    return WeightStatistic(measure, kind, value, param, int(layer[0]) if layer else None, exceed, len(values))


# The layer number, as in layers.0.mlp.up.weight.
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")

# The role of the argument `weight` of an op in a traced program.
_ROLES: Mapping[str, str] = {"rms_norm": "gain", "layer_norm": "gain", "linear": "matrix", "embedding": "embedding"}


def _params(programs: Iterable[Program]) -> Iterator[tuple[str, ParamSpec, str]]:
    """Yield (name, spec, role) for each param that is the weight of a norm, a linear or the embedding.

    The role is "gain" for a norm, "matrix" for a linear, and "embedding". A weight that embedding and linear share has
    the role "embedding".
    """
    found: dict[str, tuple[ParamSpec, str]] = {}
    for program in programs:
        for node in program.calls():
            op = op_of(node.target)
            if op is None or op.name not in _ROLES:
                continue
            weight = named_arguments(node)["weight"]
            name, role = str(weight.target), _ROLES[op.name]
            if name in program.params and (name not in found or role == "embedding"):
                found[name] = program.params[name], role
    for name, (spec, role) in found.items():
        yield name, spec, role


def _values(tensor: torch.Tensor, role: str) -> Iterator[tuple[str, float]]:
    yield "values that are not finite", float((~tensor.isfinite()).sum())
    values = tensor.float().nan_to_num(0.0, 0.0, 0.0)
    if role == "gain":
        yield "largest gain", float(values.abs().max())
        yield "zero gains", float((values == 0).sum())
        return
    yield "rows of zeros", float((values == 0).all(-1).sum())
    if role == "matrix":
        yield "outlier in a row: largest / rms", _ratio(values.abs().amax(-1), _rms(values, -1))
    yield "outlier channel: rms / rms of all", _ratio(_rms(values, 0), _rms(values.flatten(), 0))
    if role == "embedding":
        yield "massive values: largest / median", _ratio(values.abs().max(), values.abs().flatten().median())


def _rms(values: torch.Tensor, dim: int) -> torch.Tensor:
    return values.square().mean(dim).sqrt()


def _ratio(above: torch.Tensor, below: torch.Tensor) -> float:
    """Return the largest quotient of elements of `above` and `below`. A quotient with divisor zero counts as 0.

    Another statistic counts rows of zeros.
    """
    return float(torch.where(below > 0, above / below, 0.0).max())
