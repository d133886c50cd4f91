"""Choose a storage format for each layer: the fewest bytes that keep a bound on the KL divergence.

One run over the texts measures each layer's sensitivity: the KL divergence when only this layer has the smallest
format. From there, layers get larger formats in order of divergence saved per byte. Real runs then find how many of
these steps the bound needs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ingot.ir.artifact.quantization import LayerChoice
from ingot.ir.formats import Format, find_format
from ingot.ir.origin import layer_of
from ingot.ir.program import Program, tensor_type
from ingot.quantizing.calibrate import Inputs, grid_of, relative_error
from ingot.quantizing.stream import Lane, Read, Replaced, Stream, input_of, weight_of

# The formats to choose from, with the fewest bytes first.
CANDIDATES = ("int4_g128", "int4_g64", "int4_g32", "int8")
# Tokens on which sensitivities are measured. A copy of them runs through the model for each layer. They decide only an
# order, so few are enough.
PROBE_TOKENS = 2048

Layer = int | None


@dataclass(frozen=True)
class Sensitivity:
    """How much each layer can lose.

    - `weights`: the weights of each layer, by the number of the layer; None: outside layers
    - `formats`: for each weight, its format at each level. Level i is the i-th of CANDIDATES or the next one that the
      weight fits, and the last level keeps the numbers (None)
    - `kl`: for each layer, the mean KL divergence in nats at each level if the other layers keep their numbers. It is
      measured at level 0, and the others are in proportion to the change of the linears' results
    - `bytes`: for each layer, the bytes of its weights at each level
    """

    weights: Mapping[Layer, tuple[str, ...]]
    formats: Mapping[str, tuple[Format | None, ...]]
    kl: Mapping[Layer, tuple[float, ...]]
    bytes: Mapping[Layer, tuple[int, ...]]

    def steps(self) -> tuple[tuple[Layer, int], ...]:
        """Return which layer goes to which level next, until all layers keep their numbers.

        The next step is the one that saves the most divergence per byte.
        """
        levels = dict.fromkeys(self.weights, 0)
        found = []
        while moves := [
            (self._saved(layer, level, to), -order, layer, to)
            for order, (layer, level) in enumerate(levels.items())
            for to in range(level + 1, len(CANDIDATES) + 1)
        ]:
            _, _, layer, to = max(moves, key=lambda move: move[:2])
            levels[layer] = to
            found.append((layer, to))
        return tuple(found)

    def _saved(self, layer: Layer, level: int, to: int) -> float:
        saved = self.kl[layer][level] - self.kl[layer][to]
        added = self.bytes[layer][to] - self.bytes[layer][level]
        return saved / added if added > 0 else float("inf")

    def levels(self, steps: int) -> dict[Layer, int]:
        """Return the level of each layer after the first `steps` steps."""
        return {**dict.fromkeys(self.weights, 0), **dict(self.steps()[:steps])}

    def chosen(self, steps: int) -> dict[str, Format]:
        """Return the formats of weights after the first `steps` steps, without those that keep their numbers."""
        found = {}
        for layer, level in self.levels(steps).items():
            for weight in self.weights[layer]:
                if (format := self.formats[weight][level]) is not None:
                    found[weight] = format
        return found

    def choices(self, steps: int) -> tuple[LayerChoice, ...]:
        """Return the choice for each layer after the first `steps` steps, for the record."""
        names = (*CANDIDATES, None)
        return tuple(
            LayerChoice(layer=layer, format=names[level], kl=self.kl[layer][0])
            for layer, level in self.levels(steps).items()
        )

    def expected_steps(self, bound: float) -> int:
        """Return after how many steps the sum of the layers' divergences is at most `bound`."""
        for count in range(len(self.steps())):
            levels = self.levels(count)
            if sum(self.kl[layer][level] for layer, level in levels.items()) <= bound:
                return count
        return len(self.steps())


