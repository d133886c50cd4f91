"""The dtype of a KV cache: the dtype of the keys, or eight-bit floats with one scale for keys and one for values.

An f8e4m3 cache (OCP 8-bit floating point, arXiv 2209.05433) stores k / k_scale and v / v_scale. It divides in float32,
saturates at 448 and rounds to nearest, ties to even. NaN stays NaN. Attention multiplies back: `k_scale` joins the
softmax scale, and `v_scale` multiplies the result before it is rounded.

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
CACHE_DTYPES: Mapping[str, "torch.dtype | None"] = {"auto": None, "fp8": DTYPES["f8e4m3"]}


class Typed(Protocol):
    """Anything with a dtype: a tensor, or the type of one in a program."""

    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True)
class CacheScales:
    """The scales of an eight-bit KV cache: a write divides keys by `k` and values by `v`.

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
        """Return the scales `k_scale` and `v_scale` of an op call; `call` maps parameter names to arguments."""
        return CacheScales(call["k_scale"], call["v_scale"])

    def options(self) -> dict[str, float]:
        """Return the op attributes `k_scale` and `v_scale`, without those that are 1.0, the default."""
        return {name: value for name, value in (("k_scale", self.k), ("v_scale", self.v)) if value != 1.0}


def is_narrow(dtype: "torch.dtype") -> bool:
    """Return whether `dtype` is f8e4m3, the eight-bit float that a KV cache can have in place of the model's dtype."""
    return DTYPE_NAMES.get(dtype) == "f8e4m3"


def check_cache_dtype(kv: Typed, keys: Typed, k_scale: float, v_scale: float) -> None:
    """Raise VerifyError unless the cache `kv` can store keys and values of the dtype of `keys`.

    The cache must have that dtype, or be f8e4m3 (eight-bit float). Scales other than 1.0 need an f8e4m3 cache. Queries
    may be passed as `keys`.
    """
    if kv.dtype != keys.dtype and not is_narrow(kv.dtype):
        found = " for ".join(DTYPE_NAMES.get(one.dtype, str(one.dtype)) for one in (kv, keys))
        raise VerifyError(f"a cache of {found}", expected="the dtype of keys and queries, or f8e4m3")
    if (options := CacheScales(k_scale, v_scale).options()) and not is_narrow(kv.dtype):
        raise VerifyError(f"{options} for a cache of {DTYPE_NAMES[kv.dtype]}", expected="scales only with f8e4m3")


def as_movable(x: "torch.Tensor") -> "torch.Tensor":
    """Return an eight-bit float tensor viewed as u8; other tensors are returned unchanged.

    torch cannot copy, fill and index all eight-bit float dtypes.
    """
    import torch

    return x.view(torch.uint8) if is_narrow(x.dtype) else x


def as_cached(x: "torch.Tensor", dtype: "torch.dtype", scale: float) -> "torch.Tensor":
    """Return keys or values `x` as a cache of `dtype` stores them: divided by `scale`, saturated and rounded."""
    import torch

    if scale != 1.0:
        x = x.to(torch.float64 if x.dtype is torch.float64 else torch.float32) / scale
    if is_narrow(dtype):
        most = torch.finfo(dtype).max
        x = x.clamp(-most, most)  # torch turns larger numbers into NaN or the largest number, depending on its version
    return x.to(dtype)
