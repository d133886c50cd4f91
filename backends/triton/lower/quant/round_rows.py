"""Lowering of the op `round_rows`, alone or fused with the gate before it."""

from collections.abc import Mapping, Sequence

from torch import fx

from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.linear.call import static_size
from ingot.backends.triton.lower.quant.form import rounding_of
from ingot.backends.triton.lower.quant.prepared_rows import GivenRows, round_into
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.lower.rows import FLOATS
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir import ops
from ingot.ir.formats import find_format
from ingot.ir.machine.gpus import FEATURES
from ingot.ir.program import is_call, named_arguments, tensor_type
from ingot.ir.types import TensorType, TupleType

_SILU, _GELU = ops.silu_mul.overload, ops.gelu_mul.overload
_GELU_KINDS = {"none": "gelu", "tanh": "gelu_tanh"}


def _round_rows(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    return _launch(call.value("x"), call.optional("stored"), call.attributes["format"], call.results, schedule)


def rounding_group(node: fx.Node, free: Mapping[fx.Node, object]) -> list[fx.Node]:
    """Return the region of a call of `round_rows`: the gate before it, the call, and its results one by one.

    It is empty if there is no gate that can be fused. `free` holds the calls that are in no other region yet.
    """
    gate = node.args[0]
    assert isinstance(gate, fx.Node)
    if gate not in free or gate.target not in (_SILU, _GELU) or len(gate.users) != 1:
        return []
    if len(tensor_type(gate).shape) != 2:
        return []
    return [gate, node, *node.users]


def lower_rounding(calls: Sequence[fx.Node], values: Mapping[fx.Node, Value], schedule: Schedule) -> tuple[Value, ...]:
    """Add the launch of a gate and a call of `round_rows` to `schedule`, and return the elements and scales.

    Raises Refused if `rounding_group` cannot return such a region.
    """
    gate, rounding = calls[0], calls[1]
    if rounding_group(rounding, dict.fromkeys(calls)) != list(calls):
        raise Refused(f"a region of {len(calls)} calls that are no gate and rounding")
    bound, given = named_arguments(gate), named_arguments(rounding)
    activation = "silu" if is_call(gate, _SILU) else _GELU_KINDS[bound["approximate"]]
    stored = values[given["stored"]] if given["stored"] is not None else None
    types = rounding.meta["type"]
    assert isinstance(types, TupleType)
    results = tuple(one for one in types.items if isinstance(one, TensorType))
    x, up = values[bound["gate"]], values[bound["up"]]
    return _launch(x, stored, given["format"], results, schedule, up, activation)


def _launch(
    x: Value,
    stored: Value | None,
    name: str,
    results: Sequence[TensorType],
    schedule: Schedule,
    up: Value | None = None,
    activation: str = "",
) -> tuple[Value, ...]:
    format = find_format(name)
    for value in (x, up):
        if value is not None and (value.type.dtype not in FLOATS or value.strides[-1] != 1):
            raise Refused(f"kernels round dense rows of f32, bf16 and f16: {value.type}")
    rule = rounding_of(format)
    if rule.element == "f8e4m3" and schedule.sm not in FEATURES["fp8"]:
        raise Refused(f"format {format.name}: f8e4m3 needs {FEATURES['fp8'].needs}")
    elements, scales = (schedule.output(one) for one in results)
    depth = static_size(x.type.shape[1])
    given = GivenRows(x, x.type.shape[0], depth, stored=stored, up=up, activation=activation)
    round_into(given, rule, schedule, elements, scales)
    return elements, scales


LOWERINGS: Mapping[str, Lowering] = {"round_rows": _round_rows}
