"""The linear with a quantized weight: one op for all schemes."""

import torch
import torch.nn.functional as F

from ingot.ir.ops.registry import Sample, define, wide
from ingot.ir.schemes import dequantize, find_scheme, quantize
from ingot.ir.types import DTYPE_NAMES


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    x, bias = torch.randn(5, 64, generator=g).to(dtype), torch.randn(24, generator=g).to(dtype)
    samples = []
    for scheme, last in (("int8", ()), ("int4_g32", (bias,)), ("int8_g64", ())):
        parts = quantize(torch.randn(24, 64, generator=g), find_scheme(scheme))
        samples.append(Sample((x, *parts.values(), *last), {"scheme": scheme}))
    return samples


def _flops(x: torch.Tensor, weight: torch.Tensor, *_: torch.Tensor | None, scheme: str) -> int:
    return 2 * x.numel() * weight.shape[0]


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    scheme: str,
) -> torch.Tensor:
    """The shape, once every part is what the scheme says: nothing else would notice a scale of a wrong group."""
    found = find_scheme(scheme)
    if problem := found.obstacle((weight.shape[0], x.shape[-1])):
        raise ValueError(f"scheme {scheme}: {problem}")
    given = {"weight": weight, "scales": scales, **({} if zeros is None else {"zeros": zeros})}
    wanted = found.types((weight.shape[0], x.shape[-1]))
    if given.keys() != wanted.keys():
        raise ValueError(f"scheme {scheme} has {', '.join(wanted)}, and {', '.join(given)} are given")
    for name, part in given.items():
        if part.dtype != wanted[name].dtype or tuple(part.shape) != wanted[name].shape:
            raise ValueError(
                f"scheme {scheme} has {name} {wanted[name]}, and {DTYPE_NAMES[part.dtype]}{list(part.shape)} are given"
            )
    return F.linear(x, x.new_empty(weight.shape[0], x.shape[-1]), bias)


@define(
    rows=("x",),
    samples=_samples,
    fake=_fake,
    flops=_flops,
)
def quant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    scheme: str,
) -> torch.Tensor:
    """`x @ w.T + bias` with x [T, K], bias [N], and w [N, K] what weight, scales and zeros stand for by `scheme`
    (`ingot.ir.schemes`): [T, N] in x's dtype, computed in float32 and rounded once."""
    full = wide(x)
    matrix = dequantize(weight, scales, zeros, find_scheme(scheme), full.dtype)
    return F.linear(full, matrix, None if bias is None else wide(bias)).to(x.dtype)
