"""Quantize the weights of a program layer by layer, with the activations of texts, and measure what that changes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ingot.ir.artifact.quantization import QuantizedLinear
from ingot.ir.errors import CalibrationError, CheckpointError
from ingot.ir.formats import Format
from ingot.ir.formats.grid import Grid
from ingot.ir.origin import layer_of
from ingot.ir.program import Program
from ingot.ir.stored.calibrated import CalibratedWeights, ScaledTogether, part_tensor
from ingot.quantizing.channel_scales import awq_scales, smooth_scales
from ingot.quantizing.folds import Fold, find_fold, is_quantizable
from ingot.quantizing.gptq import gptq
from ingot.quantizing.stream import AtLinear, Lane, Read, Replaced, Stream, input_of, weight_of

# Methods that move scales between the weights and the norms or linears before them.
SCALING_METHODS = ("awq", "smoothquant")
METHODS = ("rtn", "gptq", *SCALING_METHODS)
# Rows of an input on which errors are measured and AWQ's scales are searched. Their results have as many samples as
# there are rows times outputs, so the estimate of an error is within a few percent.
SAMPLE_ROWS = 1024

# A larger loss, in nats per token, counts as this one: its perplexity would not be a number.
_MOST_LOSS = 100.0

Inputs = Mapping[str, torch.Tensor]
# Stores a tensor of the calibration by its name.
Store = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True)
class Measurement:
    """The change of a model's predictions on held-out tokens.

    - `kl`: the mean KL divergence of the changed next-token distributions from the original ones, in nats
    - `perplexity`, `reference`: the perplexity of the changed and of the original model
    """

    tokens: int
    kl: float
    perplexity: float
    reference: float


@dataclass(frozen=True)
class Calibration:
    """The result of `calibrate`: the changed params, a report for each weight, and the change of predictions."""

    weights: CalibratedWeights
    linears: tuple[QuantizedLinear, ...]
    measured: Measurement


@dataclass
class _Found:
    """The results so far, in the form of `CalibratedWeights`."""

    formats: dict[str, str] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    vectors: dict[str, str] = field(default_factory=dict)
    together: list[ScaledTogether] = field(default_factory=list)
    linears: list[QuantizedLinear] = field(default_factory=list)

    def join(self, weights: frozenset[str], vectors: frozenset[str]) -> None:
        """Note params that must be changed at once. Groups that share a weight become one."""
        joined = [one for one in self.together if one.weights & weights]
        made = ScaledTogether(
            weights.union(*(one.weights for one in joined)), vectors.union(*(one.vectors for one in joined))
        )
        self.together = [*(one for one in self.together if one not in joined), made]


def calibrate(
    program: Program,
    formats: Mapping[str, Format],
    method: str,
    texts: Sequence[Inputs],
    held_out: Sequence[Inputs],
    read: Read,
    store: Store,
    on_call: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Quantize the weights `formats`, and store the tensors of the result. Only one layer is in memory at a time.

    - `program`: a traced program
    - `formats`: the storage format of each weight, by the name of the param
    - `method`: one of METHODS
    - `texts`: the inputs of each text whose activations the method uses. Each layer reads what the quantized layers
      before it compute
    - `held_out`: the inputs of each text on which the model is measured
    - `read`: returns a checkpoint tensor by name
    - `store`: receives each tensor that `CalibratedWeights` names

    Raises CalibrationError if activations are not finite.
    """
    count, held = len(texts), len(held_out)
    lanes = [
        *(Lane(inputs) for inputs in texts),
        *(Lane(inputs, measured=True) for inputs in held_out),
        *(Lane(inputs, like=count + index, measured=True) for index, inputs in enumerate(held_out)),
    ]
    stream = Stream(program, read, _paired(lanes, count, held), on_call)
    work = _Work(program, stream, formats, method, range(count), store)
    changed = [*range(count), *(count + 2 * index + 1 for index in range(held))]

    def at_linear(node: fx.Node) -> dict[int, Replaced]:
        replaced = work.replaced(node)
        return {} if replaced is None else dict.fromkeys(changed, replaced)

    with torch.no_grad():
        measured = measure(stream, at_linear)
    work.finish()
    found = work.found
    weights = CalibratedWeights(found.formats, found.columns, found.rows, found.vectors, tuple(found.together))
    return Calibration(weights, tuple(found.linears), measured)


def _paired(lanes: Sequence[Lane], count: int, held: int) -> list[Lane]:
    """Return the lanes with each measured lane directly after the lane that it is like."""
    paired = list(lanes[:count])
    for index in range(held):
        original, changed = lanes[count + index], lanes[count + held + index]
        paired += [original, Lane(changed.inputs, like=len(paired), measured=True)]
    return paired