def find_sensitivity(
    program: Program,
    weights: Sequence[fx.Node],
    texts: Sequence[Inputs],
    read: Read,
    on_call: Callable[[int, int], None] = lambda done, total: None,
) -> Sensitivity:
    """Measure how sensitive each layer of a traced program is.

    - `weights`: the linears whose formats are chosen
    - `texts`: the inputs of each text; about PROBE_TOKENS tokens of them are used
    - `read`: returns a checkpoint tensor by name
    """
    layers: dict[Layer, dict[str, fx.Node]] = {}
    for node in weights:
        layers.setdefault(layer_of(str(node.meta.get("origin", ""))), {}).setdefault(str(weight_of(node).target), node)
    probe = _Probe(layers, texts)
    stream = Stream(program, read, probe.lanes, on_call)
    with torch.no_grad():
        divergence = probe.run(stream)
    formats = {name: _levels(node) for found in layers.values() for name, node in found.items()}
    sizes = {
        layer: tuple(
            sum(_bytes(node, formats[name][level]) for name, node in found.items())
            for level in range(len(CANDIDATES) + 1)
        )
        for layer, found in layers.items()
    }
    kl = {}
    for layer, found in layers.items():
        errors = [sum(probe.errors[name][level] for name in found) for level in range(len(CANDIDATES) + 1)]
        share = divergence[layer] / errors[0] if errors[0] else 0.0
        kl[layer] = tuple(share * error for error in errors)
    return Sensitivity({layer: tuple(found) for layer, found in layers.items()}, formats, kl, sizes)


@dataclass
class _Probe:
    """Lanes for the original model and for each layer, and the errors of weights at each level.

    Each text has a lane of the original model, and after it a lane for each layer, in which only this layer is rounded.
    """

    layers: Mapping[Layer, Mapping[str, fx.Node]]
    texts: Sequence[Inputs]
    lanes: list[Lane] = field(default_factory=list)
    errors: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens = 0
        for inputs in self.texts:
            first = len(self.lanes)
            self.lanes.append(Lane(inputs, measured=True))
            self.lanes += [Lane(inputs, like=first, measured=True) for _ in self.layers]
            tokens += len(inputs["tokens"])
            if tokens >= PROBE_TOKENS:
                break

    def run(self, stream: Stream) -> dict[Layer, float]:
        """Return the mean KL divergence of each layer's lanes from the original ones."""
        layer_of_weight = {name: place for place, found in enumerate(self.layers.values()) for name in found}
        every = len(self.layers) + 1

        def at_linear(node: fx.Node) -> dict[int, Replaced]:
            name = str(weight_of(node).target)
            if name not in layer_of_weight:
                return {}
            x = torch.cat([stream.value(index, input_of(node)) for index in range(0, len(self.lanes), every)])
            rounded = self._rounded(node, stream.weight(node).float(), x)
            return dict.fromkeys(range(layer_of_weight[name] + 1, len(self.lanes), every), rounded)

        sums = dict.fromkeys(self.layers, 0.0)
        tokens = 0
        original = torch.empty(0)
        for index, logits in stream.run(at_linear):
            found = logits.log_softmax(-1)
            if index % every == 0:
                original, tokens = found, tokens + len(found)
                continue
            layer = list(self.layers)[index % every - 1]
            sums[layer] += float((original.exp() * (original - found)).sum(-1).double().sum())
        return {layer: max(total, 0.0) / tokens for layer, total in sums.items()}

    def _rounded(self, node: fx.Node, weight: torch.Tensor, x: torch.Tensor) -> Replaced:
        """Return the weight in its smallest format, and note the squared relative error at each level."""
        name = str(weight_of(node).target)
        replaced = [
            Replaced(weight if format is None else grid_of(name, weight, format).nearest(weight))
            for format in _levels(node)
        ]
        self.errors[name] = [relative_error(one, weight, x) ** 2 for one in replaced]
        return replaced[0]


def _levels(linear: fx.Node) -> tuple[Format | None, ...]:
    """Return the format of a linear's weight at each level: the candidate, or the next larger one that it fits."""
    shape = tensor_type(weight_of(linear)).bind({})
    found: list[Format | None] = [None]
    for format in map(find_format, reversed(CANDIDATES)):
        fits = format.obstacle(shape) is None and format.below_group(shape) is None
        found.insert(0, format if fits else found[0])
    return tuple(found)


def _bytes(linear: fx.Node, format: Format | None) -> int:
    held = tensor_type(weight_of(linear))
    rows, columns = held.bind({})
    if format is None:
        return rows * columns * held.dtype.itemsize
    types = format.types((rows, columns), held.dtype).values()
    return sum(torch.Size(one.bind({})).numel() * one.dtype.itemsize for one in types)
