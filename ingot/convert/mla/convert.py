"""Convert a checkpoint with grouped-query attention into one with latent attention, and measure each step."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ingot.compile.request import Request
from ingot.convert.mla.fields import converted_fields
from ingot.convert.mla.moments import OnDone, find_moments
from ingot.convert.mla.rotation import find_matrices
from ingot.convert.mla.sizes import Sizes
from ingot.convert.mla.source import Heads, read_heads, with_attention_of
from ingot.convert.mla.weights import WeightMap, map_weights
from ingot.frontend.trace import trace
from ingot.ir import ops
from ingot.ir.errors import CalibrationError, ConversionError, InternalError
from ingot.ir.numerics.harness import step_inputs
from ingot.ir.program import Model, Program, tensor_type
from ingot.ir.recipe import source
from ingot.models.architectures import read_spec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.quantizing.stream import Lane, Read, Stream, weight_of
from ingot.quantizing.texts import CalibrationText

# A larger loss, in nats per token, counts as this one: its perplexity would not be a number.
_MOST_LOSS = 100.0
# Tokens on which numbers of folded frequencies are compared. As many as are held out measure the result.
_SEARCHED = 8192


@dataclass(frozen=True)
class Converted:
    """A converted model that is not written yet: its config.json, how its tensors are made, and its traced program.

    `read` returns a tensor of the source, or a matrix of the conversion.
    """

    fields: Mapping[str, Any]
    weights: WeightMap
    model: Model
    read: Read

    def perplexity(self, sequences: Sequence[Sequence[int]], on_done: OnDone) -> float:
        return perplexity(self.model.entries["main"], sequences, self.read, on_done)


@dataclass(frozen=True)
class Gate:
    """The perplexity of the model on held-out text after a step of the conversion.

    - `name`: "source", "rotation", "rope cut" or "rank cut"
    - `cache`: elements that the cache has for a token, relative to the source's
    """

    name: str
    perplexity: float
    cache: float


@dataclass
class Conversion:
    """The conversion of one model. Matrices are made of its moments on a calibration text.

    - `request`: the source, read with the options of a compile
    - `text`: the calibration text
    - `moments`: by layer, as `find_moments` returns them
    """

    request: Request
    heads: Heads
    text: CalibrationText
    model: Model
    moments: Mapping[int, torch.Tensor]
    _original: float | None = None
    _measured: dict[Sizes, float] = field(default_factory=dict)

    @staticmethod
    def of(request: Request, text: CalibrationText, on_done: OnDone) -> "Conversion":
        """Run the calibration text through the source. Raises ConversionError, CalibrationError or CheckpointError."""
        heads = heads_of(request)
        model = request.trace()
        main = model.entries["main"]
        linears = [tensor_type(weight_of(node)).bind({}) for node in main.calls(ops.linear.overload)]
        text = text.within(max(shape[1] for shape in linears))
        text.check(2 * heads.keys, "a layer has {columns} elements of keys and values")
        return Conversion(
            request, heads, text, model, find_moments(main, text.sequences, request.checkpoint.read, on_done)
        )

    def gates(self, sizes: Sizes, on_done: OnDone) -> Iterator[Gate]:
        """Yield the perplexity of the source, and after each step that changes the model, on held-out text.

        The steps are: the rotation of keys alone; the rotated key cut to `rope_dim`; the latent cut to `rank`.
        """
        held_out = self.text.held_out
        if self._original is None:
            main = self.model.entries["main"]
            self._original = perplexity(main, held_out, self.request.checkpoint.read, on_done)
        yield Gate("source", self._original, 1.0)
        before = None
        for name, one in (
            ("rotation", sizes.keeping_all()),
            ("rope cut", sizes.keeping_rank()),
            ("rank cut", sizes),
        ):
            if one != before:
                if one not in self._measured:
                    self._measured[one] = self.made(one, {}).perplexity(held_out, on_done)
                yield Gate(name, self._measured[one], one.cache)
            before = one

    def best_freqfold(self, sizes: Sizes, on_done: OnDone) -> int:
        """Return the number of frequencies to fold: it doubles as long as the perplexity after the rope cut falls.

        This perplexity is of the text that the matrices are made of, so that the held-out text stays unseen.
        """
        text = self.text.sequences[: max(1, _SEARCHED // max(map(len, self.text.sequences)))]
        fold, best, least = sizes.stride, sizes.stride, math.inf
        while fold <= sizes.width // 2 and (sizes.width // 2) % fold == 0:
            now = self.made(replace(sizes, freqfold=fold).keeping_rank(), {}).perplexity(text, on_done)
            if now >= least:
                break
            fold, best, least = 2 * fold, fold, now
        return best

    def made(self, sizes: Sizes, record: Mapping[str, Any]) -> Converted:
        """Return the converted model of these sizes. `record` becomes the field `transmla` of its config.json."""
        request, spec = self.request, self.request.spec
        dims, rotary = spec.dims, self.heads.spec.rotary
        assert isinstance(dims, DecoderSpec) and rotary is not None
        found = {
            layer: find_matrices(moment, sizes, interleaved=rotary.interleaved)
            for layer, moment in self.moments.items()
        }
        prefix = f"{dims.names.place}.{dims.names.layers}.{{}}"
        weights = map_weights(self.heads, sizes, found, dims.hidden, prefix, spec.dtype)
        name = str(spec.dtype).removeprefix("torch.")
        fields = converted_fields(request.checkpoint.config, self.heads, sizes, name, record)
        made = replace(read_spec(fields, "the converted config.json"), dtype=spec.dtype)
        if with_attention_of(made.dims, dims) != dims or made.max_position != spec.max_position:
            raise InternalError("the converted config.json describes another model than the source's")
        stored = self._stored(weights)
        model = trace(made, request.limits, stored)
        spelled = self.model.respelled
        for program in model.entries.values():
            for param, one in program.params.items():
                recipe = one.recipe.with_sources(lambda given: weights.recipes.get(given) or source(given))
                recipe = recipe.renamed(lambda given: spelled.get(given, given))
                program.params[param] = replace(one, recipe=recipe)
        return Converted(fields, weights, model, self._read(weights))

    def _stored(self, weights: WeightMap) -> dict[str, torch.dtype]:
        """Return the dtypes of the converted checkpoint's tensors by name, in the names of the definition."""
        ours = {theirs: name for name, theirs in self.model.respelled.items()}
        kept = {ours.get(name, name): info.dtype for name, info in self.request.checkpoint.tensors.items()}
        kept = {name: dtype for name, dtype in kept.items() if name not in weights.replaced}
        return {**kept, **dict.fromkeys(weights.recipes, self.request.spec.dtype)}

    def _read(self, weights: WeightMap) -> Callable[[str], torch.Tensor]:
        read = self.request.checkpoint.read

        def of(name: str) -> torch.Tensor:
            found = weights.matrices.get(name)
            return read(name) if found is None else found

        return of


