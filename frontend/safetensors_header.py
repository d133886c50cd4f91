"""The header of one safetensors file, read without trusting its content.

The format (https://huggingface.co/docs/safetensors, "Format"): eight bytes with the header's length N, little endian;
N bytes of JSON, name -> {dtype, shape, data_offsets} and an optional `__metadata__`; then the tensors, which cover the
rest exactly. This module parses it instead of the library, so that every error can name the file, the tensor, and the
expected and found values.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.ir.errors import CheckpointError
from ingot.ir.json_text import parse_json

MAX_HEADER_BYTES = 100_000_000  # the library's own limit (safetensors/src/tensor.rs, MAX_HEADER_SIZE)
MAX_DIMS = 64  # more dimensions than torch's operators take (at::kMaxDims in TensorIterator.h)

# Types of the format below one byte (F4, F6_*) are missing: torch has no dtype with one such value per element.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class TensorInfo:
    """The dtype, shape and location of a stored tensor. Its bytes are [begin, end) of `file`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the dtype, shape and location of each tensor in a safetensors file, by name, in the order of the bytes.

    Only the header is read, at most MAX_HEADER_BYTES. Raises CheckpointError if the file cannot be read, or if its
    header does not describe its bytes exactly.
    """
    try:
        if not file.is_file():
            raise CheckpointError(f"{file.name} is not a file", where=str(file), expected="a safetensors file")
        size = file.stat().st_size
        with file.open("rb") as stream:
            text = _header_text(file, size, stream.read(8), stream.read)
    except OSError as error:
        raise CheckpointError(f"{file.name} cannot be read: {error.strerror}", where=str(file)) from error
    try:
        header = parse_json(text)
    except ValueError as error:
        raise _damaged(file, f"the header is not JSON: {_short(str(error))}", expected="a JSON object") from None
    if not isinstance(header, dict):
        raise _damaged(file, f"the header is {_short(header)}", expected="a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(file, f"__metadata__ is {_short(metadata)}", expected="an object of strings")

    start = 8 + len(text)
    tensors = sorted(
        (_tensor(file, start, name, entry) for name, entry in header.items()), key=lambda info: (info.begin, info.end)
    )
    _check_cover(file, start, size, tensors)
    return {info.name: info for info in tensors}


def read_metadata(file: Path) -> dict[str, str]:
    """Return the texts that a valid safetensors file has besides its tensors; empty if it has none."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = parse_json(stream.read(length))
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    return {name: value for name, value in metadata.items() if isinstance(value, str)}


def _header_text(file: Path, size: int, prefix: bytes, read: Callable[[int], bytes]) -> bytes:
    if size == 0:
        raise _damaged(file, "the file is empty", expected="at least 10 bytes")
    if prefix == b"version ":
        raise CheckpointError(
            f"{file.name} is a Git LFS pointer, not the tensors",
            where=str(file),
            expected="a safetensors file",
            hint="run `git lfs pull` in the checkpoint folder, or download the checkpoint with huggingface_hub",
        )
    if len(prefix) < 8:
        raise _damaged(file, f"the file has {size} bytes", expected="8 bytes of header length, then the header")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise _damaged(file, f"the header length is {length}", expected=f"at most {MAX_HEADER_BYTES} bytes")
    if length > size - 8:
        raise _damaged(
            file,
            f"the header needs {length} bytes from byte 8 on, the file has {size} bytes",
            expected=f"at least {8 + length} bytes",
        )
    text = read(length)
    if len(text) != length:
        raise _damaged(file, f"the file shrank while it was read, to {len(text)} bytes of header", expected=f"{length}")
    return text


def _tensor(file: Path, start: int, name: str, entry: object) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(file, f"the entry is {_short(entry)}", tensor=name, expected="dtype, shape and data_offsets")
    dtype_name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise _damaged(file, f"the dtype is {_short(dtype_name)}", tensor=name, expected="one of " + ", ".join(DTYPES))
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_size, shape)):
        raise _damaged(
            file, f"the shape is {_short(shape)}", tensor=name, expected=f"at most {MAX_DIMS} sizes, none negative"
        )
    is_span = isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_size, offsets))
    if not is_span or offsets[0] > offsets[1]:
        raise _damaged(file, f"data_offsets is {_short(offsets)}", tensor=name, expected="[begin, end], begin <= end")
    # The strides of an empty tensor must fit 64 bits too, so its zero sizes count as ones.
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 1 << 63:
        raise _damaged(file, f"the shape is {_short(shape)}", tensor=name, expected="fewer than 2**63 bytes")
    expected = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != expected:
        raise _damaged(
            file,
            f"the data_offsets {offsets} span {offsets[1] - offsets[0]} bytes",
            tensor=name,
            expected=f"{expected} bytes for {dtype_name} {_short(shape)}",
        )
    return TensorInfo(name, dtype, tuple(shape), file, start + offsets[0], start + offsets[1])


def _check_cover(file: Path, start: int, size: int, tensors: list[TensorInfo]) -> None:
    cursor = start
    for info in tensors:
        if info.begin != cursor:
            kind = "overlap the tensor before" if info.begin < cursor else "leave a hole before them"
            raise _damaged(
                file,
                f"the bytes [{info.begin}, {info.end}) {kind}",
                tensor=info.name,
                expected=f"to begin at byte {cursor}",
            )
        if info.end > size:
            raise _damaged(
                file,
                f"the file is truncated: it has {size} bytes, the tensor is at [{info.begin}, {info.end})",
                tensor=info.name,
                expected=f"{max(other.end for other in tensors)} bytes",
            )
        cursor = info.end
    if cursor != size:
        raise _damaged(file, f"{size - cursor} bytes follow the last tensor", expected=f"a file of {cursor} bytes")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _short(value: object) -> str:
    """Return a value as text for an error message, shortened. A malformed header may hold megabytes of text."""
    if isinstance(value, (list, dict)) and len(value) > 20:
        return f"{type(value).__name__} of {len(value)} items"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


def _damaged(file: Path, found: str, *, tensor: str | None = None, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{file.name} is not a valid safetensors file: {found}",
        where=str(file) + (f", tensor {_short(tensor)}" if tensor is not None else ""),
        expected=expected,
        hint="download or convert the file again",
    )
