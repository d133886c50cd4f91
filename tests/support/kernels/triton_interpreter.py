"""Triton's interpreter, made faster for kernels of many device functions, and right about numbers of eight bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from interpreter_types import types_looked_up
from triton.runtime import interpreter

# What torch calls these dtypes, and the integers that numpy holds them as where it has none like them.
_TORCH = {
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8),
    "bf16": (torch.bfloat16, torch.uint16),
    "fp16": (torch.float16, None),
    "fp32": (torch.float32, None),
}


@contextmanager
def language_patched_once() -> Iterator[None]:
    """The interpreter patches Triton's language for a launch, and again in each call of a device function, which finds
    nothing left to patch: more than half of the time. Here a launch does so once for each module that it comes to, and
    looks types up."""
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[int] = set()

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        with types_looked_up():
            launch(self, *args, **kwargs)

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return None
        patched.add(module)
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_anew, patch_once
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__, interpreter._patch_lang = launch, patch


@contextmanager
def eight_bits_converted() -> Iterator[None]:
    """The interpreter loses NaN and carries where it converts to eight bits, and rounds ties away from even. Here torch
    converts, which rounds as the instructions of GPUs do."""
    builder = interpreter.InterpreterBuilder
    to_float = builder.create_fp_to_fp

    def convert(self: Any, source: Any, wanted: Any, rounding_mode: Any) -> Any:
        names = source.dtype.scalar.name, wanted.scalar.name
        if "fp8e4nv" not in names:
            return to_float(self, source, wanted, rounding_mode)
        (own, held), (other, other_held) = (_TORCH[name] for name in names)
        given = torch.from_numpy(np.ascontiguousarray(source.data))
        given = given if held is None else given.view(own)
        if other is torch.float8_e4m3fn:  # out of range conversions differ: a kernel leaves nothing to them
            given = given.masked_fill(given.abs() > torch.finfo(other).max, float("nan"))
        made = given.to(other)
        return interpreter.TensorHandle((made if other_held is None else made.view(other_held)).numpy(), wanted.scalar)

    builder.create_fp_to_fp = convert
    try:
        yield
    finally:
        builder.create_fp_to_fp = to_float