def measure(stream: Stream, at_linear: AtLinear) -> Measurement:
    """Run a stream whose measured lanes are pairs, the original before the changed one. Return their difference."""
    tokens, kl, before, after, predicted = 0, 0.0, 0.0, 0.0, 0
    original = torch.empty(0)
    for index, logits in stream.run(at_linear):
        lane, found = stream.lanes[index], logits.log_softmax(-1)
        if lane.like is None:
            original = found
            continue
        following = lane.inputs["tokens"][1:].long().unsqueeze(-1)
        kl += float((original.exp() * (original - found)).sum(-1).double().sum())
        before -= float(original[:-1].gather(-1, following).double().sum())
        after -= float(found[:-1].gather(-1, following).double().sum())
        tokens, predicted = tokens + len(found), predicted + len(following)
    if not math.isfinite(kl):
        raise CalibrationError(
            "the logits of the calibration text are not finite",
            where=f"program {stream.program.name}",
            expected="a model that computes finite logits in float32",
            hint="compile with --check-numerics and without --calibrate: it names the first tensor that overflows",
        )
    losses = after / predicted, before / predicted
    return Measurement(tokens, max(kl, 0.0) / tokens, *(math.exp(min(loss, _MOST_LOSS)) for loss in losses))


def relative_error(replaced: Replaced, weight: torch.Tensor, sample: torch.Tensor) -> float:
    """Return the root mean square change of a linear's results for the inputs `sample` [S, K], relative to them.

    `weight` is the original one, float32 [N, K].
    """
    results = sample @ weight.T
    change = replaced.input(sample) @ replaced.weight.T - results
    return float((change.square().sum() / results.square().sum().clamp(min=torch.finfo(torch.float32).tiny)).sqrt())


def grid_of(name: str, weight: torch.Tensor, format: Format, importance: torch.Tensor | None = None) -> Grid:
    """Return the grid of a weight, float32 [N, K]; with `importance` [K] of its columns, the fitted one.

    Raises CheckpointError, with the param's name, if the weight has NaN, infinities or values too large for a scale.
    """
    try:
        return Grid.of(weight, format) if importance is None else Grid.fitted(weight, format, importance)
    except ValueError as error:
        raise CheckpointError(str(error), where=f"param {name}", expected="finite numbers") from error