def heads_of(request: Request) -> Heads:
    """Return the attention of the source. Raises ConversionError if it cannot be converted."""
    where = str(request.checkpoint.folder)
    if request.checkpoint.quantized is not None:
        raise ConversionError(
            "a conversion of quantized weights",
            where=where,
            expected="a checkpoint of floating point weights",
            hint="convert the original checkpoint, and quantize when you compile the result",
        )
    return read_heads(request.spec, where)


def perplexity(program: Program, sequences: Sequence[Sequence[int]], read: Read, on_done: OnDone) -> float:
    """Return the perplexity of a program on sequences of tokens, in float32. Raises CalibrationError if it has none."""
    types = program.input_types()
    lanes = [Lane(step_inputs(types, [sequence])[0], measured=True) for sequence in sequences]
    loss, predicted = 0.0, 0
    with torch.no_grad():
        for index, logits in Stream(program, read, lanes, on_done).run(lambda node: {}):
            following = torch.tensor(sequences[index][1:])
            loss += float(torch.nn.functional.cross_entropy(logits[:-1], following, reduction="sum"))
            predicted += len(following)
    if not math.isfinite(loss):
        raise CalibrationError(
            "the logits of the calibration text are not finite",
            where=f"program {program.name}",
            expected="a model that computes finite logits in float32",
        )
    return math.exp(min(loss / predicted, _MOST_LOSS))
