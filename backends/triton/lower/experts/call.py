"""The description of a call of `experts`: its tensors, its sizes, and the forms in which its weights are stored."""

from dataclasses import dataclass
from typing import Any

import torch

from ingot.backends.triton.kernels.quant.constants import ExpertSizes
from ingot.backends.triton.launches import Expr, times
from ingot.backends.triton.lower.attention.heads import static
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.experts.problem import ExpertsProblem
from ingot.backends.triton.lower.linear.weight import PLAIN, Weight, plain_weight, stored_weight
from ingot.backends.triton.lower.quant.form import StoredForm, form_of, with_folded_scales
from ingot.backends.triton.lower.quant.matvec import takes_one_token
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.lower.rows import FLOATS
from ingot.backends.triton.operands import loader_of
from ingot.backends.triton.schedule import Value
from ingot.ir.formats import find_format
from ingot.ir.ops.expert_weights import WEIGHTS, part_parameter
from ingot.ir.types import DTYPE_NAMES, TensorType

_MOST_EXPERTS = 1024  # a thread of a block reads eight of the counts
# Parts of formats that each expert has of its own, which the rows of its tokens would have to be prepared with.
_OWN_ROWS = {"order": "columns in another order", "input_scale": "a stored scale of x"}


@dataclass(frozen=True)
class QuantizedExperts:
    """The quantized weights of all experts' first or second matmul.

    `weight` is the matrix of one expert, whose parts are the tensors of all experts. `form` says how kernels read it,
    and `sizes` how many elements an expert has of each tensor.
    """

    weight: Weight
    form: StoredForm
    sizes: ExpertSizes

    @property
    def alone(self) -> bool:
        """Return whether the kernels for choices one by one support the weights."""
        return takes_one_token(self.weight.depth, self.form)

    @property
    def arguments(self) -> dict[str, Value | None]:
        """Return the tensors as arguments of kernels. Kernels do not read those that the format lacks."""
        scales = self.weight.part("scales")
        found = {part: self.weight.part(part) for part in ("weight", "scales", "zeros", "outer")}
        return {part: scales if value is None else value for part, value in found.items()}


@dataclass(frozen=True)
class Experts:
    """A call of `experts`: its tensors, its sizes, and the constants that kernels take.

    `quantized` has the weights "gate_up" and "down" that are quantized, by name. `residual` [rows, hidden] is added to
    the result; None if nothing is added.
    """

    call: Call
    x: Value
    rows: Expr
    hidden: int
    ffn: int
    experts: int
    top_k: int
    weigh_input: bool
    quantized: dict[str, QuantizedExperts]
    residual: Value | None

    @property
    def choices(self) -> Expr:
        return times(self.rows, self.top_k)

    @property
    def dtype(self) -> torch.dtype:
        return self.x.type.dtype

    @property
    def packings(self) -> list[str]:
        """Return the formats in which the two weights are stored."""
        return [self.quantized[name].weight.packing if name in self.quantized else PLAIN for name in WEIGHTS]

    @property
    def alone(self) -> bool:
        """Return whether there are kernels for choices one by one."""
        return all(one.alone for one in self.quantized.values())

    @property
    def residual_stride(self) -> int:
        """Return how many elements the rows of the residual are apart, or 0 without one."""
        return 0 if self.residual is None else self.residual.strides[0]

    def problem(self, gated: bool, block: int) -> ExpertsProblem:
        columns, depth = (self.ffn, self.hidden) if gated else (self.hidden, self.ffn)
        name, packing = DTYPE_NAMES[self.dtype], PLAIN
        if (quantized := self.quantized.get("gate_up" if gated else "down")) is not None:
            packing = quantized.weight.packing
        return ExpertsProblem(self.experts, self.top_k, columns, depth, gated, block, name, packing)

    def weight(self, name: str) -> tuple[Value | tuple[Value, ...], dict[str, Any]]:
        """Return a weight of all experts [E, rows, depth] as the kernels' argument, and the constants of its loader.

        To the loader it is one matrix: the rows of expert e follow those of expert e - 1.
        """
        value = self.call.value(name)
        experts, rows, depth = value.type.shape
        assert isinstance(experts, int) and isinstance(rows, int) and isinstance(depth, int)
        self.call.want(value.strides == (rows * depth, depth, 1), f"{name} is not contiguous: {value.type}")
        matrix = plain_weight(Value(TensorType(value.type.dtype, (experts * rows, depth)), value.input, value.buffer))
        loader = loader_of(matrix)
        stored = loader.stored(matrix, self.dtype)
        constants = {"BEGIN": loader.begin, "WITHIN": loader.within, "LOAD": loader.load, "STORED": stored}
        return matrix.argument, constants

    def activation(self) -> dict[str, Any]:
        """Return the constants of the function that joins gate and up."""
        asked = self.call.attributes
        return {
            "ACTIVATION": asked["activation"],
            "LIMIT": float(asked["limit"]),
            "ALPHA": float(asked["alpha"]),
        }


