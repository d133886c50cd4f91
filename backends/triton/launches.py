"""The schema of launches.json, which describes an executable of the triton backend: buffers and kernel launches.

The compile side writes the file. The run side follows it and makes no decisions.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

# The name of the file in the executable's folder.
LAUNCHES = "launches.json"
# Inputs that a kernel reads by loads of 16 bytes have addresses that are multiples of this.
ALIGNMENT = 16
# Threads of a warp on every NVIDIA GPU (CUDA C++ Programming Guide, "SIMT Architecture").
WARP = 32

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)


class Term(BaseModel):
    """Arithmetic on sizes: `op` applied to `left` and `right`; "cdiv" divides and rounds up."""

    model_config = _FROZEN
    op: Annotated[str, Field(pattern="^(add|sub|mul|cdiv|min|max)$")]
    left: "Expr"
    right: "Expr"


# A number, a dim by its name ("T", "B", "L", "P", "G", "pages", "S"), or arithmetic on these.
Expr = Annotated[int | str | Term, Field(union_mode="left_to_right")]


def evaluate(expr: Expr, sizes: Mapping[str, int]) -> int:
    """Return the value of an expression for these sizes of the dims."""
    if isinstance(expr, int):
        return expr
    if isinstance(expr, str):
        return sizes[expr]
    left, right = evaluate(expr.left, sizes), evaluate(expr.right, sizes)
    match expr.op:
        case "add":
            return left + right
        case "sub":
            return left - right
        case "mul":
            return left * right
        case "cdiv":
            return -(-left // right)
        case "min":
            return min(left, right)
    return max(left, right)


def cdiv(left: Expr, right: Expr) -> Expr:
    """Return `left / right`, rounded up."""
    if isinstance(left, int) and isinstance(right, int):
        return -(-left // right)
    return Term(op="cdiv", left=left, right=right)


def times(left: Expr, right: Expr) -> Expr:
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    return Term(op="mul", left=left, right=right)


class Buffer(BaseModel):
    """Memory that an executable allocates: `shape` of `dtype` (an IR name).

    Each call allocates its "output" and "scratch" buffers; scratch has undefined contents before and after. A "counter"
    is allocated and zeroed when the executable is loaded, and every call leaves it zeroed.
    """

    model_config = _FROZEN
    dtype: str
    shape: tuple[Expr, ...]
    kind: Annotated[str, Field(pattern="^(output|scratch|counter)$")]


class Pointer(BaseModel):
    """The address of a value: an input of the call by index, or a buffer by name."""

    model_config = _FROZEN
    input: int | None = None
    buffer: str | None = None


class Number(BaseModel):
    """A scalar argument: an expression, passed as an integer of `dtype` i32 or i64."""

    model_config = _FROZEN
    value: Expr
    dtype: Annotated[str, Field(pattern="^(i32|i64)$")] = "i32"


class Launch(BaseModel):
    """One kernel launch. It is skipped in steps in which its grid is empty.

    `kernel` names a file of machine code and `entry` the function in it. `arguments` are the run-time arguments, in
    order; the run side adds the two scratch pointers that Triton appends. A block has `warps` warps of WARP threads and
    `shared` bytes of dynamic shared memory. A `dependent` launch may begin before the previous one has ended, because
    the kernel itself waits for that end (programmatic dependent launch).
    """

    model_config = _FROZEN
    kernel: str
    entry: str
    grid: tuple[Expr, Expr, Expr]
    arguments: tuple[Pointer | Number, ...]
    warps: int
    shared: int
    dependent: bool


class Launches(BaseModel):
    """The content of launches.json: the buffers and launches of a call.

    `inputs` are the types of the inputs as text; the sizes of the dims follow from them. `aligned` are the indices of
    inputs whose addresses must be multiples of 16. `outputs` names the buffers that the call returns, in order.
    """

    model_config = _FROZEN
    inputs: tuple[str, ...]
    aligned: tuple[int, ...]
    buffers: dict[str, Buffer]
    outputs: tuple[str, ...]
    launches: tuple[Launch, ...]

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


Term.model_rebuild()
