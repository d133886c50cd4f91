"""Build the graph of an ONNX model from the calls of a region. Computation is in float32, with casts where values
are rounded, except where the runtime of the model handles 16-bit dtypes itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import fx

from ingot.backends.onnx.model import ELEMENTS, FLOAT, IN_FLOAT32, NARROW, Native
from ingot.ir.program import tensor_type
from ingot.ir.types import TensorType


@dataclass
class Graph:
    """The nodes and constants of an ONNX graph, and the tensors that hold each value of the region's program.

    A value of a 16-bit dtype has up to two tensors: one of its own dtype, and one of float32 with the same numbers.
    Each is made when a node first reads it. `native` says which work the runtime of the model does in these dtypes.
    """

    native: Native = IN_FLOAT32
    nodes: list[NodeProto] = field(default_factory=list)
    constants: dict[tuple[Any, ...], TensorProto] = field(default_factory=dict)
    _stored: dict[fx.Node, str] = field(default_factory=dict)
    _wide: dict[fx.Node, str] = field(default_factory=dict)
    _tuples: dict[fx.Node, tuple[str, ...]] = field(default_factory=dict)
    _count: int = 0

    # Nodes and constants.

    def several(self, kind: str, *inputs: str, results: int, **attributes: Any) -> list[str]:
        """Add an ONNX node, and return the names of its results."""
        names = [f"v{self._count + index}" for index in range(results)]
        self._count += results
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=f"n{len(self.nodes)}", **attributes))
        return names

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add an ONNX node with one result, and return the result's name."""
        return self.several(kind, *inputs, results=1, **attributes)[0]

    def ints(self, *values: int) -> str:
        """Return the name of a constant vector of int64."""
        return self._constant(np.array(values, dtype=np.int64))

    def number(self, value: float) -> str:
        """Return the name of a float32 constant without axes."""
        return self._constant(np.array(value, dtype=np.float32))

    def _constant(self, array: np.ndarray[Any, Any]) -> str:
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.constants:
            self.constants[key] = numpy_helper.from_array(array, f"c{len(self.constants)}")
        return str(self.constants[key].name)

    # Values of the program.

    def give(self, node: fx.Node, name: str) -> None:
        """State that the tensor `name` holds a value of the program, in the dtype of its type."""
        self._stored[node] = name

    def wide(self, node: fx.Node) -> str:
        """Return the name of a float32 tensor with the numbers of a value; a value of integers keeps its dtype."""
        if tensor_type(node).dtype not in NARROW:
            return self._stored[node]
        if node not in self._wide:
            self._wide[node] = self.op("Cast", self._stored[node], to=FLOAT)
        return self._wide[node]

    def stored(self, node: fx.Node) -> str:
        """Return the name of a tensor that holds a value in its own dtype."""
        if node not in self._stored:  # the float32 tensor has numbers of the dtype
            self._stored[node] = self.op("Cast", self._wide[node], to=ELEMENTS[tensor_type(node).dtype])
        return self._stored[node]

    def rounded(self, name: str, dtype: torch.dtype) -> str:
        """Return the float32 tensor `name`, rounded to a dtype and kept in float32."""
        if dtype not in NARROW:
            return name
        return self.op("Cast", self.op("Cast", name, to=ELEMENTS[dtype]), to=FLOAT)

    def result(self, node: fx.Node, *names: str) -> None:
        """State that the float32 tensors `names` hold the results of a call, before they are rounded."""
        types = result_types(node)
        held = [
            self.op("Cast", name, to=ELEMENTS[one.dtype]) if one.dtype in NARROW else name
            for name, one in zip(names, types, strict=True)
        ]
        if isinstance(node.meta["type"], TensorType):
            self._stored[node] = held[0]
        else:
            self._tuples[node] = tuple(held)

    def factors(self, *nodes: fx.Node) -> list[str]:
        """Return the names of the tensors that a matmul reads: in their own dtype if the runtime multiplies in it."""
        return [self.stored(node) if self._multiplies(nodes) else self.wide(node) for node in nodes]

    def product(self, node: fx.Node, name: str, *factors: fx.Node) -> None:
        """State that the tensor `name` holds the result of a matmul of `factors`, read as `factors()` named them."""
        if self._multiplies(factors):
            self._stored[node] = name
        else:
            self.result(node, name)

    def _multiplies(self, factors: Sequence[fx.Node]) -> bool:
        dtypes = {tensor_type(one).dtype for one in factors}
        return len(dtypes) == 1 and dtypes <= self.native.products

    def moving(self, node: fx.Node) -> str:
        """Return the name of the tensor that a call reads which only moves numbers."""
        return self.stored(node) if tensor_type(node).dtype in self.native.moves else self.wide(node)

    def moved(self, node: fx.Node, name: str) -> None:
        """State that the tensor `name` holds the result of a call that moved numbers which `moving` named."""
        dtype = tensor_type(node).dtype
        if dtype in NARROW and dtype not in self.native.moves:
            self._wide[node] = name
        else:
            self._stored[node] = name

    def take(self, node: fx.Node) -> None:
        """Translate a getitem: its value is one of the results of a call."""
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        self._stored[node] = self._tuples[source][index]


def result_types(node: fx.Node) -> tuple[TensorType, ...]:
    """Return the types of the results of a call."""
    found = node.meta["type"]
    return (found,) if isinstance(found, TensorType) else tuple(found.items)
