"""Tensors as rows of groups of columns: what kernels that treat every row alike see of a shape."""

from dataclasses import dataclass

import torch
import triton

from ingot.backends.triton.launches import WARP, Expr
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.schedule import Value
from ingot.ir.types import TensorType

# What kernels read and write; they compute in float32.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Elements of a warp in kernels that stream rows: 8 a thread, 16 bytes of bf16.
PER_WARP = 8 * WARP
# The most warps of a block, and elements of a row that must fit into their registers.
_MOST_WARPS = 16
_WIDEST = 32768


@dataclass(frozen=True)
class Rows:
    """[count, groups, width]: a tensor of two axes has one group, one of a single axis of known size is one row."""

    count: Expr
    groups: int
    width: int


def as_rows(tensor: TensorType) -> Rows:
    """The rows of a tensor. Refused for more than three axes, and where a symbol stands behind the first one."""
    inner = tensor.shape[1:] if len(tensor.shape) > 1 else tensor.shape
    known = tuple(size for size in inner if isinstance(size, int))
    if len(tensor.shape) not in (1, 2, 3) or len(known) != len(inner):
        raise Refused(f"no tensor of one to three axes, with a symbol in front alone: {tensor}")
    count = tensor.shape[0] if len(tensor.shape) > 1 else 1
    return Rows(count, known[0] if len(known) == 2 else 1, known[-1])


def strides_in(value: Value, target: TensorType) -> tuple[int, int, int]:
    """The strides by row, group and column with which a value broadcasts to `target`: 0 where it is repeated."""
    missing = len(target.shape) - len(value.type.shape)
    sizes = (1,) * missing + value.type.shape
    if missing < 0 or any(size not in (1, wanted) for size, wanted in zip(sizes, target.shape, strict=True)):
        raise Refused(f"{value.type} does not broadcast to {target}")
    places = zip((0,) * missing + value.strides, sizes, target.shape, strict=True)
    steps = [step if size == wanted else 0 for step, size, wanted in places]
    row = steps.pop(0) if len(steps) > 1 else 0
    return row, steps[0] if len(steps) == 2 else 0, steps[-1]


def want_floats(call: Call, *names: str) -> None:
    """Refuse the call unless the arguments of these names and all results are of FLOATS, and the results row-major."""
    for tensor in (*(call.value(name).type for name in names), *call.results):
        call.want(tensor.dtype in FLOATS, f"kernels compute on f32, bf16 and f16: {tensor}")
    for tensor in call.results:
        call.want(tensor.strides is None, f"a result that is strided: {tensor}")


def want_narrow_rows(call: Call, rows: Rows) -> None:
    """Refuse the call where a row does not fit into the registers of a block."""
    call.want(rows.width <= _WIDEST, f"a row of {rows.width} elements is wider than {_WIDEST}")


def warps_of(elements: int) -> int:
    """The warps of a program that takes so many elements at once, for a kernel that sums up rows."""
    return min(_MOST_WARPS, max(1, elements // PER_WARP))


def block_of(width: int) -> tuple[int, int]:
    """Columns of a program, and its warps, for a kernel that streams rows."""
    block = min(1024, max(WARP, triton.next_power_of_2(width)))
    return block, max(1, block // PER_WARP)
