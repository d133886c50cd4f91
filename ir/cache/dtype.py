"""The dtype of a KV cache: the dtype of the keys, or eight bits with scales for keys and values.

A cache of eight bits stores k / k_scale and v / v_scale. It divides in float32, saturates and rounds to nearest, ties
to even:

- f8e4m3 (OCP 8-bit floating point, arXiv 2209.05433) saturates at 448. NaN stays NaN.
- i8 saturates at 127 on both sides and never stores -128. NaN, which it does not have, is stored as 0.

Attention multiplies back: `k_scale` joins the softmax scale, and `v_scale` multiplies the result before it is rounded.

Scales that are known at compile time are attributes of the ops, and kernels fold the scale of keys into a constant. So
layers with different scales share no executables.

With scales per token, the key and the value of each token and head have a scale of their own, computed when they are
written: the largest magnitude of the row divided by the largest number of the dtype, in float32. It is stored at the
end of the row (`ingot.ir.cache.form`), so whatever copies or frees a page takes the scales along. A row with NaN or
infinity has the scale NaN and is read as NaN.
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
# The op arguments for the scales of a cache, with their defaults.
SCALE_DEFAULTS: Mapping[str, float | bool] = {"k_scale": 1.0, "v_scale": 1.0, "per_token": False}


class Typed(Protocol):
    """Anything with a dtype: a tensor, or the type of a tensor in a program."""

    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True)
class CacheScales:
    """The scales of an eight-bit KV cache. Keys are divided by `k` and values by `v` when they are written.

    With `per_token`, each key and value has its own scale in the cache, and `k` and `v` must be 1.0. Raises VerifyError
    unless both are positive numbers.
    """

    k: float = 1.0
    v: float = 1.0
    per_token: bool = False

    def __post_init__(self) -> None:
        for name, value in (("k_scale", self.k), ("v_scale", self.v)):
            if not (math.isfinite(value) and value > 0):
                raise VerifyError(f"{name} {value}", expected="a positive number")
            if self.per_token and value != 1.0:
                raise VerifyError(f"{name} {value} with scales per token", expected="one of the two")

    @staticmethod
    def of(call: Mapping[str, Any]) -> "CacheScales":
        """Return the scales of an op call, from its arguments `k_scale`, `v_scale` and `per_token`.

        `call` holds all arguments by name. The traced op `attention` has no `per_token`.
        """
        return CacheScales(call["k_scale"], call["v_scale"], call.get("per_token", False))

    def options(self) -> dict[str, float | bool]:
        """Return the scales as op arguments `k_scale`, `v_scale` and `per_token`, without those at their defaults."""
        given = zip(SCALE_DEFAULTS, (self.k, self.v, self.per_token), strict=True)
        return {name: value for name, value in given if value != SCALE_DEFAULTS[name]}


def is_narrow(dtype: "torch.dtype") -> bool:
    """Return whether `dtype` is one of the eight-bit dtypes that a KV cache can have: f8e4m3 or i8."""
    return DTYPE_NAMES.get(dtype) in HIGHEST


def check_cache_dtype(kv: Typed, keys: Typed, scales: CacheScales) -> None:
    """Raise VerifyError if the cache `kv` cannot store keys and values of the dtype of `keys`.

    It can if both dtypes are equal, or if the cache is f8e4m3 or i8. Scales other than 1.0 need one of these two.
    Queries may be passed as `keys`, because their dtype is equal.
    """
    if kv.dtype != keys.dtype and not is_narrow(kv.dtype):
        found = " for ".join(DTYPE_NAMES.get(one.dtype, str(one.dtype)) for one in (kv, keys))
        raise VerifyError(f"a cache of {found}", expected="the dtype of keys and queries, f8e4m3 or i8")
    if (options := scales.options()) and not is_narrow(kv.dtype):
        raise VerifyError(f"{options} for a cache of {DTYPE_NAMES[kv.dtype]}", expected="scales only with f8e4m3 or i8")


def as_movable(x: "torch.Tensor") -> "torch.Tensor":
    """View an eight-bit float tensor as u8, so that torch can copy, fill and index it.

    Return other tensors unchanged.
    """
    import torch

    return x.view(torch.uint8) if DTYPE_NAMES.get(x.dtype) == "f8e4m3" else x


def row_scales(x: "torch.Tensor", dtype: "torch.dtype") -> "torch.Tensor":
    """Return the scales f32[T, KV] of keys or values x [T, KV, D], for a cache of `dtype` with scales per token.

    A scale is the largest magnitude of the row divided by the largest number of `dtype`. It is at least the smallest
    normal number, so that rows of zeros can be divided by it. It is NaN if the row has NaN or infinity.
    """
    import torch

    most = x.abs().amax(-1).to(torch.float32)
    # Divides by a tensor: on a GPU, torch multiplies by the reciprocal of a Python number, which rounds differently.
    scales = most / torch.full_like(most, HIGHEST[DTYPE_NAMES[dtype]])
    return torch.where(scales.isfinite(), scales.clamp(min=torch.finfo(torch.float32).tiny), float("nan"))


def as_cached(x: "torch.Tensor", dtype: "torch.dtype", scale: "float | torch.Tensor") -> "torch.Tensor":
    """Convert keys or values `x` [T, KV, D] to what a cache of `dtype` stores: divide by `scale`, saturate and round.

    `scale` is a number, or a tensor f32[T, KV].
    """
    import torch

    if not isinstance(scale, float):
        scale = scale[..., None]
    if not isinstance(scale, float) or scale != 1.0:
        x = x.to(torch.float64 if x.dtype is torch.float64 else torch.float32) / scale
    if is_narrow(dtype):
        most = HIGHEST[DTYPE_NAMES[dtype]]
        x = x.clamp(-most, most)  # torch turns larger numbers into NaN or the largest number, depending on its version
    if dtype is torch.int8:
        x = x.round().nan_to_num(0.0)  # the conversion truncates, and leaves NaN undefined
    return x.to(dtype)
