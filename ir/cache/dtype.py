"""The dtype of a KV cache: the dtype of the keys, or eight bits with scales for keys and values.

A cache of eight bits stores k / k_scale and v / v_scale. It divides in float32, saturates and rounds to nearest, ties
to even:

- f8e4m3 (OCP 8-bit floating point, arXiv 2209.05433) saturates at 448. NaN stays NaN.
- i8 saturates at 127 on both sides and never stores -128. NaN, which it does not have, is stored as 0.

Attention multiplies back: `k_scale` joins the softmax scale, and `v_scale` multiplies the result before it is rounded.

Scales are attributes of the ops, because they are known at compile time, and kernels fold the scale of keys into a
constant. So layers with different scales share no executables.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ingot.ir.errors import VerifyError
from ingot.ir.types import DTYPE_NAMES, DTYPES

if TYPE_CHECKING:
    import torch

# The values of the option kv_cache_dtype; None: the dtype of the keys.
CACHE_DTYPES: Mapping[str, "torch.dtype | None"] = {"auto": None, "fp8": DTYPES["f8e4m3"], "int8": DTYPES["i8"]}
# The largest number that a cache of eight bits stores, by the IR name of its dtype.
HIGHEST: Mapping[str, float] = {"f8e4m3": 448.0, "i8": 127.0}


class Typed(Protocol):
    """Anything with a dtype: a tensor, or the type of a tensor in a program."""

    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True)
class CacheScales:
    """The scales of an eight-bit KV cache. Keys are divided by `k` and values by `v` when they are written.

    Raises VerifyError unless both are positive numbers.
    """

    k: float = 1.0
    v: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("k_scale", self.k), ("v_scale", self.v)):
            if not (math.isfinite(value) and value > 0):
                raise VerifyError(f"{name} {value}", expected="a positive number")

    @staticmethod
    def of(call: Mapping[str, Any]) -> "CacheScales":
        """Return the scales of an op call, from its arguments `k_scale` and `v_scale`.

        `call` holds all arguments by name.
        """
        return CacheScales(call["k_scale"], call["v_scale"])

    def options(self) -> dict[str, float]:
        """Return the scales as op arguments `k_scale` and `v_scale`.

        Scales of 1.0 are left out, because 1.0 is the default.
        """
        return {name: value for name, value in (("k_scale", self.k), ("v_scale", self.v)) if value != 1.0}


def is_narrow(dtype: "torch.dtype") -> bool:
    """Return whether `dtype` is one of the eight-bit dtypes that a KV cache can have: f8e4m3 or i8."""
    return DTYPE_NAMES.get(dtype) in HIGHEST


def check_cache_dtype(kv: Typed, keys: Typed, k_scale: float, v_scale: float) -> None:
    """Raise VerifyError if the cache `kv` cannot store keys and values of the dtype of `keys`.

    It can if both dtypes are equal, or if the cache is f8e4m3 or i8. Scales other than 1.0 need one of these two.
    Queries may be passed as `keys`, because their dtype is equal.
    """
    if kv.dtype != keys.dtype and not is_narrow(kv.dtype):
        found = " for ".join(DTYPE_NAMES.get(one.dtype, str(one.dtype)) for one in (kv, keys))
        raise VerifyError(f"a cache of {found}", expected="the dtype of keys and queries, f8e4m3 or i8")
    if (options := CacheScales(k_scale, v_scale).options()) and not is_narrow(kv.dtype):
        raise VerifyError(f"{options} for a cache of {DTYPE_NAMES[kv.dtype]}", expected="scales only with f8e4m3 or i8")


def as_movable(x: "torch.Tensor") -> "torch.Tensor":
    """View an eight-bit float tensor as u8, so that torch can copy, fill and index it.

    Return other tensors unchanged.
    """
    import torch

    return x.view(torch.uint8) if DTYPE_NAMES.get(x.dtype) == "f8e4m3" else x


def as_cached(x: "torch.Tensor", dtype: "torch.dtype", scale: float) -> "torch.Tensor":
    """Convert keys or values `x` to what a cache of `dtype` stores: divide by `scale`, saturate and round."""
    import torch

    if scale != 1.0:
        x = x.to(torch.float64 if x.dtype is torch.float64 else torch.float32) / scale
    if is_narrow(dtype):
        most = HIGHEST[DTYPE_NAMES[dtype]]
        x = x.clamp(-most, most)  # torch turns larger numbers into NaN or the largest number, depending on its version
    if dtype is torch.int8:
        x = x.round().nan_to_num(0.0)  # the conversion truncates, and leaves NaN undefined
    return x.to(dtype)
