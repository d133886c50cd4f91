"""The graph of an exported decoder: the one of a region, with weights in a file of their own and inputs of a batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from onnx import ValueInfoProto, helper
from torch import fx

from ingot.backends.onnx.graph import Graph
from ingot.backends.onnx.model import ELEMENTS
from ingot.ir.program import ParamSpec

# The domain of ONNX Runtime's own ops. onnx.checker knows none of them: it checks neither attributes nor types.
CUSTOM_DOMAIN = "com.microsoft"
CUSTOM_OPS = ("GroupQueryAttention", "MatMulNBits")
UINT8 = 2  # TensorProto.UINT8 in onnx.proto

INPUT_IDS, ATTENTION_MASK, LOGITS = "input_ids", "attention_mask", "logits"
PAST = "past_key_values.{layer}.{part}"
PRESENT = "present.{layer}.{part}"
BATCH, SEQUENCE, PAST_LENGTH, TOTAL_LENGTH, WINDOW_LENGTH = (
    "batch_size",
    "sequence_length",
    "past_sequence_length",
    "total_sequence_length",
    "window_cache_length",
)


@dataclass(frozen=True)
class Weight:
    """An initializer: its ONNX element type and shape, the params that it is made of, and how.

    `make` gets the tensors of the params in order, and returns the initializer's elements in row-major order.
    """

    name: str
    element: int
    shape: tuple[int, ...]
    params: tuple[str, ...]
    make: Callable[..., torch.Tensor]


@dataclass(frozen=True)
class CachedLayer:
    """A layer with a KV cache: heads of q and of the cache, their width, and the window of its attention (0: none)."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    dtype: torch.dtype


@dataclass
class DecoderGraph(Graph):
    """The ONNX graph of a decoder.

    `params` are the program's. `max_seq_len` is the most tokens of a sequence; a window of as many is none. With
    `window_caches`, layers with a window have caches of about its size, from which attention drops old tokens.
    `weights` are the initializers, `layers` the caches by number, and `decoded` the formats
    of weights that are stored decoded. `typed` has the types of values that ONNX cannot infer. Rows of the program are
    the tokens of all sequences, one after another; attention alone sees the batch.
    """

    params: Mapping[str, ParamSpec] = field(default_factory=dict)
    max_seq_len: int = 0
    window_caches: bool = True
    weights: dict[str, Weight] = field(default_factory=dict)
    layers: dict[int, CachedLayer] = field(default_factory=dict)
    decoded: dict[str, str] = field(default_factory=dict)
    typed: list[ValueInfoProto] = field(default_factory=list)
    _batch_shape: str = ""
    _lengths: str = ""
    _total: str = ""

    def begin(self, inputs: Mapping[str, fx.Node]) -> None:
        """Make the program's inputs of the model's: tokens and positions by row, and the lengths for attention."""
        self._batch_shape = self.op("Shape", INPUT_IDS)
        used = self.op("ReduceSum", ATTENTION_MASK, self.ints(-1), keepdims=1)  # [batch, 1]
        self._lengths = self.op("Cast", self.op("Sub", self.op("Squeeze", used, self.ints(-1)), self.ints(1)), to=6)
        self._total = self.op("Cast", self._size(self.op("Shape", ATTENTION_MASK), 1), to=6)
        if "tokens" in inputs:
            self.give(inputs["tokens"], self.op("Reshape", INPUT_IDS, self.ints(-1)))
        if "positions" in inputs:
            # The first prompts may be padded at their ends: they have fewer tokens than the step, and begin at 0.
            length = self._size(self._batch_shape, 1)
            before = self.op("Max", self.op("Sub", used, length), self.ints(0))
            steps = self.op("Range", self._scalar(0), length, self._scalar(1))
            self.give(inputs["positions"], self.op("Reshape", self.op("Add", before, steps), self.ints(-1)))

    def _size(self, shape: str, axis: int) -> str:
        return self.op("Gather", shape, self._scalar(axis), axis=0)

    def _scalar(self, value: int) -> str:
        return self.op("Squeeze", self.ints(value))

    def by_sequence(self, name: str, *sizes: int) -> str:
        """Return the rows `name` [tokens, …] as a tensor [batch, sequence, *sizes]."""
        return self.op("Reshape", name, self.op("Concat", self._batch_shape, self.ints(*sizes), axis=0))

    def lengths(self) -> tuple[str, str]:
        """Return the names of two i32 tensors: each sequence's tokens less one [batch], and the most tokens of one."""
        return self._lengths, self._total

    def custom(self, kind: str, *inputs: str, outputs: tuple[str, ...] = (), **attributes: Any) -> str:
        """Add an op of ONNX Runtime, and return the name of its first result. `outputs` are names of further ones."""
        assert kind in CUSTOM_OPS
        made = f"v{self._count}"
        self._count += 1
        self.nodes.append(
            helper.make_node(
                kind,
                list(inputs),
                [made, *outputs],
                name=f"n{len(self.nodes)}",
                domain=CUSTOM_DOMAIN,
                **attributes,
            )
        )
        return made

    def state_type(self, name: str, dtype: torch.dtype, *shape: int | str) -> None:
        """State the type of a result of an op of ONNX Runtime."""
        self.typed.append(helper.make_tensor_value_info(name, ELEMENTS[dtype], list(shape)))

    def weight(self, made: Weight) -> str:
        """Add an initializer, if it is not there yet, and return its name."""
        self.weights.setdefault(made.name, made)
        return made.name

    def give_param(self, node: fx.Node) -> None:
        """Make an initializer of a param, with the param's numbers. Codes of quantized weights get theirs when read."""
        name = str(node.target)
        value_type = self.params[name].type
        if value_type.dtype not in ELEMENTS:
            return
        self.give(node, name)
        self.weight(Weight(name, ELEMENTS[value_type.dtype], value_type.bind({}), (name,), _same))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
