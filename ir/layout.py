"""The memory layout of weights. A program reads a column-major weight through a transpose."""

import enum
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ingot.ir.ops import op_of
from ingot.ir.program import is_call, named_arguments


class Layout(enum.Enum):
    """The order of a weight matrix [N, K] in memory.

    Row-major is what ops take. Column-major is the transpose [K, N] stored row by row.
    """

    ROW_MAJOR = "row-major"
    COLUMN_MAJOR = "column-major"


TRANSPOSE = torch.ops.aten.permute.default
TRANSPOSED = (1, 0)


def layouts_of(node: fx.Node) -> Mapping[str, Layout]:
    """Return the memory layout of each weight that a call reads, by parameter name of the op."""
    op = op_of(node.target)
    if op is None:
        return {}
    found = {name: layout_of(value) for name, value in named_arguments(node).items()}
    return {name: layout for name, layout in found.items() if layout is not None}


def layout_of(value: Any) -> Layout | None:
    """Return the memory layout of a call's argument if it is a weight, else None.

    A weight is column-major if the call reads it through a transpose, else row-major.
    """
    if not isinstance(value, fx.Node):
        return None
    if value.op == "placeholder":
        return Layout.ROW_MAJOR if value.meta["kind"] == "param" else None
    if is_call(value, TRANSPOSE) and tuple(value.args[1]) == TRANSPOSED:  # type: ignore[arg-type]
        return Layout.COLUMN_MAJOR if layout_of(value.args[0]) is Layout.ROW_MAJOR else None
    return None
