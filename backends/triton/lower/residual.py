"""The residual add after a matmul or experts, which their last launch can compute."""

import torch
from torch import fx

from ingot.ir.program import is_call, tensor_type

_ADD = torch.ops.aten.add.Tensor


def residual_of(add: fx.Node, product: fx.Node) -> fx.Node | None:
    """Return what the call `add` adds to the result of the call `product`.

    Return None if `add` is another op, scales a term, or if the terms differ in dtype or shape. Return None, too, if
    the elements of a row are not adjacent.
    """
    if not is_call(add, _ADD) or len(add.args) != 2 or add.kwargs:
        return None
    left, right = add.args
    other = right if left is product else left
    if not isinstance(other, fx.Node) or other is product:
        return None
    wanted, given = tensor_type(product), tensor_type(other)
    if given.strides is not None and given.strides[-1] != 1:
        return None
    return other if (given.dtype, given.shape) == (wanted.dtype, wanted.shape) else None
