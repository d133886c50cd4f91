"""What an executable of the triton backend is: buffers, and launches of compiled kernels over them.

These types are the schema of launches.json. The compile side writes it, the run side follows it and decides nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

# The file that holds them, in the executable's folder.
LAUNCHES = "launches.json"
# Inputs that a kernel loads 16 bytes at once from lie at multiples of this.
ALIGNMENT = 16
# Threads of a warp, on every NVIDIA GPU (CUDA C++ Programming Guide, "SIMT Architecture").
WARP = 32

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)


class Term(BaseModel):
    """Arithmetic on sizes: `op` of `left` and `right`; "cdiv" divides and rounds up."""

    model_config = _FROZEN
    op: Annotated[str, Field(pattern="^(add|sub|mul|cdiv|min|max)$")]
    left: "Expr"
    right: "Expr"


# A number, a dim by its name ("T", "B", "L", "P", "G", "pages", "S"), or arithmetic on these.
Expr = Annotated[int | str | Term, Field(union_mode="left_to_right")]


def evaluate(expr: Expr, sizes: Mapping[str, int]) -> int:
    """The value of an expression for these sizes."""
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
    """`left / right`, rounded up."""
    if isinstance(left, int) and isinstance(right, int):
        return -(-left // right)
    return Term(op="cdiv", left=left, right=right)


def times(left: Expr, right: Expr) -> Expr:
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    return Term(op="mul", left=left, right=right)


class Buffer(BaseModel):
    """Memory that an executable brings: `shape` of `dtype` (an IR name).

    An "output" is made anew in each call, as is "scratch", whose contents mean nothing before and after. A "counter" is
    made when the executable is loaded, holds zeros then, and every call leaves zeros in it.
    """

    model_config = _FROZEN
    dtype: str
    shape: tuple[Expr, ...]
    kind: Annotated[str, Field(pattern="^(output|scratch|counter)$")]


class Pointer(BaseModel):
    """The address of a value: an input of the call by its place, or a buffer by its name."""

    model_config = _FROZEN
    input: int | None = None
    buffer: str | None = None


class Number(BaseModel):
    """A scalar argument: an expression as an integer of `dtype` i32 or i64."""

    model_config = _FROZEN
    value: Expr
    dtype: Annotated[str, Field(pattern="^(i32|i64)$")] = "i32"


class Launch(BaseModel):
    """One kernel launch; none in steps in which its grid is empty.

    `kernel` names a file of machine code and `entry` the function in it. `arguments` are those that are no compile-time
    constants, in order; the two scratch pointers that Triton appends are added by whoever launches. `warps` of WARP
    threads make a block, `shared` are bytes of dynamic shared memory. `dependent`: the launch may begin before the one
    in front of it has ended, because the kernel waits for that by itself (programmatic dependent launch).
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
    """launches.json: what a call does.

    `inputs` are types as text, which tell the sizes of the dims; a dim that no input has is none. `aligned` are the
    places of inputs whose addresses must be multiples of 16. `outputs` names the buffers that the call gives, in order.
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
