"""The memory layout of weights. A program reads a column-major weight through a transpose."""

import enum
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ingot.ir.ops import op_of
from ingot.ir.program import is_call, named_arguments


class Layout(enum.Enum):
    """The order of a weight matrix [N, K] in memory: row-major, as ops take it, or column-major ([K, N] by rows)."""

    ROW_MAJOR = "row-major"
    COLUMN_MAJOR = "column-major"


TRANSPOSE = torch.ops.aten.permute.default
TRANSPOSED = (1, 0)


def layouts_of(node: fx.Node) -> Mapping[str, Layout]:
    """Return the memory layout of each weight that a call reads, by the name of the op's parameter."""
    op = op_of(node.target)
    if op is None:
        return {}
    found = {name: layout_of(value) for name, value in named_arguments(node).items()}
    return {name: layout for name, layout in found.items() if layout is not None}


def layout_of(value: Any) -> Layout | None:
    """Return the memory layout of an argument of a call that is a weight; None if `value` is no weight.

    A weight that is read through a transpose is column-major, otherwise row-major.
    """
    if not isinstance(value, fx.Node):
        return None
    if value.op == "placeholder":
        return Layout.ROW_MAJOR if value.meta["kind"] == "param" else None
    if is_call(value, TRANSPOSE) and tuple(value.args[1]) == TRANSPOSED:  # type: ignore[arg-type]
        return Layout.COLUMN_MAJOR if layout_of(value.args[0]) is Layout.ROW_MAJOR else None
    return None
