"""The description of a matmul that is fused with the ops before and after it."""

from dataclasses import dataclass

from ingot.backends.triton.launches import Expr
from ingot.backends.triton.lower.linear_problem import LinearProblem
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.lower.weight import Weight
from ingot.backends.triton.schedule import Value
from ingot.ir.types import DTYPE_NAMES, TensorType


@dataclass(frozen=True)
class Norm:
    """An rms_norm that is applied to x before a matmul, with its weight and epsilon."""

    weight: Value
    eps: float


@dataclass(frozen=True)
class Gate:
    """A gate after a matmul: `activation(first) * second`, for two parts of the matmul's columns.

    `gate` and `up` are the first columns of the two parts. `activation` is "silu", "gelu" or "gelu_tanh".
    """

    activation: str
    gate: int
    up: int


@dataclass(frozen=True)
class Linear:
    """A matmul with fused ops: `linear(norm(x), weight, bias)`, then the gate or `activation`, then plus `residual`.

    A field of None leaves its op out. `result` is the type of the result. Only the norm and the result are rounded; the
    values between are float32.
    """

    x: Value
    weight: Weight
    bias: Value | None
    result: TensorType
    norm: Norm | None = None
    gate: Gate | None = None
    residual: Value | None = None
    activation: str | None = None

    @property
    def rows(self) -> Expr:
        """Return the number of rows of x, perhaps a symbol."""
        return self.x.type.shape[0]

    @property
    def columns(self) -> int:
        """Return the number of columns of the result (N)."""
        return static_size(self.result.shape[1])

    @property
    def depth(self) -> int:
        """Return how many elements of x each result sums over (K)."""
        return static_size(self.x.type.shape[1])

    def problem(self, tokens: int) -> LinearProblem:
        """Return the matmul's entry in the tuning log, for a kernel of `tokens` rows of x: 1, 16, 32 or 64."""
        return LinearProblem(
            columns=self.columns,
            depth=self.depth,
            tokens=tokens,
            dtype=DTYPE_NAMES[self.x.type.dtype],
            result=DTYPE_NAMES[self.result.dtype],
            gated=self.gate is not None,
            norm=self.norm is not None,
            residual=self.residual is not None,
            packing=self.weight.packing,
        )


def static_size(size: int | str) -> int:
    """Return a size of a matmul, checked to be a number. Raises Refused for a symbol."""
    if isinstance(size, str):
        raise Refused(f"a matmul over the size '{size}', where kernels need a number")
    return size
