"""A product with what stands in front of it and behind it, as regions have it."""

from dataclasses import dataclass

from ingot.backends.triton.launches import Expr
from ingot.backends.triton.lower.linear_problem import LinearProblem
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.lower.weight import Weight
from ingot.backends.triton.schedule import Value
from ingot.ir.types import DTYPE_NAMES, TensorType


@dataclass(frozen=True)
class Norm:
    """An rms_norm of x in front of the product."""

    weight: Value
    eps: float


@dataclass(frozen=True)
class Gate:
    """`activation(first) * second` behind the product, of two parts of its columns that begin at `gate` and `up`.

    `activation` is "silu", "gelu" or "gelu_tanh".
    """

    activation: str
    gate: int
    up: int


@dataclass(frozen=True)
class Linear:
    """`linear(norm(x), weight, bias)`, gated or by an `activation` alone, plus `residual`, as `result`; what is None is
    left out.

    Only `result` is rounded, and the norm: what lies between stays in float32.
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
        """Of the result."""
        return static_size(self.result.shape[1])

    @property
    def depth(self) -> int:
        """How many products a result sums up."""
        return static_size(self.x.type.shape[1])

    def problem(self, tokens: int) -> LinearProblem:
        """For so many rows of x, padded."""
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
    """A size that is no dim. Raises Refused."""
    if isinstance(size, str):
        raise Refused(f"a product over '{size}' elements, which no kernel is made for")
    return size
