"""The cublas backend, run side."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F

# What torch computes by cuBLAS on a GPU; TF32 stays off, which is torch's default.
_OPS: Mapping[str, Callable[..., Any]] = {"ingot.linear": F.linear}


def find_op(target: str) -> Callable[..., Any] | None:
    """The function of an op by its printed name; None for one that cuBLAS has not."""
    return _OPS.get(target)
