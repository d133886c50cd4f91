"""The cublas backend at run time: the torch functions that compute its ops."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F

# Ops that torch computes with cuBLAS on a GPU. TF32 stays off, which is torch's default.
_OPS: Mapping[str, Callable[..., Any]] = {"ingot.linear": F.linear}


def find_op(target: str) -> Callable[..., Any] | None:
    """Return the torch function that computes an op with cuBLAS, or None if cuBLAS does not compute the op.

    `target` is the op's printed name, such as "ingot.linear".
    """
    return _OPS.get(target)
