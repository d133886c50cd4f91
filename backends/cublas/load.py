"""The run side of the cublas backend."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F

# Ops that torch computes with cuBLAS on a GPU. TF32 stays off, which is torch's default.
_OPS: Mapping[str, Callable[..., Any]] = {"ingot.linear": F.linear}


def find_op(target: str) -> Callable[..., Any] | None:
    """Return the function of an op by its printed name; None if cuBLAS does not have the op."""
    return _OPS.get(target)
