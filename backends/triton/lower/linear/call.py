"""The description of a matmul that is fused with the ops before and after it."""

from dataclasses import dataclass

from ingot.backends.triton.launches import Expr
from ingot.backends.triton.lower.linear.problem import LinearProblem
from ingot.backends.triton.lower.linear.weight import Weight
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.schedule import Value
from ingot.ir.types import DTYPE_NAMES, TensorType


@dataclass(frozen=True)
class Norm:
    """An rms_norm of x that is fused before a matmul. It has a weight and an epsilon."""

    weight: Value
    eps: float


@dataclass(frozen=True)
class Gate:
    """A gate that is fused after a matmul: `activation(first) * second`. Both are parts of the matmul's columns.

    `gate` is the first column of the part in the activation, and `up` the first column of the other part. `activation`
    is "silu", "gelu" or "gelu_tanh".
    """

    activation: str
    gate: int
    up: int


@dataclass(frozen=True)
class Linear:
    """A matmul with fused ops: `linear(norm(x), weight, bias)`, then the gate or `activation`, then plus `residual`.

    A field of None means that the matmul has no such op. `result` is the type of the result. The norm's result and the
    final result are rounded. All values between them are float32.
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
        """Return the number of rows of x: a number, or an expression of dims such as "T"."""
        return self.x.type.shape[0]

    @property
    def columns(self) -> int:
        """Return the number of columns of the result (N)."""
        return static_size(self.result.shape[1])

    @property
    def depth(self) -> int:
        """Return the number of columns of x (K). Each element of the result is a sum of K terms."""
        return static_size(self.x.type.shape[1])

    def problem(self, tokens: int) -> LinearProblem:
        """Return the properties of this matmul that its tile sizes depend on: its key in the tuning log.

        `tokens` is the number of rows of x that the kernel is compiled for: 1, 16, 32 or 64.
        """
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
    """Return a size of a matmul if it is a number. Raises Refused if it is the name of a dim."""
    if isinstance(size, str):
        raise Refused(f"a matmul over the size '{size}', where kernels need a number")
    return size
