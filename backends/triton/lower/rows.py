"""View tensors as [rows, groups, columns], for elementwise and norm kernels, which treat all rows in the same way."""

from dataclasses import dataclass

import torch
import triton

from ingot.backends.triton.launches import WARP, Expr
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.types import TensorType

# The dtypes that kernels read and write; they compute in float32.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Elements per warp in elementwise kernels: 8 per thread, 16 bytes of bf16.
PER_WARP = 8 * WARP
# The most warps of a block, and the most elements of a row, which must fit into their registers.
_MOST_WARPS = 16
_WIDEST = 32768


@dataclass(frozen=True)
class Rows:
    """The sizes of a tensor viewed as [count, groups, width]: rows, groups per row, columns per group.

    A tensor of two axes has one group per row. A tensor of one axis is a single row.
    """

    count: Expr
    groups: int
    width: int


def as_rows(tensor: TensorType) -> Rows:
    """Return the sizes of a tensor viewed as [rows, groups, columns].

    Raises Refused for more than three axes, or if an axis other than the first has a symbolic size, such as "T".
    """
    inner = tensor.shape[1:] if len(tensor.shape) > 1 else tensor.shape
    known = tuple(size for size in inner if isinstance(size, int))
    if len(tensor.shape) not in (1, 2, 3) or len(known) != len(inner):
        raise Refused(f"kernels need one to three axes, with a symbol only as the first one: {tensor}")
    count = tensor.shape[0] if len(tensor.shape) > 1 else 1
    return Rows(count, known[0] if len(known) == 2 else 1, known[-1])


def strides_in(value: Value, target: TensorType) -> tuple[int, int, int]:
    """Return the strides (row, group, column) for reading a tensor broadcast to the shape of `target`.

    A stride is 0 along an axis that repeats. Raises Refused if the tensor does not broadcast.
    """
    missing = len(target.shape) - len(value.type.shape)
    sizes = (1,) * missing + value.type.shape
    if missing < 0 or any(size not in (1, wanted) for size, wanted in zip(sizes, target.shape, strict=True)):
        raise Refused(f"{value.type} does not broadcast to {target}")
    places = zip((0,) * missing + value.strides, sizes, target.shape, strict=True)
    steps = [step if size == wanted else 0 for step, size, wanted in places]
    row = steps.pop(0) if len(steps) > 1 else 0
    return row, steps[0] if len(steps) == 2 else 0, steps[-1]


def most_rows(rows: Expr, schedule: Schedule) -> int:
    """Return an upper bound of the rows of a matmul in a step.

    It is a fixed number, or the most tokens of the bucket class (range of step sizes). Raises Refused if the number of
    rows is a dim other than T, L and B.
    """
    if isinstance(rows, str) and rows not in ("T", "L", "B"):
        raise Refused(f"a matmul of '{rows}' rows; T, L and B are supported")
    return rows if isinstance(rows, int) else schedule.bucket.tokens[1]


def want_floats(call: Call, *names: str) -> None:
    """Raise Refused unless these tensors and all results are f32, bf16 or f16. Results must also be row-major."""
    for tensor in (*(call.value(name).type for name in names), *call.results):
        call.want(tensor.dtype in FLOATS, f"kernels compute on f32, bf16 and f16: {tensor}")
    for tensor in call.results:
        call.want(tensor.strides is None, f"a strided result: {tensor}")


def want_narrow_rows(call: Call, rows: Rows) -> None:
    """Raise Refused if a row of these sizes does not fit into the registers of a thread block."""
    call.want(rows.width <= _WIDEST, f"a row of {rows.width} elements is wider than {_WIDEST}")


def warps_of(elements: int) -> int:
    """Return the number of warps for a program that sums over rows. It holds whole rows, `elements` elements in all."""
    return min(_MOST_WARPS, max(1, elements // PER_WARP))


def block_of(width: int) -> tuple[int, int]:
    """Return (columns per program, warps per program) of an elementwise kernel on rows of `width` elements."""
    block = min(1024, max(WARP, triton.next_power_of_2(width)))
    return block, max(1, block // PER_WARP)
