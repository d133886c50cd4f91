"""The cublas backend at run time: the torch functions that compute its ops."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F

# Ops that torch computes with cuBLAS on a GPU. TF32 stays off, which is torch's default.
_OPS: Mapping[str, Callable[..., Any]] = {"ingot.linear": F.linear}


def find_op(target: str) -> Callable[..., Any] | None:
    """Return the torch function for the op `target`, such as "ingot.linear"; None if cuBLAS does not compute the op."""
    return _OPS.get(target)
