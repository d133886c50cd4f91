"""Where scales of input channels go: into the norm, or the linear, that computes the input."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from ingot.ir import ops
from ingot.ir.program import Program, is_call, named_arguments
from ingot.quantizing.stream import input_of, weight_of

_NORMS = (ops.rms_norm.overload, ops.layer_norm.overload)
_GATES = (ops.silu_mul.overload, ops.gelu_mul.overload)


@dataclass(frozen=True)
class Fold:
    """The params that are divided by the scales of a value's channels, so that the value is divided by them.

    - `vectors`: names of params [K]: the gain of a norm, and biases
    - `linear`: the linear whose rows are divided; None if a norm computes the value
    """

    vectors: tuple[str, ...]
    linear: fx.Node | None = None


def find_fold(program: Program, x: fx.Node, quantized: Collection[fx.Node]) -> Fold | None:
    """Return where the scales of the value `x` can go; None if they cannot go anywhere.

    All calls that read `x` must be linears of `quantized`. `x` must be the result of a norm, or of the gate of a
    feed-forward part whose linear `up` is in `quantized`. The params must have no other use.
    """
    if any(user not in quantized or input_of(user) is not x for user in x.users):
        return None
    if x.target in _NORMS:
        bound = named_arguments(x)
        return _fold([bound["weight"], bound.get("bias")], None)
    if x.target in _GATES:
        up = named_arguments(x)["up"]
        if up in quantized and len(up.users) == 1 and len(weight_of(up).users) == 1:
            return _fold([named_arguments(up)["bias"]], up)
    return None


def _fold(vectors: list[fx.Node | None], linear: fx.Node | None) -> Fold | None:
    given = [node for node in vectors if node is not None]
    for node in given:
        if node.op != "placeholder" or node.meta.get("kind") != "param" or len(node.users) != 1:
            return None
        if len(node.meta["type"].shape) != 1:
            return None
    return Fold(tuple(str(node.target) for node in given), linear)


def is_quantizable(node: fx.Node) -> bool:
    """Return whether a call is a linear whose weight is a param."""
    return is_call(node, ops.linear.overload) and weight_of(node).meta.get("kind") == "param"
