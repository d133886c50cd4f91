"""The blocks of GGUF's quantized types: bytes of a row to codes, scales and offsets.

Written from llama.cpp's `ggml-common.h` (the structs) and `ggml-quants.c` (`dequantize_row_*`). A number is
`code * scale + offset`. Scales and offsets that a type stores as a product of two numbers are multiplied in float32, as
llama.cpp does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Parts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class BlockType:
    """A quantized type of GGUF.

    count      elements of a block
    bytes      bytes of a block
    element    the element type of the format, a key of `ELEMENTS`
    group      elements that share a scale
    scales     the dtype of the scales
    offsets    whether each scale has an offset
    read       bytes [..., bytes] -> "weight": codes [..., count], "scales" and "offsets" [..., count / group]
    """

    count: int
    bytes: int
    element: str
    group: int
    scales: torch.dtype
    offsets: bool
    read: Callable[[torch.Tensor], Parts]


def _halves(data: torch.Tensor) -> torch.Tensor:
    """Return numbers in float16 from two bytes each."""
    return data.contiguous().view(torch.float16)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the low four bits of all bytes, then the high ones."""
    return torch.cat([data & 15, data >> 4], -1)


def _signed(codes: torch.Tensor, offset: int) -> torch.Tensor:
    return (codes.to(torch.int16) - offset).to(torch.int8)


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """Return the bits of four bytes, the lowest first, as 16 for a set bit."""
    places = torch.arange(8, dtype=torch.uint8, device=data.device)
    found: torch.Tensor = (((data.unsqueeze(-1) >> places) & 1) << 4).flatten(-2)
    return found


def _q4_0(data: torch.Tensor) -> Parts:
    return {"weight": _nibbles(data[..., 2:]), "scales": _halves(data[..., :2])}


def _q4_1(data: torch.Tensor) -> Parts:
    offsets = _halves(data[..., 2:4]).float()
    return {"weight": _nibbles(data[..., 4:]), "scales": _halves(data[..., :2]), "offsets": offsets}


def _q5_0(data: torch.Tensor) -> Parts:
    codes = _nibbles(data[..., 6:]) | _fifth_bits(data[..., 2:6])
    return {"weight": _signed(codes, 16), "scales": _halves(data[..., :2])}


def _q5_1(data: torch.Tensor) -> Parts:
    codes = _nibbles(data[..., 8:]) | _fifth_bits(data[..., 4:8])
    return {"weight": codes, "scales": _halves(data[..., :2]), "offsets": _halves(data[..., 2:4]).float()}


def _q8_0(data: torch.Tensor) -> Parts:
    return {"weight": data[..., 2:].contiguous().view(torch.int8), "scales": _halves(data[..., :2])}


def _two_bits(data: torch.Tensor) -> torch.Tensor:
    """Return the codes of 64 bytes: of each half, the lowest two bits of its 32 bytes, then the next two, and so on."""
    halves = data.unflatten(-1, (2, 1, 32))
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=data.device)[:, None]
    found: torch.Tensor = ((halves >> places) & 3).flatten(-3)
    return found


def _q2_k(data: torch.Tensor) -> Parts:
    packed, most = data[..., :16], _halves(data[..., 80:84]).float()
    return {
        "weight": _two_bits(data[..., 16:80]),
        "scales": most[..., :1] * (packed & 15).float(),
        "offsets": -(most[..., 1:] * (packed >> 4).float()),
    }


def _q3_k(data: torch.Tensor) -> Parts:
    places = torch.arange(8, dtype=torch.uint8, device=data.device)[:, None]
    high = ((data[..., None, :32] >> places) & 1).flatten(-2)  # bit j of 32 bytes belongs to elements 32 j and up
    first, second, rest = data[..., 96:100], data[..., 100:104], data[..., 104:108]
    low = torch.cat([first & 15, second & 15, first >> 4, second >> 4], -1)
    two = torch.cat([(rest >> place) & 3 for place in (0, 2, 4, 6)], -1)
    six = (low | (two << 4)).float() - 32
    # A code of four bits, whose offset is 8: the two bits, and minus 4 unless the high bit is set.
    codes = _two_bits(data[..., 32:96]) + 4 + (high << 2)
    return {"weight": codes, "scales": _halves(data[..., 108:110]).float() * six}


