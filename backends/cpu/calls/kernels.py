"""Access to the C++ functions of a built kernel library, by name and dtype."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from ingot.backends.cpu.interface import built_digest, interface_digest
from ingot.ir.errors import ArtifactError

SUFFIXES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
# The dtypes of caches of eight bits (`ingot.ir.cache.dtype`).
NARROW = {torch.float8_e4m3fn: "f8", torch.int8: "i8"}
NO_SCALE = -1  # as in kernels/cached.h
POINTER, INT, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double

Function = Callable[..., None]


class Kernels:
    """The C++ functions of a kernel library. `path` is the shared object.

    Each method takes the name of a function and the ctypes types of its arguments. The constructor raises OSError if
    the library does not load, and ArtifactError if its functions have other arguments than their callers here. The
    methods raise AttributeError if the library lacks the function.
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        expected, found = interface_digest(), built_digest(self._library)
        if found != expected:
            raise ArtifactError(
                "the library of C++ kernels was built by another version of Ingot, with "
                + (f"the interface {found[:12]}" if found else "an interface that it does not name"),
                where=path,
                expected=f"the interface {expected[:12]}",
                hint="compile the model again with this version",
            )

    def one(self, name: str, *types: Any) -> Function:
        """Return the C++ function `name` as a ctypes function. `types` are the ctypes types of its arguments."""
        function: Any = getattr(self._library, name)
        function.argtypes, function.restype = types, None
        return function  # type: ignore[no-any-return]  # ctypes makes it callable

    def by_dtype(self, name: str, *types: Any) -> dict[torch.dtype, Function]:
        """Return the versions of the C++ function `name` by tensor dtype: float32, float16 and bfloat16."""
        return {dtype: self.one(f"{name}_{suffix}", *types) for dtype, suffix in SUFFIXES.items()}

    def by_cache(self, name: str, *types: Any) -> dict[tuple[torch.dtype, torch.dtype], Function]:
        """Return the versions of the C++ function `name`. Keys are (dtype of q, k and v, dtype of the KV cache).

        The cache has the same dtype as q, k and v, or float8_e4m3fn or int8.
        """
        narrow = self.by_narrow_cache(name, *types)
        return narrow | {(dtype, dtype): one for dtype, one in self.by_dtype(name, *types).items()}

    def by_narrow_cache(self, name: str, *types: Any) -> dict[tuple[torch.dtype, torch.dtype], Function]:
        """Return the versions of the C++ function `name` for caches of eight bits.

        Keys are (dtype of q, k and v, dtype of the KV cache).
        """
        return {
            (dtype, narrow): self.one(f"{name}_{suffix}_{ending}", *types)
            for dtype, suffix in SUFFIXES.items()
            for narrow, ending in NARROW.items()
        }

    def by_weight(self, name: str, *types: Any) -> dict[tuple[torch.dtype, torch.dtype], Function]:
        """Return the versions of the C++ function `name`. Keys are (dtype of the activations, dtype of the weight).

        The weight has the same dtype as the activations, or float32.
        """
        return {
            (dtype, weight): self.one(f"{name}_{suffix}_{SUFFIXES[weight]}", *types)
            for dtype, suffix in SUFFIXES.items()
            for weight in {dtype, torch.float32}
        }
