"""Files of tensors in pieces are, byte for byte, those that the safetensors library writes."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ingot.compile.pieces import Pieces
from ingot.compile.tensor_file import write_tensors
from ingot.frontend.safetensors_header import DTYPES, read_header


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.empty(shape, device="meta").numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def check(tensors: dict[str, Pieces], folder: Path) -> None:
    """The file is the library's, of the same tensors in one piece."""
    offsets = write_tensors(folder / "found", tensors)
    whole = {
        name: torch.cat([piece.contiguous().view(-1).view(torch.uint8) for piece in one.tensors])
        .view(one.dtype)
        .reshape(one.shape)
        for name, one in tensors.items()
    }
    save_file({name: tensor.clone() for name, tensor in whole.items()}, folder / "wanted")
    assert (folder / "found").read_bytes() == (folder / "wanted").read_bytes()
    assert offsets == {name: info.begin for name, info in read_header(folder / "wanted").items()}


def test_all_dtypes(tmp_path: Path) -> None:
    names = list(DTYPES.items())
    random.Random(0).shuffle(names)
    check({f"{index}.{name}": Pieces.of(bits((3, 5), dtype)) for index, (name, dtype) in enumerate(names)}, tmp_path)


def test_names(tmp_path: Path) -> None:
    names = ("b", "a", "a.b", 'quote"', "back\\slash", "tab\t", "\x7f", "ß", "\u2028", "\U0001f600", "\ue000")
    check({name: Pieces.of(bits((2,), torch.float32, index)) for index, name in enumerate(names)}, tmp_path)


def test_shapes(tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7, 1, 3)]
    check({str(shape): Pieces.of(bits(shape, torch.bfloat16)) for shape in shapes}, tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e8m0fnu, torch.float32, torch.bool])
def test_strided_pieces(dtype: torch.dtype, tmp_path: Path) -> None:
    """Small ones, ones of several buffers, rows that are larger than a buffer, and elements that are not neighbours."""
    small, many, large = bits((6, 4, 5), dtype), bits((9, 700, 1000), dtype), bits((2, 2, 3 << 20), dtype)
    pieces = {
        "every": (small[:, 0], small[:, 3]),
        "columns": (small[:, :, 1:3],),
        "transposed": (small.permute(2, 0, 1), small[:2, :4, :].permute(1, 2, 0)),
        "many": (many[:, ::2], many[::2]),
        "large": (large[:, 1], large[1, 0, ::3]),
        "repeated": (small[:1].expand(3, 4, 5),),
        "same": (small, small, small[2:3]),
        "scalar": (small[0, 0, 0],),
    }
    check({name: Pieces(dtype, (sum(one.numel() for one in of),), of) for name, of in pieces.items()}, tmp_path)


def test_tensors_that_share_bytes(tmp_path: Path) -> None:
    tensor = bits((4, 4), torch.int32)
    check({"a": Pieces.of(tensor), "b": Pieces.of(tensor), "c": Pieces.of(tensor[1:])}, tmp_path)
