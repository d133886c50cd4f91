"""The schema of launches.json, which describes an executable of the triton backend: buffers and kernel launches.

`emit.py` writes the file at compile time. `load.py` runs the launches as the file says.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

# The name of the file in the executable's folder.
LAUNCHES = "launches.json"
# Kernels read some inputs by loads of 16 bytes. Their addresses must be multiples of this.
ALIGNMENT = 16
# Threads of a warp on every NVIDIA GPU (CUDA C++ Programming Guide, "SIMT Architecture").
WARP = 32

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)


class Term(BaseModel):
    """An arithmetic expression on sizes of symbolic dims, such as "T": `op` applied to `left` and `right`.

    The op "cdiv" divides and rounds up.
    """

    model_config = _FROZEN
    op: Annotated[str, Field(pattern="^(add|sub|mul|cdiv|min|max)$")]
    left: "Expr"
    right: "Expr"


# A number, a dim by its name ("T", "B", "L", "P", "G", "pages", "S"), or arithmetic on these.
Expr = Annotated[int | str | Term, Field(union_mode="left_to_right")]


def evaluate(expr: Expr, sizes: Mapping[str, int]) -> int:
    """Return the value of an expression. `sizes` maps the names of dims, such as "T", to sizes."""
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
    """Return the expression `left / right`, rounded up; a number if both are numbers."""
    if isinstance(left, int) and isinstance(right, int):
        return -(-left // right)
    return Term(op="cdiv", left=left, right=right)


def times(left: Expr, right: Expr) -> Expr:
    """Return the expression `left * right`; a number if both are numbers."""
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    return Term(op="mul", left=left, right=right)


def least(left: Expr, right: Expr) -> Expr:
    """Return the expression of the smaller one of two; a number if both are numbers."""
    if isinstance(left, int) and isinstance(right, int):
        return min(left, right)
    return Term(op="min", left=left, right=right)


def greatest(left: Expr, right: Expr) -> Expr:
    """Return the expression of the greater one of two; a number if both are numbers."""
    if isinstance(left, int) and isinstance(right, int):
        return max(left, right)
    return Term(op="max", left=left, right=right)


def plus(left: Expr, right: Expr) -> Expr:
    """Return the expression `left + right`; a number if both are numbers."""
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    return Term(op="add", left=left, right=right)


def minus(left: Expr, right: Expr) -> Expr:
    """Return the expression `left - right`; a number if both are numbers."""
    if isinstance(left, int) and isinstance(right, int):
        return left - right
    return Term(op="sub", left=left, right=right)


class Buffer(BaseModel):
    """GPU memory that an executable allocates: a tensor of this `shape` and `dtype` (an IR name such as "bf16").

    `kind` is "output", "scratch" or "counter". Each call allocates outputs and scratch, with undefined contents. A
    "counter" is allocated and zeroed when the executable is loaded. Every call leaves it zeroed.
    """

    model_config = _FROZEN
    dtype: str
    shape: tuple[Expr, ...]
    kind: Annotated[str, Field(pattern="^(output|scratch|counter)$")]


class Pointer(BaseModel):
    """A pointer argument of a kernel: the address of the input with index `input`, or of the buffer named `buffer`."""

    model_config = _FROZEN
    input: int | None = None
    buffer: str | None = None


class Number(BaseModel):
    """An integer argument of a kernel: the value of an expression, passed as i32 or i64."""

    model_config = _FROZEN
    value: Expr
    dtype: Annotated[str, Field(pattern="^(i32|i64)$")] = "i32"


class Launch(BaseModel):
    """One kernel launch. It is skipped if an axis of its grid has the size 0.

    `kernel` is the name of the file with the machine code, and `entry` the function in it. `arguments` are the run-time
    arguments in order, without the two scratch pointers that Triton appends. A thread block has `warps` warps and
    `shared` bytes of dynamic shared memory. A `dependent` launch may begin before the previous one has ended
    (programmatic dependent launch). The kernel itself then waits for that end.
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
    """The content of launches.json: the buffers and kernel launches that compute one call of an executable.

    `inputs` are the types of the inputs as text, such as "bf16[T, 4096]". `aligned` are the indices of inputs whose
    addresses must be multiples of 16. `buffers` maps names to buffers. `outputs` are the names of the buffers that the
    call returns, in order.
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
