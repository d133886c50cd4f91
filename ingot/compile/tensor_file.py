"""Write a safetensors file of tensors that are in pieces.

The library's `save_file` needs each tensor in one piece of memory, and no two that share bytes. The files are the same,
byte for byte.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from ingot.compile.pieces import Pieces
from ingot.frontend.safetensors_header import DTYPES

Bytes = npt.NDArray[np.uint8]

# The order of the file's tensors by dtype: the library's enum, backwards (safetensors/src/tensor.rs, Dtype). Larger
# elements come first, so that all are aligned.
_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Strided pieces are copied to this many bytes of reused memory, which a core's cache holds. Fresh memory of their size
# would take several times as long as the copy.
_BUFFER_BYTES = 1 << 20
# Integers of the size of an element. numpy lacks some of torch's dtypes, and a copy need not know the numbers.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def write_tensors(path: Path, tensors: Mapping[str, Pieces]) -> dict[str, int]:
    """Write a safetensors file. Return where the bytes of each tensor begin in it, by name."""
    ordered = sorted(tensors.items(), key=lambda item: (_ORDER.index(_NAMES[item[1].dtype]), item[0]))
    header, begins, end = {}, {}, 0
    for name, tensor in ordered:
        begins[name], end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [begins[name], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        _write(file, memoryview(struct.pack("<Q", len(text)) + text))
        buffer: Bytes = np.empty(_BUFFER_BYTES, np.uint8)
        for _, tensor in ordered:
            for piece in tensor.tensors:
                _write_piece(file, piece, buffer)
    return {name: 8 + len(text) + begin for name, begin in begins.items()}


def _write(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]  # the system writes at most 2 GiB at once


def _write_piece(file: BinaryIO, piece: torch.Tensor, buffer: Bytes) -> None:
    """Write the elements of a tensor in row-major order."""
    if piece.numel() == 0:
        return
    words = piece.detach().cpu().view(_WORDS[piece.element_size()])
    if words.is_contiguous():
        _write(file, words.flatten().numpy().view(np.uint8).data)
    elif words[0].nbytes > len(buffer):
        for part in words:
            _write_piece(file, part, buffer)
    else:
        # numpy copies with one thread. torch's threads wait for one another at each copy, which is small here.
        count = len(buffer) // words[0].nbytes
        for rows in words.split(count):
            staged = buffer[: rows.nbytes].view(rows.numpy().dtype).reshape(rows.shape)
            np.copyto(staged, rows.numpy())
            _write(file, buffer[: rows.nbytes].data)