def read_experts(call: Call, sm: int, residual: Value | None) -> Experts:
    """Return the call's tensors and sizes, for kernels of compute capability `sm` that add `residual` to the result.

    Raises Refused if the kernels do not support its dtypes, strides or formats.
    """
    x, weights, chosen = (call.value(name) for name in ("x", "weights", "chosen"))
    dtype = x.type.dtype
    call.want(dtype in FLOATS, f"kernels compute on f32, bf16 and f16: {x.type}")
    call.want(len(x.type.shape) == 2, f"x is {x.type}, not [T, D]")
    call.want_dense_rows("x")
    call.want(weights.type.dtype is torch.float32, f"the weights of choices are not f32: {weights.type}")
    top_k = static(chosen, 1)
    for name in ("weights", "chosen"):
        call.want(call.value(name).strides == (top_k, 1), f"{name} is not contiguous: {call.value(name).type}")
    for name in ("gate_up_bias", "down_bias"):
        bias = call.optional(name)
        call.want(bias is None or bias.strides == (static(bias, 1), 1), f"{name} is not contiguous")
    experts = static(call.value("gate_up"), 0)
    call.want(experts <= _MOST_EXPERTS, f"{experts} experts, more than {_MOST_EXPERTS}")
    quantized = {name: one for name in WEIGHTS if (one := _quantized(call, name, dtype, sm)) is not None}
    call.want(not call.attributes["identities"], "no kernel for experts that return their input")
    weigh_input = call.attributes["weigh_input"]
    call.want(not (quantized and weigh_input), "no kernel for quantized experts whose inputs are weighed")
    return Experts(
        call,
        x,
        rows=x.type.shape[0],
        hidden=static(x, 1),
        ffn=quantized["down"].weight.depth if "down" in quantized else static(call.value("down"), 2),
        experts=experts,
        top_k=top_k,
        weigh_input=weigh_input,
        quantized=quantized,
        residual=residual,
    )


def _quantized(call: Call, name: str, dtype: torch.dtype, sm: int) -> QuantizedExperts | None:
    """Return a quantized weight of experts; None if it is plain. Raises Refused if no kernel supports its format."""
    format = find_format(call.attributes[f"{name}_format"])
    if format.name == PLAIN:
        return None
    if format.lossless:
        raise Refused(f"format {format.name}: no kernel for experts in the packing '{format.packing}'")
    for part, what in _OWN_ROWS.items():
        call.want(part not in format.parts, f"format {format.name}: no kernel for experts with {what}")
    parts, sizes = {}, {}
    for part in format.parts:
        value = call.value(part_parameter(name, part))
        own = Value(TensorType(value.type.dtype, value.type.shape[1:]), value.input, value.buffer)
        dense = Value(TensorType(value.type.dtype, value.type.shape))
        call.want(value.strides == dense.strides, f"{part_parameter(name, part)} is not contiguous: {value.type}")
        parts[part], sizes[part] = own, dense.strides[0]
    weight = stored_weight(format, parts)
    counted = ExpertSizes(sizes["weight"], sizes["scales"], sizes.get("outer", 0))
    form = with_folded_scales(form_of(weight, dtype, sm), format, weight.depth, dtype)
    return QuantizedExperts(weight, form, counted)
