"""The argument of a lowering: a call of an op, with values in place of graph nodes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.types import DTYPE_NAMES, TensorType


@dataclass(frozen=True)
class Call:
    """A call of the op `op`.

    `values` are its tensors by parameter name (None for an absent optional one), `attributes` its other arguments, and
    `results` the types of its results, without states.
    """

    op: str
    values: Mapping[str, Value | None]
    attributes: Mapping[str, Any]
    results: tuple[TensorType, ...]

    def value(self, name: str) -> Value:
        """Return a required tensor."""
        value = self.values[name]
        assert value is not None, f"{self.op} without {name}"
        return value

    def optional(self, name: str) -> Value | None:
        return self.values.get(name)

    def want(self, holds: bool, reason: str) -> None:
        """Refuse the call unless `holds`."""
        if not holds:
            raise Refused(reason)

    def want_dense_rows(self, *names: str) -> None:
        """Refuse a call with a tensor whose last axis is strided."""
        for name in names:
            value = self.values.get(name)
            if value is not None and value.strides[-1] != 1:
                raise Refused(f"{name} is strided along its last axis: {value.type}")

    def dtype_name(self, name: str) -> str:
        return DTYPE_NAMES[self.value(name).type.dtype]


# Adds the launches of a call to a schedule and returns the results; raises Refused if there is no kernel for the call.
# The decision depends only on types, attributes, and the schedule's target and bucket class.
Lowering = Callable[[Call, Schedule], tuple[Value, ...]]
