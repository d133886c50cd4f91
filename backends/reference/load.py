"""The reference and rowwise backends at run time: find the function that computes an op, by the op's printed name."""

from collections.abc import Callable
from typing import Any

from ingot.ir.errors import BackendError
from ingot.ir.ops import OPS, Op
from ingot.ir.ops.aten import ATEN


def load_op(target: str) -> Callable[..., Any]:
    """Return the reference implementation of an op, by the op's printed name ("ingot.linear", "aten.add.Tensor").

    The function updates states, such as a KV cache, in place. Raises BackendError for an unknown op.
    """
    return _find(target, lambda op: op.reference)


def load_rowwise(target: str) -> Callable[..., Any]:
    """Return the function that computes an op one row at a time, by the op's printed name, such as "ingot.linear".

    The function updates states, such as a KV cache, in place. Raises BackendError for an unknown op.
    """
    return _find(target, lambda op: op.rowwise)


def _find(target: str, form: Callable[[Op], Callable[..., Any]]) -> Callable[..., Any]:
    if target in ATEN:
        return ATEN[target].run
    op = OPS.get(target.removeprefix("ingot."))
    if op is None:
        raise BackendError(f"unknown op '{target}'", expected=", ".join(OPS))
    if op.states:
        assert op.in_place is not None
        return op.in_place
    return form(op)
