"""Steps of recipes that turn the tensors of quantized checkpoints into the parts of a format (`ingot.ir.formats`).

They move and reinterpret bits, so that no number of the checkpoint is rounded. `multiply` and `reciprocal` are the
exceptions, for files that store a scale as several numbers.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ingot.ir.formats import PACKINGS
from ingot.ir.stored.gguf_blocks import read_blocks
from ingot.ir.types import DTYPES

Attrs = Mapping[str, Any]
_LEAST = torch.finfo(torch.float32).tiny
_MOST_POWER = 127 + 65  # 2^65 as f8e8m0, which adds 127 to exponents


def unpack(words: torch.Tensor, attrs: Attrs) -> torch.Tensor:
    """Return the codes of `bits` bits that integers hold along the axis `dim`, as u8.

    Code i is at bits i * bits and up of the little-endian row of words, the lowest bit first. With `order`, code i of
    each run of len(order) codes is the stored code order[i] instead. `size` is the number of codes that are kept; 0:
    all of them.
    """
    bits, dim, order, size = int(attrs["bits"]), int(attrs["dim"]), list(attrs["order"]), int(attrs["size"])
    stored = words.movedim(dim, -1).contiguous().view(torch.uint8)
    if bits == 8:
        codes = stored
    elif bits == 4:
        codes = torch.stack((stored & 15, stored >> 4), -1).flatten(-2)
    else:
        places = torch.arange(8, dtype=torch.uint8, device=stored.device)
        single = ((stored.unsqueeze(-1) >> places) & 1).flatten(-2)
        single = single[..., : single.shape[-1] // bits * bits].unflatten(-1, (-1, bits))
        weights = 1 << torch.arange(bits, dtype=torch.uint8, device=stored.device)
        codes = (single * weights).sum(-1, dtype=torch.uint8)
    if order:
        codes = codes.unflatten(-1, (-1, len(order)))[..., order].flatten(-2)
    if size > codes.shape[-1]:
        raise ValueError(f"{codes.shape[-1]} codes are stored, and {size} are needed")
    return (codes[..., :size] if size else codes).movedim(-1, dim).contiguous()


def pack(codes: torch.Tensor, attrs: Attrs) -> torch.Tensor:
    """Return a matrix of codes in the order of the packing `packing`, as a format stores them."""
    return PACKINGS[str(attrs["packing"])].pack(codes).contiguous()


def bitcast(tensor: torch.Tensor, attrs: Attrs) -> torch.Tensor:
    """Return the same bits as numbers of `dtype`, which has as many bits."""
    dtype = DTYPES[str(attrs["dtype"])]
    if dtype.itemsize != tensor.dtype.itemsize:
        raise ValueError(f"{dtype} has another size than {tensor.dtype}")
    return tensor.contiguous().view(dtype)


def shift(codes: torch.Tensor, attrs: Attrs) -> torch.Tensor:
    """Return `(code + add) mod 2**bits` for each code, as u8."""
    return ((codes.to(torch.int32) + int(attrs["add"])) & ((1 << int(attrs["bits"])) - 1)).to(torch.uint8)


def group_order(groups: torch.Tensor, attrs: Attrs) -> torch.Tensor:
    """Return the columns of a weight, sorted by the group whose scale each has, as i32.

    `groups` has the group of each column. Columns of one group keep their order. Raises ValueError if a group but the
    last has not exactly `size` columns.
    """
    size, count = int(attrs["size"]), groups.numel()
    expected = torch.arange(count, device=groups.device) // size
    order = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[order], expected):
        raise ValueError(f"the groups of the columns are not {math.ceil(count / size)} groups of {size}")
    return order.to(torch.int32)


def gather(tensor: torch.Tensor, order: torch.Tensor, attrs: Attrs) -> torch.Tensor:
    """Return `tensor` with the entries `order` of its axis `dim`, in that order."""
    return tensor.index_select(int(attrs["dim"]), order.long())


def check_scales(scales: torch.Tensor, attrs: Attrs) -> torch.Tensor:
    """Return scales unchanged. Raises ValueError if one is NaN, infinite, zero or subnormal in float32.

    With `zero`, a scale may be zero: files write it for blocks of zeros. The smallest power of two of f8e8m0 is
    subnormal, and is allowed. Those above 2^65 are not: no model has such weights, and kernels multiply elements by
    scales in bf16.
    """
    if _all_fit(scales):
        return scales
    wide = scales.double()
    bad = {"NaN or infinite": ~wide.isfinite()}
    if not attrs["zero"]:
        bad["zero"] = wide == 0
    if scales.dtype is torch.float8_e8m0fnu:
        bad["larger than 2^65"] = wide > 2.0**65
    else:
        bad["subnormal"] = (wide != 0) & (wide.abs() < _LEAST)
    for kind, places in bad.items():
        if bool(places.any()):
            first = tuple(int(index) for index in places.nonzero()[0])
            raise ValueError(f"{int(places.sum())} of {scales.numel()} scales are {kind}, the first at {list(first)}")
    return scales


def _all_fit(scales: torch.Tensor) -> bool:
    """Return whether `check_scales` allows all scales, without a copy in float64. False: it must look at each.

    Most checkpoints have only such scales. To look at each takes a dozen operations, in each of which torch's threads
    wait for one another. They are delayed while files are written, and that took up to half of the time of packing.
    """
    if scales.numel() == 0:
        return True
    if scales.dtype is torch.float8_e8m0fnu:
        return int(scales.view(torch.uint8).cpu().numpy().max()) <= _MOST_POWER  # 255 is NaN; numpy has one thread
    if scales.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    least, most = (float(one) for one in scales.aminmax())  # NaN if a scale is
    return least >= _LEAST and most < math.inf


def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the product in float32, where axes of size 1 are repeated."""
    return left.to(torch.float32) * right.to(torch.float32)


STORED_STEPS: Mapping[str, Callable[[list[torch.Tensor], Attrs], torch.Tensor | dict[str, torch.Tensor]]] = {
    "unpack": lambda args, attrs: unpack(args[0], attrs),
    "pack": lambda args, attrs: pack(args[0], attrs),
    "bitcast": lambda args, attrs: bitcast(args[0], attrs),
    "shift": lambda args, attrs: shift(args[0], attrs),
    "group_order": lambda args, attrs: group_order(args[0], attrs),
    "gather": lambda args, attrs: gather(args[0], args[1], attrs),
    "check_scales": lambda args, attrs: check_scales(args[0], attrs),
    "multiply": lambda args, attrs: multiply(args[0], args[1]),
    "reciprocal": lambda args, attrs: 1.0 / args[0].to(torch.float32),
    "gguf_blocks": lambda args, attrs: read_blocks(args[0], str(attrs["type"])),
    "lookup": lambda args, attrs: args[0].flatten()[args[1].long()],
}
