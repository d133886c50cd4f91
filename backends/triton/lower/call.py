"""The argument of a lowering: a call of an op, with tensors as Values in place of graph nodes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.ops import op_of
from ingot.ir.program import named_arguments, target_name
from ingot.ir.types import DTYPE_NAMES, TensorType


@dataclass(frozen=True)
class Call:
    """A call of an op, the argument of a lowering (a function that translates calls into kernel launches).

    `op` is the op's name. `values` are the call's tensors by parameter name, None for an absent optional one.
    `attributes` are its other arguments by name. `results` are the types of its results, without updated states such as
    the KV cache.
    """

    op: str
    values: Mapping[str, Value | None]
    attributes: Mapping[str, Any]
    results: tuple[TensorType, ...]

    def value(self, name: str) -> Value:
        """Return the tensor of the parameter `name`, which must be present."""
        value = self.values[name]
        assert value is not None, f"{self.op} without {name}"
        return value

    def optional(self, name: str) -> Value | None:
        """Return the tensor of the parameter `name`, or None if the call does not have it."""
        return self.values.get(name)

    def want(self, holds: bool, reason: str) -> None:
        """Raise Refused with the text `reason` if `holds` is false."""
        if not holds:
            raise Refused(reason)

    def want_dense_rows(self, *names: str) -> None:
        """Raise Refused unless each of these tensors of the call has stride 1 along its last axis."""
        for name in names:
            value = self.values.get(name)
            if value is not None and value.strides[-1] != 1:
                raise Refused(f"{name} is strided along its last axis: {value.type}")

    def dtype_name(self, name: str) -> str:
        """Return the IR name of the dtype of a tensor, such as "bf16"."""
        return DTYPE_NAMES[self.value(name).type.dtype]


def call_of(node: fx.Node, values: Mapping[fx.Node, Value]) -> Call:
    """Return a graph node as a Call, for the function that translates it into launches (its lowering).

    `values` holds the tensor of each source node.
    """
    op = op_of(node.target)
    tensors: dict[str, Value | None] = {}
    attributes: dict[str, Any] = {}
    for name, value in named_arguments(node).items():
        if isinstance(value, fx.Node):
            tensors[name] = values[value]
        elif value is None:
            tensors[name] = None
            attributes[name] = None
        else:
            attributes[name] = value
    items = getattr(node.meta["type"], "items", (node.meta["type"],))
    results = tuple(item for item in items if isinstance(item, TensorType))
    return Call(op.name if op is not None else target_name(node.target), tensors, attributes, results)


# A function that adds the launches of a call to a schedule and returns the results. It raises Refused if there is no
# kernel for the call, which depends only on types, attributes, and the schedule's target and bucket class.
Lowering = Callable[[Call, Schedule], tuple[Value, ...]]
