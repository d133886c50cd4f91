"""A matmul fused with the ops before and after it, as in a region."""

from dataclasses import dataclass

from ingot.backends.triton.launches import Expr
from ingot.backends.triton.lower.linear_problem import LinearProblem
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.lower.weight import Weight
from ingot.backends.triton.schedule import Value
from ingot.ir.types import DTYPE_NAMES, TensorType


@dataclass(frozen=True)
class Norm:
    """An rms_norm of x before the matmul."""

    weight: Value
    eps: float


@dataclass(frozen=True)
class Gate:
    """`activation(first) * second` after the matmul. The two parts of its columns begin at `gate` and `up`.

    `activation` is "silu", "gelu" or "gelu_tanh".
    """

    activation: str
    gate: int
    up: int


@dataclass(frozen=True)
class Linear:
    """`linear(norm(x), weight, bias)`, then the gate or the `activation`, plus `residual`; None leaves an op out.

    `result` is the type of the result. Only the norm and the result are rounded; the values between are float32.
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
        return self.x.type.shape[0]

    @property
    def columns(self) -> int:
        """Return the columns of the result."""
        return static_size(self.result.shape[1])

    @property
    def depth(self) -> int:
        """Return the elements that each result sums over (K)."""
        return static_size(self.x.type.shape[1])

    def problem(self, tokens: int) -> LinearProblem:
        """Return the tuning problem for `tokens` rows of x, a padded number."""
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
    """Return a size that must be a number. Raises Refused for a symbol."""
    if isinstance(size, str):
        raise Refused(f"a matmul over the size '{size}', where kernels need a number")
    return size
