"""Triton's interpreter with products that are added up as tensor cores do: a chain of instructions along the columns.

By itself it leaves a block to NumPy, whose library adds up by the size of the block.
"""

from typing import Any

import numpy as np
import pytest
from triton_schedules import DEVICE

# Columns that one instruction adds up, in bf16.
LINK = 16


def chain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends. On a GPU tensor cores are what runs."""
    if DEVICE == "cuda":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, left: Any, right: Any, total: Any, *_: Any) -> Any:
        result = total.data
        for first in range(0, left.data.shape[1], LINK):
            link = np.zeros(result.shape)
            for column in range(first, min(first + LINK, left.data.shape[1])):
                link += np.multiply.outer(left.data[:, column].astype(np.float64), right.data[column])
            result = (result + link).astype(np.float32)
        return TensorHandle(result, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