def _six_bits(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and the offsets of eight groups from twelve bytes, six bits each."""
    a, b, c = data[..., :4], data[..., 4:8], data[..., 8:12]
    scales = torch.cat([a & 63, (c & 15) | ((a >> 6) << 4)], -1)
    offsets = torch.cat([b & 63, (c >> 4) | ((b >> 6) << 4)], -1)
    return scales.float(), offsets.float()


def _k_parts(data: torch.Tensor, codes: torch.Tensor) -> Parts:
    most, (scales, offsets) = _halves(data[..., :4]).float(), _six_bits(data[..., 4:16])
    return {"weight": codes, "scales": most[..., :1] * scales, "offsets": -(most[..., 1:] * offsets)}


def _runs(data: torch.Tensor) -> torch.Tensor:
    """Return the nibbles of each 32 bytes: their low four bits, then their high ones."""
    return _nibbles(data.unflatten(-1, (-1, 32))).flatten(-2)


def _q4_k(data: torch.Tensor) -> Parts:
    return _k_parts(data, _runs(data[..., 16:144]))


def _q5_k(data: torch.Tensor) -> Parts:
    places = torch.arange(8, dtype=torch.uint8, device=data.device)[:, None]
    fifth = (((data[..., None, 16:48] >> places) & 1) << 4).flatten(-2)
    return _k_parts(data, _runs(data[..., 48:176]) | fifth)


def _q6_k(data: torch.Tensor) -> Parts:
    low, high = data[..., :128].unflatten(-1, (2, 64)), data[..., 128:192].unflatten(-1, (2, 1, 32))
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=data.device)[:, None]
    codes = _nibbles(low) | (((high >> places) & 3) << 4).flatten(-2)
    scales = data[..., 192:208].contiguous().view(torch.int8).float()
    return {"weight": _signed(codes.flatten(-2), 32), "scales": _halves(data[..., 208:210]).float() * scales}


def _iq4_xs(data: torch.Tensor) -> Parts:
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=data.device)
    high = ((data[..., 2:4].unsqueeze(-1) >> places) & 3).flatten(-2)
    low = torch.stack([data[..., 4:8] & 15, data[..., 4:8] >> 4], -1).flatten(-2)
    codes = _nibbles(data[..., 8:136].unflatten(-1, (8, 16))).flatten(-2)
    return {"weight": codes, "scales": _halves(data[..., :2]).float() * ((low | (high << 4)).float() - 32)}


def _mxfp4(data: torch.Tensor) -> Parts:
    return {"weight": _nibbles(data[..., 1:]), "scales": data[..., :1].contiguous().view(torch.float8_e8m0fnu)}


_F16, _F32 = torch.float16, torch.float32
# By the name in gguf's GGMLQuantizationType.
BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(32, 18, "i4", 32, _F16, False, _q4_0),
    "Q4_1": BlockType(32, 20, "u4", 32, _F16, True, _q4_1),
    "Q5_0": BlockType(32, 22, "i8", 32, _F16, False, _q5_0),
    "Q5_1": BlockType(32, 24, "u8", 32, _F16, True, _q5_1),
    "Q8_0": BlockType(32, 34, "i8", 32, _F16, False, _q8_0),
    "Q2_K": BlockType(256, 84, "u4", 16, _F32, True, _q2_k),
    "Q3_K": BlockType(256, 110, "i4", 16, _F32, False, _q3_k),
    "Q4_K": BlockType(256, 144, "u4", 32, _F32, True, _q4_k),
    "Q5_K": BlockType(256, 176, "u8", 32, _F32, True, _q5_k),
    "Q6_K": BlockType(256, 210, "i8", 16, _F32, False, _q6_k),
    "IQ4_NL": BlockType(32, 18, "iq4nl", 32, _F16, False, _q4_0),
    "IQ4_XS": BlockType(256, 136, "iq4nl", 32, _F32, False, _iq4_xs),
    "MXFP4": BlockType(32, 17, "f4e2m1", 32, torch.float8_e8m0fnu, False, _mxfp4),
}


def read_blocks(rows: torch.Tensor, name: str) -> Parts:
    """Return the codes [N, K], the scales and the offsets of rows of blocks u8[N, bytes] of the type `name`."""
    kind = BLOCK_TYPES[name]
    found = kind.read(rows.unflatten(-1, (-1, kind.bytes)))
    return {part: tensor.flatten(-2).contiguous() for part, tensor in found.items()}
