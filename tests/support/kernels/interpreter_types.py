"""What Triton's interpreter asks of types, looked up in place of made anew: most of the time of a launch went there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from pytest import MonkeyPatch
from triton.language import core, semantic
from triton.runtime import interpreter

# By the name of its element and by its shape: what a block type holds, and what tensors of it hold (`of_tensors`).
_BLOCKS: dict[tuple[Any, ...], dict[str, Any]] = {}
_SHAPES: dict[tuple[int, ...], Any] = {}
_NUMPY: dict[str, np.dtype[Any]] = {}

_make_block, _make_tensor = core.block_type.__init__, core.tensor.__init__
_same_dtype, _broadcast = core.dtype.__eq__, semantic.TritonSemantic.broadcast_impl_value
_find_numpy = interpreter._get_np_dtype


def _sizes(type: Any) -> tuple[Any, Any]:
    made = core.tensor.__new__(core.tensor)
    _make_tensor(made, None, type)
    return made.shape, made.numel


_OF_SCALARS = _sizes(core.int32)


def _block(self: Any, element_ty: Any, shape: Any) -> None:
    key = (element_ty.name, *shape)
    held = _BLOCKS.get(key)
    if held is None:
        _make_block(self, element_ty, shape)  # raises if these are no sizes of a block
        shape = _SHAPES.setdefault((*self.shape,), self.shape)  # one object for all types of it
        held = _BLOCKS[key] = {**vars(self), "shape": shape, "of_tensors": _sizes(self)}
    self.__dict__ = {**held, "element_ty": element_ty}  # pointers of one name may differ


def _tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensors if type.is_block() else _OF_SCALARS


def _equal(self: Any, other: Any) -> bool:
    return self is other or _same_dtype(self, other)


def _broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
    shape = getattr(lhs.type, "shape", None)
    if shape is not None and shape is getattr(rhs.type, "shape", None):
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def _numpy(dtype: Any) -> np.dtype[Any]:
    scalar = dtype.scalar
    if scalar.name not in _NUMPY:
        _NUMPY[scalar.name] = _find_numpy(scalar)
    return _NUMPY[scalar.name]


@contextmanager
def types_looked_up() -> Iterator[None]:
    """For a launch, not for what is compiled. The interpreter also computes integers again in 64 bits, to see whether
    they overflow, and asserts that they do not: its assertions do nothing, so it need not compute them."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "with this option assertions hold"
    with MonkeyPatch.context() as patch:
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(core.block_type, "__init__", _block)
        patch.setattr(core.tensor, "__init__", _tensor)
        patch.setattr(core.dtype, "__eq__", _equal)
        patch.setattr(semantic.TritonSemantic, "broadcast_impl_value", _broadcasted)
        patch.setattr(interpreter, "_get_np_dtype", _numpy)
        yield
