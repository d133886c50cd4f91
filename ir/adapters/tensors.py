"""Read the tensors of a safetensors file that is in memory, without copying them.

The format: https://huggingface.co/docs/safetensors, "Format". The library copies all tensors while it holds Python's
lock. That would stop an engine that runs steps in another thread.
"""

import math
import struct
from typing import Any

import torch

from ingot.ir.json_text import parse_json

# An adapter has a few thousand tensors at most; their entries take some hundred bytes each.
_MAX_HEADER_BYTES = 16 << 20
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def tensors_in(data: bytearray | memoryview) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file by name, as views of its content `data`.

    Raises ValueError if the file is malformed, or if a tensor is not float32, bfloat16 or float16.
    """
    if len(data) < 8:
        raise ValueError(f"the file has {len(data)} bytes")
    (length,) = struct.unpack_from("<Q", data)
    start = 8 + length
    if length > _MAX_HEADER_BYTES or start > len(data):
        raise ValueError(f"the header has {length} bytes")
    header = parse_json(bytes(data[8:start]))
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    return {name: _tensor(data, start, name, entry) for name, entry in header.items() if name != "__metadata__"}


def _tensor(data: bytearray | memoryview, start: int, name: str, entry: Any) -> torch.Tensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name:.120} is malformed")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise ValueError(f"{name:.120} is {kind!r:.40}; expected: {', '.join(_DTYPES)}")
    if not all(isinstance(some, list) and all(map(_is_size, some)) for some in (shape, offsets)) or len(offsets) != 2:
        raise ValueError(f"the entry of {name:.120} is malformed")
    begin, end = start + offsets[0], start + offsets[1]
    count = math.prod(shape)
    if not begin <= end <= len(data) or end - begin != count * dtype.itemsize:
        raise ValueError(f"the bytes of {name:.120} are [{offsets[0]}, {offsets[1]}) of {len(data) - start}")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if begin % dtype.itemsize:  # torch reads aligned elements
        flat = torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=begin)
        return flat.clone().view(dtype).reshape(shape)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=begin).reshape(shape)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48