@dataclass
class _Work:
    """Quantizes each group of linears with one input when the stream reaches the first of them."""

    program: Program
    stream: Stream
    formats: Mapping[str, Format]
    method: str
    lanes: Sequence[int]
    store: Store
    found: _Found = field(default_factory=_Found)
    _ready: dict[str, Replaced] = field(default_factory=dict)
    _waiting: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._chosen = [
            node
            for node in self.program.calls()
            if is_quantizable(node) and str(weight_of(node).target) in self.formats
        ]
        self._left = {name: sum(str(weight_of(one).target) == name for one in self._chosen) for name in self.formats}

    def replaced(self, node: fx.Node) -> Replaced | None:
        """Return what a linear computes from now on; None if it keeps its weight."""
        name = str(weight_of(node).target)
        if name not in self.formats:
            return None
        if name not in self.found.formats:
            self._group([one for one in self._chosen if input_of(one) is input_of(node)])
        self._left[name] -= 1
        return self._ready[name] if self._left[name] else self._ready.pop(name)

    def finish(self) -> None:
        """Store the tensors that still wait for scales."""
        for name in list(self._waiting):
            self._write(name)

    def _group(self, linears: list[fx.Node]) -> None:
        x = input_of(linears[0])
        names = list(dict.fromkeys(str(weight_of(node).target) for node in linears))
        names = [name for name in names if name not in self.found.formats]
        by_name = {str(weight_of(node).target): node for node in linears}
        formats = [self.formats[name] for name in names]
        weights = [self.stream.weight(by_name[name]).float() for name in names]
        sample = self._sample(x)
        scales = self._scales(x, names, weights, formats, sample)
        hessian = self._hessian(x, scales) if self.method == "gptq" else None
        for name, weight, format in zip(names, weights, formats, strict=True):
            scaled = weight if scales is None else weight * scales
            grid = grid_of(name, scaled, format, None if hessian is None else hessian.diagonal())
            rounded = grid.nearest(scaled) if hessian is None else gptq(scaled, hessian, grid)
            self._waiting[name] = grid.stored(rounded)
            replaced = Replaced(rounded, scales, format.activations)
            self._ready[name] = replaced
            self.found.formats[name] = format.name
            self.found.linears.append(
                QuantizedLinear(
                    weight=name,
                    layer=layer_of(str(by_name[name].meta.get("origin", ""))),
                    format=format.name,
                    bytes=sum(part.nbytes for part in self._waiting[name].values()),
                    error=relative_error(replaced, weight, sample),
                    scaled=scales is not None,
                )
            )
            if self.method not in SCALING_METHODS or not self._may_be_divided(by_name[name]):
                self._write(name)

    def _may_be_divided(self, linear: fx.Node) -> bool:
        """Return whether scales of a later input may still go into the rows of this linear."""
        return any(
            (fold := find_fold(self.program, user, self._chosen)) is not None and fold.linear is linear
            for user in linear.users
        )

    def _write(self, name: str) -> None:
        for part, tensor in self._waiting.pop(name).items():
            self.store(part_tensor(name, part), tensor)

    def _sample(self, x: fx.Node) -> torch.Tensor:
        """Return up to SAMPLE_ROWS rows of an input, evenly from all texts."""
        total = sum(len(self.stream.value(index, x)) for index in self.lanes)
        every = max(1, total // SAMPLE_ROWS)
        rows = [self.stream.value(index, x)[::every] for index in self.lanes]
        return torch.cat(rows)

    def _hessian(self, x: fx.Node, scales: torch.Tensor | None) -> torch.Tensor:
        total = torch.zeros(0)
        for index in self.lanes:
            rows = self.stream.value(index, x)
            if not len(total):
                total = torch.zeros(rows.shape[1], rows.shape[1])
            total.addmm_(rows.T, rows)
        return total if scales is None else total / scales / scales.unsqueeze(-1)

    def _scales(
        self,
        x: fx.Node,
        names: Sequence[str],
        weights: Sequence[torch.Tensor],
        formats: Sequence[Format],
        sample: torch.Tensor,
    ) -> torch.Tensor | None:
        """Return the scales of an input's channels, and note where they go; None if the channels are not scaled."""
        if self.method not in SCALING_METHODS:
            return None
        fold = find_fold(self.program, x, self._chosen)
        if fold is None or not self._fits(fold):
            return None
        if self.method == "awq":
            magnitude = self._reduced(x, lambda rows: rows.abs().sum(0), torch.add)
            magnitude /= sum(len(self.stream.value(index, x)) for index in self.lanes)
            scales = awq_scales(weights, formats, magnitude, sample)
        else:
            largest = self._reduced(x, lambda rows: rows.abs().amax(0), torch.maximum)
            scales = smooth_scales(weights, largest)
        return None if scales is None else self._folded(fold, names, scales)

    def _reduced(
        self,
        x: fx.Node,
        of: Callable[[torch.Tensor], torch.Tensor],
        combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        first, *others = (of(self.stream.value(index, x)) for index in self.lanes)
        for one in others:
            first = combine(first, one)
        return first

    def _fits(self, fold: Fold) -> bool:
        """Return whether the rows of the fold's linear can be divided after it was quantized, by its stored scales."""
        if fold.linear is None:
            return True
        name = str(weight_of(fold.linear).target)
        waiting = self._waiting.get(name)
        format = self.formats[name]
        return (
            waiting is not None
            and len(format.levels) == 1
            and format.levels[0].rows == 1
            and waiting["scales"].dtype is torch.float32
            and waiting.keys() <= {"weight", "scales", "zeros"}
        )

    def _folded(self, fold: Fold, names: Sequence[str], scales: torch.Tensor) -> torch.Tensor:
        """Store the factors of a fold, and return the scales that they are in effect.

        A gain is stored in the model's dtype. The weights that read the norm are multiplied by what the rounded gain
        divides by, so that rounding it changes nothing.
        """
        factors = 1 / scales
        if fold.linear is None:
            gain = self.stream.value(0, self.program.find(fold.vectors[0]))
            divided = (gain.float() * factors).to(gain.dtype).float()
            scales = torch.where(divided != 0, gain.float() / divided, scales)
        else:
            scales = 1 / factors
        tensor = f"{names[0]}.columns"
        self.store(tensor, scales.unsqueeze(0))
        self.store(f"{names[0]}.factors", factors)
        self.found.columns.update(dict.fromkeys(names, tensor))
        self.found.vectors.update(dict.fromkeys(fold.vectors, f"{names[0]}.factors"))
        members = frozenset(names)
        if fold.linear is not None:
            up = str(weight_of(fold.linear).target)
            self.found.rows[up] = f"{up}.rows"
            self.store(self.found.rows[up], factors.unsqueeze(-1))
            parts = self._waiting[up]
            parts["scales"] = parts["scales"] * factors.unsqueeze(-1)
            members |= {up}
            self._write(up)
        self.found.join(members, frozenset(fold.vectors))
        return scales
